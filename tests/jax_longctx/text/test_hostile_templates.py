"""Chat templates that a stranger wrote: one line in bounded time and memory, or the right text."""

import os
import signal
import time

import pytest

from jax_longctx.errors import ConfigError, InputError
from jax_longctx.text import tokenizer
from jax_longctx.text.tokenizer import ChatTemplate

LOOP, END = "{% for i in range(99999) %}", "{% endfor %}"
TOO_LONG, TOO_MUCH = "takes more than 0.1 s of processor time", "it takes too much memory"
NESTED = "{% set n = namespace(s=[]) %}{% for i in range(9999) %}{% set n.s = [n.s] %}{% endfor %}"


@pytest.fixture(autouse=True)
def limits(monkeypatch):
    """Less than users have, so that these tests are quick."""
    monkeypatch.setattr(tokenizer, "SECONDS", 0.5)
    monkeypatch.setattr(tokenizer, "MEMORY", 2**28)


def render(source, content="hello"):
    messages = [{"role": "user", "content": content}]
    return ChatTemplate(source, {}).render(messages, add_generation_prompt=True)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        # Time.
        pytest.param(LOOP * 3 + "x" + END * 3, TOO_LONG, id="nested loops"),
        pytest.param(LOOP * 4 + END * 4, TOO_LONG, id="nested loops without a word"),
        pytest.param(
            "{% set c = cycler(1, 2) %}" + LOOP * 3 + "{{ c.next() }}" + END * 3,
            TOO_LONG,
            id="cycler",
        ),
        pytest.param(
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
            "{{ f(60) }}",
            TOO_LONG,
            id="doubling macro",
        ),
        pytest.param("{{ 7 ** (10 ** 8) % 10 }}", TOO_LONG, id="power"),
        pytest.param("{{ lipsum(n=10 ** 7) }}", TOO_LONG, id="lipsum"),
        pytest.param("{{ 1 }}" * 1_400_000, TOO_LONG, id="10 MB of expressions"),
        # Memory and size.
        pytest.param("{{ 'a' * 10 ** 9 }}", TOO_MUCH, id="string multiplication"),
        pytest.param("{{ [1] * 10 ** 9 }}", TOO_MUCH, id="list multiplication"),
        pytest.param("{{ '%1000000000d' % 1 }}", TOO_MUCH, id="format width"),
        pytest.param("{{ '{:>1000000000}'.format(1) }}", TOO_MUCH, id="format method"),
        pytest.param(
            # It grows a thousandfold a turn: little is copied before the turn that fails.
            "{% set n = namespace(s='aa') %}"
            + LOOP
            + "{% set n.s = ([n.s] * 1000) | join %}"
            + END,
            TOO_MUCH,
            id="namespace",
        ),
        pytest.param("{{ range(99999) | join('x' * 9999) }}", TOO_MUCH, id="join"),
        pytest.param("{{ ('a' * 10 ** 7) | replace('a', 'b' * 99) }}", TOO_MUCH, id="replace"),
        pytest.param("{{ 'a' * 2 * 10 ** 6 }}", "renders 2,000,000 characters", id="long text"),
        pytest.param("{{ range(10 ** 9) }}", "OverflowError: Range too big", id="range"),
        # Depth.
        pytest.param(
            "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError", id="macro"
        ),
        pytest.param("{% block a %}{{ self.a() }}{% endblock %}", "RecursionError", id="block"),
        pytest.param(
            "{% for m in [1] recursive %}{{ loop([1]) }}{% endfor %}",
            "RecursionError",
            id="recursive loop",
        ),
        pytest.param("{{ " + "(" * 200_000 + "1 }}", "RecursionError", id="brackets"),
        pytest.param("{{ " + "not " * 99_999 + "1 }}", "RecursionError", id="operators"),
        pytest.param("{% if 1 %}" * 5_000, "RecursionError", id="nested blocks"),
        pytest.param(LOOP * 30 + END * 30, "too many statically nested", id="30 loops"),
        pytest.param(NESTED + "{{ n.s }}", "RecursionError", id="nested lists"),
        pytest.param(NESTED + "{{ raise_exception(n.s) }}", "ends the process", id="its message"),
        # Python's own errors.
        pytest.param("{% include 'x' %}", "no loader", id="include"),
        pytest.param("{% import 'x' as y %}", "no loader", id="import"),
        pytest.param("{% extends 'x' %}", "no loader", id="extends"),
        pytest.param("{{ 1 + 'a' }}", "TypeError: unsupported operand", id="types"),
        pytest.param("{{ messages[0]['content'] + none }}", "TypeError", id="none"),
        pytest.param("{{ 1 / 0 }}", "ZeroDivisionError", id="division"),
        pytest.param("{{ raise_exception() }}", "TypeError", id="no argument"),
        pytest.param("{{ strftime_now(3) }}", "TypeError", id="no pattern"),
        pytest.param("{{ messages | tojson(nosuch=1) }}", "TypeError", id="no such option"),
        pytest.param("{{ " + "9" * 9_999 + " }}", "ValueError: Exceeds the limit", id="digits"),
        # Syntax.
        pytest.param("a\n{% for %}", "is not valid at its line 2", id="statement"),
        pytest.param("{{", "is not valid at its line 1", id="no end"),
        pytest.param("{%" * 10**6, "is not valid at its line 1", id="openings"),
        pytest.param("{% nosuch %}", "unknown tag 'nosuch'; repair it", id="tag"),
        pytest.param("{{ 1 | nosuch }}", "No filter named 'nosuch'", id="filter"),
        pytest.param("{% generation %}", "is not valid at its line 1", id="open block"),
        pytest.param("{% break %}", "'break' outside loop", id="break"),
    ],
)
def test_a_template_that_fails_is_one_line(monkeypatch, source, message):
    if message == TOO_LONG:
        monkeypatch.setattr(tokenizer, "SECONDS", 0.1)
    with pytest.raises(ConfigError) as found:
        render(source)
    text = str(found.value)
    assert message in text and text.endswith("; repair it, or ask without it (--no-chat)")
    assert text.startswith("the chat template ") and text.isprintable() and len(text) < 450
    # Where the process ended, another one renders.
    monkeypatch.setattr(tokenizer, "SECONDS", 0.5)
    assert render("{{ messages[0].content }}") == "hello"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        pytest.param("{{ ''.__class__ }}{{ [].__class__.__base__() }}", "unsafe", id="class"),
        pytest.param("{{ cycler.__init__.__globals__ }}", "unsafe", id="globals"),
        pytest.param("{{ messages.clear() }}", "unsafe", id="changes the messages"),
        pytest.param("{{ nosuch() }}", "'nosuch' is undefined", id="undefined function"),
        pytest.param("{{ a.b.c }}", "'a' is undefined", id="undefined value"),
        pytest.param("{{ raise_exception(3) }}", "messages: 3", id="number"),
        pytest.param("{{ raise_exception(nosuch) }}", "it does not say why", id="nothing"),
        pytest.param("{{ raise_exception('a\n\x1b[2J' * 10 ** 5) }}", "a [2Ja [2Ja", id="long"),
    ],
)
def test_a_refusal_is_one_line(source, message):
    with pytest.raises(InputError, match="the chat template refuses the messages: ") as found:
        render(source)
    text = str(found.value)
    assert message in text and text.isprintable() and len(text) < 400


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("", ""),
        ("x" * 10_000_000, "x" * 10_000_000),
        ("\0\ud800{{ messages[0].content }}", "\0\ud800hello"),
        ("{{ '{0.__class__}'.format(1) }}{{ ''|attr('__class__') }}", ""),
        ("{% for a in range(9999) %}{{ a % 10 }}{% endfor %}", ("0123456789" * 1000)[:-1]),
        (
            "{% set n = namespace(k=0) %}{% for m in messages %}{% set n.k = 5 %}{% endfor %}"
            "{{ n.k }}",
            "5",
        ),
        ("{{ messages[0].content }}" * 2, "hellohello"),
    ],
)
def test_an_odd_template_renders(monkeypatch, source, text):
    monkeypatch.undo()
    assert render(source) == text


def test_a_long_document_is_rendered():
    document = "Größe " * 500_000
    assert render("<{{ messages[0].content }}>", document) == f"<{document}>"


def test_rendering_again_takes_no_new_process():
    template = ChatTemplate("{{ messages | length }}", {})
    template.render([], add_generation_prompt=True)
    process = tokenizer._RENDERER._process
    begun = time.perf_counter()
    assert [template.render([], add_generation_prompt=True) for _ in range(100)] == ["0"] * 100
    assert tokenizer._RENDERER._process is process
    # 0.1 ms each on an idle machine; a process each would take 100 ms.
    assert time.perf_counter() - begun < 2


def test_an_interrupt_leaves_no_reply_behind():
    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            render(LOOP * 3 + END * 3)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert render("{{ messages[0].content }}") == "hello"


def test_a_process_that_was_killed_is_replaced():
    assert render("a") == "a"
    process = tokenizer._RENDERER._process
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert render("b") == "b"
