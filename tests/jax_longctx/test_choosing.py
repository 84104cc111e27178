import dataclasses
import json
from unittest.mock import create_autospec

import pytest
from typer.testing import CliRunner

from jax_longctx import choosing
from jax_longctx.api import LongContext
from jax_longctx.choosing import Case, Found, Measured, Model, choose
from jax_longctx.cli.main import app
from jax_longctx.evaluation.intervals import wilson
from jax_longctx.methods import make_method
from jax_longctx.models.rope import RopeConfig
from jax_longctx.text import Tokenizer
from tests.jax_longctx.cli.tiny_model import converted
from tests.small_methods import SMALL
from tests.support import tiny_config, tiny_engine


def measured(name, shares, *, read=0.5, step=None, **settings):
    """A method that found these shares at 1, 2, 4, ... trained lengths, of 40 facts."""
    found = []
    for power, share in enumerate(shares):
        low, high = wilson(share * 40 / 100, 40)
        found.append(Found(ratio=2.0**power, share=share, n=40, interval=(100 * low, 100 * high)))
    settings = {key: str(value) for key, value in {**SMALL[name], **settings}.items()}
    how = {"settings": settings, "found": found, "read": read, "step": step}
    return Measured(name=name, model=TINY, **how)


# As `model_of`'s: a tiny model is 0.0B.
TINY = Model(name="a small model", family="llama", trained=128, parameters=10_000)


FREE = measured("reattention", [90, 85, 60], step=0.99)
UNITS = measured("infllm", [60, 40, 70], step=1.1)
ASKS = measured("citrus", [75, 50], read=0.01)
KEEPS_LAST = measured("streaming-llm", [5, 2], read=0.01)


def model_of(memory=None, **config):
    """A model trained to 128 tokens; `memory` is what caches may take."""
    engine = tiny_engine(config=tiny_config(**config), memory_limit=memory, chunk=16)
    return LongContext(engine, create_autospec(Tokenizer, instance=True))


def chosen(model, tokens, rows, **how):
    choice = choose(Case.of(model, tokens, reserve=20), measured=rows, **how)
    assert choice.reason.startswith(choice.method.name)
    assert "\n" not in choice.reason
    return choice.method.name, choice.reason


@pytest.mark.parametrize(
    ("tokens", "rows", "expected", "said"),
    [
        (128, [FREE], "full", "128 tokens fit the trained length of 128 and the memory"),
        # Beyond it the method that found most at the length that covers the text.
        (129, [UNITS, FREE], "reattention", "129 tokens are more than the trained length of 128"),
        (
            129,
            [UNITS, FREE],
            "reattention",
            "scores 85 of 100 over 40 prompts at 2 times the trained length",
        ),
        (256, [measured("infllm", [60, 40, 100]), FREE], "reattention", "of a small model"),
        (257, [measured("infllm", [60, 40, 100]), FREE], "infllm", ""),
        (5000, [measured("infllm", [60, 40, 100]), FREE], "infllm", ""),
        # Of equally good ones the cheapest step: 85% and 80% of 40 are within each other's
        # intervals, 40% is not.
        (200, [FREE, measured("infllm", [80, 80], step=0.8, read=0.9)], "infllm", ""),
        (200, [FREE, measured("infllm", [80, 40], step=0.1)], "reattention", ""),
        # Without a time for both, by bytes.
        (200, [FREE, measured("infllm", [80, 80], read=0.9)], "reattention", ""),
        # A method that refuses the model is left out.
        (200, [measured("reattention", [100, 100], local_size=1000), UNITS], "infllm", ""),
    ],
)
def test_where_memory_suffices(tokens, rows, expected, said):
    name, reason = chosen(model_of(), tokens, rows)
    assert name == expected and said in reason


def enough_for(name, tokens=120):
    """Memory that holds this method's cache, and half of full attention's at most."""
    model = model_of()
    sizes = [
        model.with_method(method).engine.new_cache_bytes(tokens, 20)
        for method in (make_method(name, SMALL[name]), make_method("full"))
    ]
    assert sizes[0] < 0.5 * sizes[1]
    return int(1.3 * sizes[0])


LONG = {"max_position": 1000, "rope": RopeConfig(kind="default", theta=1e4, trained_length=1000)}


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ({"questions": 1}, "citrus"),
        ({"questions": choosing.MOST_PREFILLS}, "citrus"),
        ({"questions": choosing.MOST_PREFILLS + 1}, "streaming-llm"),
        ({"saving": True}, "streaming-llm"),
    ],
    ids=str,
)
def test_short_memory_takes_a_budget_by_the_number_of_questions(how, expected):
    model = model_of(enough_for("citrus", 900), **LONG)
    name, reason = chosen(model, 900, [FREE, KEEPS_LAST, ASKS], **how)
    assert name == expected
    assert "full attention's cache of" in reason and "does not fit" in reason
    prefills = how.get("questions", 1)
    assert (f"reads the text {prefills} times" in reason) is (prefills == choosing.MOST_PREFILLS)
    # Where nothing fits, the smallest.
    name, reason = chosen(model_of(1000, **LONG), 900, [FREE, KEEPS_LAST])
    assert name == "streaming-llm" and "no cache fits; this is the smallest" in reason


