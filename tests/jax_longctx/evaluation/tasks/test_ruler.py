"""Chains keep their order, and what is frequent is strictly more frequent than the rest."""

import re
from collections import Counter

import pytest

from jax_longctx.errors import ConfigError, LengthError
from jax_longctx.evaluation.tasks import make_task
from tests.jax_longctx.evaluation.tasks.cases import drawn, words


def test_a_chain_keeps_its_order_behind_a_solved_one():
    _, samples = drawn("vt", trials=10)
    for sample in samples:
        example, text = sample.context.split("\n\n\nVariables are assigned")
        value = sample.meta["value"]
        lines = re.findall(r"VAR .*", text)
        first, *rest = sample.outputs
        assert lines == [
            f"VAR {first} = {value}",
            *(f"VAR {b} = VAR {a}" for a, b in zip(sample.outputs, rest, strict=False)),
        ]
        assert all(re.fullmatch("[A-Z]{5}", name) for name in sample.outputs)
        solved = re.findall(r"VAR ([A-Z]{3}) =", example)
        assert len(solved) == 5 and example.endswith(f": {' '.join(solved)}")
        assert str(value) not in example
        assert sample.query == f"\n\nWhich variables hold the value {value} in the text above?"
        assert sample.answer_prefix == f"\n\n5 variables hold the value {value}:"
        assert words(example) == pytest.approx(225 + 19, abs=5)
    places = [
        words(sample.context.partition(f" = {sample.meta['value']}")[0]) for sample in samples
    ]
    assert len(set(places)) > 5


def test_other_chains_mislead_and_an_example_of_a_long_prompt_has_500_tokens():
    _, (sample, *_) = drawn("vt", chains=3, hops=2)
    text = sample.context.rpartition("Variables are assigned")[2]
    values = re.findall(r"= (\d+)", text)
    assert len(values) == len(set(values)) == 3 and len(re.findall("VAR \\w+ =", text)) == 9
    assert len(sample.outputs) == 3
    assert text.index(sample.outputs[0]) < text.index(sample.outputs[1])
    _, (sample, *_) = drawn("vt", tokens=9000, trials=1)
    example = sample.context.partition("\n\n\nVariables are assigned")[0]
    assert words(example) == pytest.approx(500 + 19, abs=5)


@pytest.mark.parametrize(
    ("tokens", "common", "other", "shown", "example"),
    [(900, 6, 1, (3, 1), 20), (4095, 6, 1, (3, 1), 20), (4096, 30, 3, (10, 3), 40)],
)
def test_common_words(tokens, common, other, shown, example):
    _, (sample, *_) = drawn("cwe", tokens=tokens, trials=1)
    solved, _, listed = sample.context.rpartition("\n\n\n")
    counts = Counter(re.findall(r"\d+\. (\w+)", listed))
    assert {counts.pop(word) for word in sample.outputs} == {common}
    assert set(counts.values()) == {other}
    assert sample.meta == {"words": len(counts) + 10, "common": common, "other": other}
    listed, _, answer = solved.partition("are:")
    counts = Counter(re.findall(r"\d+\. (\w+)", listed))
    gold = re.findall(r"\d+\. (\w+)", answer)
    assert len(counts) == example and len(gold) == 10
    assert {counts[word] for word in gold} == {shown[0]}
    assert Counter(counts.values()) == {shown[0]: 10, shown[1]: example - 10}
    assert not set(counts) & set(sample.outputs)


def test_common_words_of_any_number():
    _, (sample, *_) = drawn("cwe", words=4, common=9, other=2)
    counts = Counter(re.findall(r"\d+\. (\w+)", sample.context.rpartition("\n\n\n")[2]))
    assert [counts[word] for word in sample.outputs] == [9] * 4
    assert sample.query.startswith("\n\nWhich 4 words")


def test_frequent_words_follow_zeta():
    _, (sample, *_) = drawn("fwe", tokens=5000, trials=1)
    text = sample.context.partition("comes up.\n\n")[2].split()
    counts = Counter(text)
    ranks = sorted(counts.values(), reverse=True)
    # N i^-2 / zeta(2): the first rank has N / 1.645 dots.
    number = sample.meta["counts"][0] * 1.6449
    assert ranks[:5] == sample.meta["counts"]
    assert [number / i**2 / 1.6449 for i in range(1, 9)] == pytest.approx(ranks[:8], abs=1.5)
    assert [counts[word] for word in sample.outputs] == ranks[1:4] and ranks[3] > ranks[4]
    assert len(counts) <= 5000 // 50
    assert all(re.fullmatch(r"[a-z]{6}|\.\.\.", word) for word in counts)
    assert text != sorted(text, key=text.index)


def test_frequencies_fall_faster_with_alpha():
    for alpha in (1.5, 3.0):
        _, (sample, *_) = drawn("fwe", alpha=alpha, tokens=5000, trials=1)
        dots, second, third, *_ = sample.meta["counts"]
        assert second == pytest.approx(dots / 2**alpha, abs=1)
        assert third == pytest.approx(dots / 3**alpha, abs=1)
    with pytest.raises(LengthError, match="too few for three words that are more frequent"):
        drawn("fwe", tokens=120)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("vt", {"hops": "0"}, "hops must be at least 1, got 0"),
        ("vt", {"chains": "101"}, r"chains \* \(hops \+ 1\) must be at most 500, got 505"),
        ("cwe", {"words": "0"}, "words must be at least 1, got 0"),
        ("cwe", {"common": "3"}, "common and other go together"),
        ("cwe", {"common": "3", "other": "3"}, "common must be more than other = 3, got 3"),
        ("cwe", {"common": "3", "other": "0"}, "other must be at least 1, got 0"),
        ("fwe", {"alpha": "1"}, "alpha must be more than 1, got 1.0"),
    ],
)
def test_settings_that_cannot_be(name, settings, message):
    with pytest.raises(ConfigError, match=message):
        make_task(name, settings)
