import os
import signal

import pytest

from jax_longctx.errors import ConfigError, InputError
from jax_longctx.text import child
from jax_longctx.text.child import ChatTemplate

LOOP, END = "{% for i in range(99999) %}", "{% endfor %}"
TOO_LONG, TOO_MUCH = "takes more than 0.1 s of processor time", "it takes too much memory"
SOME = "{% set n = namespace(s='aa') %}"
NESTED = "{% set n = namespace(s=[]) %}{% for i in range(9999) %}{% set n.s = [n.s] %}{% endfor %}"


@pytest.fixture(autouse=True)
def limits(monkeypatch):
    """Less than users have, so that these tests are quick."""
    monkeypatch.setattr(child, "SECONDS", 0.5)
    monkeypatch.setattr(child, "MEMORY", 2**28)


def render(source, content="hello"):
    messages = [{"role": "user", "content": content}]
    return ChatTemplate(source, {}).render(messages, add_generation_prompt=True)


# One of each kind of fault, by its name: the template, and what is said.
FAULTS = {
    "endless loops": (LOOP * 3 + "x" + END * 3, TOO_LONG),
    "endless arithmetic": ("{{ 7 ** (10 ** 8) % 10 }}", TOO_LONG),
    "10 MB of expressions": ("{{ 1 }}" * 1_400_000, TOO_LONG),
    "memory of a text": ("{{ 'a' * 10 ** 9 }}", TOO_MUCH),
    "memory of a format": ("{{ '%1000000000d' % 1 }}", TOO_MUCH),
    # It grows a thousandfold a turn: little is copied before the turn that fails.
    "memory of a loop": (f"{SOME}{LOOP}{{% set n.s = ([n.s] * 1000) | join %}}{END}", TOO_MUCH),
    "memory of a filter": ("{{ ('a' * 10 ** 7) | replace('a', 'b' * 99) }}", TOO_MUCH),
    "long text": ("{{ 'a' * 2 * 10 ** 6 }}", "renders 2,000,000 characters"),
    "range": ("{{ range(10 ** 9) }}", "OverflowError: Range too big"),
    "macro": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    "brackets": ("{{ " + "(" * 200_000 + "1 }}", "RecursionError"),
    "nested blocks": ("{% if 1 %}" * 5_000, "RecursionError"),
    "30 loops": (LOOP * 30 + END * 30, "too many statically nested"),
    "nested lists": (NESTED + "{{ n.s }}", "RecursionError"),
    "message of nested lists": (NESTED + "{{ raise_exception(n.s) }}", "ends the process"),
    "include": ("{% include 'x' %}", "no loader"),
    "types": ("{{ 1 + 'a' }}", "TypeError: unsupported operand"),
    "division": ("{{ 1 / 0 }}", "ZeroDivisionError"),
    "no argument": ("{{ raise_exception() }}", "TypeError"),
    "no such option": ("{{ messages | tojson(nosuch=1) }}", "TypeError"),
    "digits": ("{{ " + "9" * 9_999 + " }}", "ValueError: Exceeds the limit"),
    "statement": ("a\n{% for %}", "is not valid at its line 2"),
    "openings": ("{%" * 10**6, "is not valid at its line 1"),
    "tag": ("{% nosuch %}", "unknown tag 'nosuch'; repair it"),
    "filter": ("{{ 1 | nosuch }}", "No filter named 'nosuch'"),
    "open block": ("{% generation %}", "is not valid at its line 1"),
    "break": ("{% break %}", "'break' outside loop"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_template_that_fails_is_one_line(monkeypatch, name):
    source, message = FAULTS[name]
    if message == TOO_LONG:
        monkeypatch.setattr(child, "SECONDS", 0.1)
    with pytest.raises(ConfigError) as found:
        render(source)
    text = str(found.value)
    assert message in text and text.endswith("; repair it, or ask without it (--no-chat)")
    assert text.startswith("the chat template ") and text.isprintable() and len(text) < 450
    # Where the process ended, another one renders.
    monkeypatch.setattr(child, "SECONDS", 0.5)
    assert render("{{ messages[0].content }}") == "hello"


REFUSALS = {
    "class": ("{{ ''.__class__ }}{{ [].__class__.__base__() }}", "unsafe"),
    "globals": ("{{ cycler.__init__.__globals__ }}", "unsafe"),
    "changes the messages": ("{{ messages.clear() }}", "unsafe"),
    "undefined": ("{{ nosuch() }}", "'nosuch' is undefined"),
    "number": ("{{ raise_exception(3) }}", "messages: 3"),
    "nothing": ("{{ raise_exception(nosuch) }}", "it does not say why"),
    "long": ("{{ raise_exception('a\n\x1b[2J' * 10 ** 5) }}", "a [2Ja [2Ja"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_is_one_line(name):
    source, message = REFUSALS[name]
    with pytest.raises(InputError, match="the chat template refuses the messages: ") as found:
        render(source)
    text = str(found.value)
    assert message in text and text.isprintable() and len(text) < 400


def test_an_odd_template_renders(monkeypatch):
    monkeypatch.undo()
    document, count = "Größe " * 500_000, "{% for a in range(9999) %}{{ a % 10 }}{% endfor %}"
    assigned = "{% set n = namespace(k=0) %}{% for m in messages %}{% set n.k = 5 %}{% endfor %}"
    for source, text in [
        ("", ""),
        ("x" * 10_000_000, "x" * 10_000_000),
        ("\0\ud800{{ messages[0].content }}", "\0\ud800hello"),
        ("{{ '{0.__class__}'.format(1) }}{{ ''|attr('__class__') }}", ""),
        (count, ("0123456789" * 1000)[:-1]),
        (assigned + "{{ n.k }}", "5"),
    ]:
        assert render(source) == text
    assert render("<{{ messages[0].content }}>", document) == f"<{document}>"


def test_an_interrupt_leaves_no_reply_behind_and_a_killed_process_is_replaced():
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
    assert render("a") == "a"
    process = child._idle[0].queue[-1]._process
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert render("b") == "b"
    # Rendering again takes no new process.
    template = ChatTemplate("{{ messages | length }}", {})
    template.render([], add_generation_prompt=True)
    process = child._idle[0].queue[-1]._process
    assert [template.render([], add_generation_prompt=True) for _ in range(100)] == ["0"] * 100
    assert child._idle[0].queue[-1]._process is process and process.poll() is None