@pytest.mark.parametrize(
    ("ratio", "memory", "questions", "expected"),
    [
        (1, None, 9, "full"),
        (60_000 / 32_768, None, 5, "dynamic-ntk"),
        (4, None, 9, "reattention"),
        (16, None, 1, "reattention"),
        (0.9, 100 * 2**10, 1, "citrus"),
        (2, 100 * 2**10, 4, "citrus"),
    ],
)
def test_the_table_that_ships(ratio, memory, questions, expected):
    long = {"max_position": 8192, "num_layers": 1}
    rope = RopeConfig(kind="default", theta=1e4, trained_length=8192)
    if memory is not None:
        model = model_of(**long, rope=rope)
        method = make_method("citrus", {"budget": 1024, "chunk": 256})
        memory = int(1.3 * model.with_method(method).engine.new_cache_bytes(9000, 20))
    model = model_of(memory, **long, rope=rope)
    choice = choose(Case.of(model, int(8192 * ratio), reserve=20), questions=questions)
    # CItruS's two caches were equally good.
    assert choice.method.name.removesuffix("-individual") == expected


def test_the_reason_says_what_was_measured_and_what_was_not():
    model = model_of()
    _, reason = chosen(model, 200, [FREE])
    assert reason.endswith("2 times the trained length of a small model")
    full = measured("full", [70, 60])
    assert "of a small model, full attention 60" in chosen(model, 200, [FREE, full])[1]
    # Longer than any text, in trained lengths or in tokens.
    assert "measured up to 4 times and 512 tokens only" in chosen(model, 600, [FREE])[1]
    short = dataclasses.replace(FREE, model=dataclasses.replace(TINY, trained=8))
    assert "measured up to 4 times and 32 tokens only" in chosen(model, 200, [short])[1]
    for change in ({"family": "qwen2"}, {"parameters": 10**9}):
        other = dataclasses.replace(FREE, model=dataclasses.replace(TINY, **change))
        assert "; not measured on llama of 0.0B parameters" in chosen(model, 200, [other])[1]
    # A model's rows that cover the text go before another's, whatever these score.
    better = measured("infllm", [100, 100])
    other = dataclasses.replace(better, model=dataclasses.replace(TINY, name="another"))
    assert chosen(model, 200, [FREE, other])[0] == "reattention"
    assert chosen(model, 200, [other, FREE])[0] == "infllm"
    # A model that is alike goes before the first.
    large = dataclasses.replace(better, model=dataclasses.replace(TINY, parameters=10**9))
    assert chosen(model, 200, [large, FREE])[0] == "reattention"
    assert chosen(model, 300, [large, FREE])[0] == "reattention"
    assert chosen(model, 300, [large, measured("reattention", [90])])[0] == "infllm"
    beyond = dataclasses.replace(FREE, found=FREE.found[1:])
    assert beyond.covers(1.5) and not beyond.covers(0.5)


def test_the_table_that_ships_is_of_known_methods():
    for row in choosing.table():
        assert make_method(row.name, dict(row.settings)).name == row.name
        assert [each.ratio for each in row.found] == sorted(each.ratio for each in row.found)
        assert row.read > 0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(converted(tmp_path_factory))


def test_ask_chooses_and_says_so(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(choosing, "table", lambda: (FREE, ASKS))
    short, long = tmp_path / "short.txt", tmp_path / "long.txt"
    short.write_text("The pass key is 12345.")
    long.write_text("The pass key is 12345. Remember it. " * 60)
    how = ["-c", checkpoint, "--max-tokens", "4"]

    def invoke(*words):
        result = CliRunner().invoke(app, [*map(str, words)])
        assert result.exit_code == 0, result.output
        return result

    asked = invoke("ask", short, "Who?", *how)
    assert "method full: " in asked.stderr
    kept = tmp_path / "kept"
    asked = invoke("ask", long, "Who?", "--json", *how, "--save-context", kept)
    assert "method reattention:" in asked.stderr
    said = json.loads(asked.stdout)
    assert said["method"] == "reattention"
    assert said["settings"]["local_size"] == 32
    named = [f"--set={key}={value}" for key, value in FREE.settings.items()]
    same = invoke("ask", long, "Who?", "--json", *how, "-m", "reattention", *named)
    assert json.loads(same.stdout)["answer"] == said["answer"]
    assert "method reattention" not in same.stderr
    assert "method full: " in invoke("generate", "The pass", *how, "-m", "auto").stderr
    assert "method full: " not in invoke("generate", "The pass", *how).stderr
    # A saved context is asked under the method that it was saved with.
    again = invoke("ask", "Who?", "--json", *how, "--load-context", kept)
    assert json.loads(again.stdout)["answer"] == said["answer"]
    assert json.loads(again.stdout)["method"] == "reattention"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["ask", "b.txt", "Who?", "-m", "auto", "--set", "budget=1"], "chooses the settings too"),
        (["batch", "b.txt", "out", "-m", "auto"], "name a method here"),
    ],
    ids=["settings", "batch"],
)
def test_where_auto_is_refused(words, said, checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "b.txt").write_text("Text.")
    result = CliRunner().invoke(app, [*words, "-c", checkpoint])
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.count("\n") == 1
