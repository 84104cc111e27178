import itertools
import random
import re
from collections import Counter

import pytest

from jax_longctx.errors import ConfigError, InputError, LengthError
from jax_longctx.evaluation.tasks import make_task
from jax_longctx.evaluation.tasks.passkey import SENTENCE, STEM
from jax_longctx.evaluation.tasks.words import ADJECTIVES, NOUNS, VERBS, vocabulary, word_stream
from tests.jax_longctx.evaluation.tasks.cases import drawn, words


@pytest.fixture(scope="module")
def birds(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "birds.txt"
    path.write_text(" ".join(f"Row {i} has {i % 7} birds." for i in range(3000)), encoding="utf-8")
    return str(path)


def test_one_needle_stands_at_its_depth_and_many_at_theirs(birds):
    task, samples = drawn("niah_single", trials=5, depths=5, haystack=birds)
    assert task.label == "niah_single@birds"
    for sample in samples:
        needle = f"{sample.answer_prefix.strip()} {sample.outputs[0]}."
        text = sample.context.partition("end.\n\n")[2]
        before = words(text.partition(needle)[0])
        around = words(text) - words(needle)
        assert before == pytest.approx(sample.meta["depth"] * around, abs=5)
        assert sample.meta["at"] == pytest.approx(before / around)
    assert [sample.meta["depth"] for sample in samples] == [0, 0.25, 0.5, 0.75, 1]
    task, samples = drawn("niah_multi", trials=2, needles=5, haystack=birds)
    assert task.label == "niah_multi@birds"
    for sample in samples:
        assert sample.meta["depths"] == [0, 0.25, 0.5, 0.75, 1]
        places = [words(sample.context.partition(place)[0]) for place in sample.outputs]
        share = [(place - places[0]) / (places[-1] - places[0]) for place in places]
        assert share == pytest.approx(sample.meta["depths"], abs=0.02)
        assert sample.meta["at"] == pytest.approx(sample.meta["depths"], abs=0.01)


def test_parts_of_one_needle_and_of_many():
    task, (sample, *_) = drawn("niah_single")
    (place,) = sample.outputs
    said = task.parts(f" {place}.\nMore words", sample)
    assert said == {"rouge_1": 100, "rouge_2": 100, "rouge_l": 100, "needlebench": 100}
    # One of two words, and nothing of the place's letters but one word's.
    half = task.parts(place.split()[0], sample)
    assert (half["rouge_1"], half["rouge_2"]) == (pytest.approx(200 / 3), 0)
    assert 0 < half["needlebench"] < 20
    assert task.score(place.split()[0], sample) == 0
    assert task.parts("", sample)["rouge_l"] == 0
    task, (sample, *_) = drawn("niah_multi", needles=4)
    answer = " and ".join(sample.outputs[:3])
    assert task.score(answer, sample) == 75
    depths = {"depth 0%": 100, "depth 33%": 100, "depth 67%": 100, "depth 100%": 0}
    assert task.parts(answer, sample) == {"all": 0, **depths}
    assert task.parts(answer + sample.outputs[3], sample)["all"] == 100


def test_ruler_needles_are_as_many_and_as_deep_as_asked(birds):
    _, samples = drawn("niah_multikey_1", keys=7, haystack=birds)
    levels = [round(100 * i / 39) / 100 for i in range(40)]
    for sample in samples:
        depths = sample.meta["depths"]
        assert sample.context.count("A secret number assigned to ") == 7
        assert depths == sorted(set(depths)) and set(depths) <= set(levels)
        text = sample.context.partition("end.\n\n")[2]
        parts = text.split("A secret number assigned to ")
        around = words(text) - 7 * 8
        # Each part behind the first begins with a key and its value, three words.
        before = itertools.accumulate(words(part) - 3 * bool(i) for i, part in enumerate(parts))
        for depth, place in zip(depths, before, strict=False):
            assert place == pytest.approx(depth * around, abs=5)
    # Needles among needles stand anywhere in lines of their own.
    for name in ("niah_multikey_2", "niah_multikey_3"):
        _, samples = drawn(name, trials=20)
        places = []
        for sample in samples:
            lines = sample.context.partition("\n\n")[2].splitlines()
            assert all(line.startswith("A secret ") and line.endswith(".") for line in lines)
            keys = [line.split()[5] for line in lines]
            assert len(set(keys)) == len(keys)
            places.append(keys.index(sample.meta["keys"][0]) / len(keys))
        assert min(places) < 0.2 and max(places) > 0.8


def test_kinds_of_keys_and_values_words_of_one_and_of_many_and_labels():
    _, (sample, *_) = drawn("niah_multikey_3")
    for text in (sample.meta["keys"][0], sample.outputs[0]):
        assert len(text) == 36 and text[14] == "4"
    _, samples = drawn("niah_single_1", trials=30)
    assert all(len(s.outputs[0]) == 7 and s.outputs[0][0] != "0" for s in samples)
    first, second = samples[0].meta["keys"][0].split("-")
    assert first in ADJECTIVES and second in NOUNS
    single, several = drawn("niah_single_2")[1][0], drawn("niah_multiquery", queries=2)[1][0]
    assert single.query.startswith("\n\nWhich secret number is assigned to ")
    assert ": one number will be asked for at the end" in single.context
    assert ": several of them will be asked for at the end" in several.context
    asked = " and ".join(several.meta["keys"])
    assert several.query == f"\n\nWhich secret numbers are assigned to {asked} in the text above?"
    assert len(several.outputs) == 2
    values = drawn("niah_multivalue", values=3)[1][0]
    assert "numbers are assigned" in values.query and len(values.outputs) == 3
    # Labels name texts that are not the published ones.
    for label in ("niah_single_1", "niah_single_2@topics", "niah_multikey_3"):
        assert make_task(label.partition("@")[0]).label == label
    assert make_task("niah_single_1", {"haystack": "topics"}).label == "niah_single_1@topics"


def test_a_chain_keeps_its_order_behind_a_solved_one():
    _, samples = drawn("vt", trials=10)
    places = set()
    for sample in samples:
        example, text = sample.context.split("\n\n\nVariables are assigned")
        value, (first, *rest) = sample.meta["value"], sample.outputs
        chain = [f"VAR {b} = VAR {a}" for a, b in zip(sample.outputs, rest, strict=False)]
        assert re.findall(r"VAR .*", text) == [f"VAR {first} = {value}", *chain]
        assert all(re.fullmatch("[A-Z]{5}", name) for name in sample.outputs)
        solved = re.findall(r"VAR ([A-Z]{3}) =", example)
        assert len(solved) == 5 and example.endswith(f": {' '.join(solved)}")
        assert str(value) not in example
        assert sample.query == f"\n\nWhich variables hold the value {value} in the text above?"
        assert sample.answer_prefix == f"\n\n5 variables hold the value {value}:"
        assert words(example) == pytest.approx(225 + 19, abs=5)
        places.add(words(sample.context.partition(f" = {value}")[0]))
    assert len(places) > 5
    # The example of a long prompt has 500 tokens.
    _, (sample, *_) = drawn("vt", tokens=9000, trials=1)
    example = sample.context.partition("\n\n\nVariables are assigned")[0]
    assert words(example) == pytest.approx(500 + 19, abs=5)


def test_common_words():
    def counted(text):
        return Counter(re.findall(r"\d+\. (\w+)", text))

    for tokens, common, other, shown, example in [
        (900, 6, 1, (3, 1), 20),
        (4095, 6, 1, (3, 1), 20),
        (4096, 30, 3, (10, 3), 40),
    ]:
        _, (sample, *_) = drawn("cwe", tokens=tokens, trials=1)
        solved, _, listed = sample.context.rpartition("\n\n\n")
        counts = counted(listed)
        assert {counts.pop(word) for word in sample.outputs} == {common}
        assert set(counts.values()) == {other}
        assert sample.meta == {"words": len(counts) + 10, "common": common, "other": other}
        listed, _, answer = solved.partition("are:")
        counts, gold = counted(listed), counted(answer)
        assert len(counts) == example and len(gold) == 10
        assert {counts[word] for word in gold} == {shown[0]}
        assert Counter(counts.values()) == {shown[0]: 10, shown[1]: example - 10}
        assert not set(counts) & set(sample.outputs)
        assert sample.query.startswith("\n\nWhich 10 words")


def test_frequent_words_follow_zeta():
    _, (sample, *_) = drawn("fwe", tokens=5000, trials=1)
    text = sample.context.partition("comes up.\n\n")[2].split()
    counts = Counter(text)
    ranks = sorted(counts.values(), reverse=True)
    # N i^-2 / zeta(2): the first rank has N / 1.645 dots.
    assert ranks[:5] == sample.meta["counts"]
    assert [ranks[0] / i**2 for i in range(1, 9)] == pytest.approx(ranks[:8], abs=1.5)
    assert [counts[word] for word in sample.outputs] == ranks[1:4] and ranks[3] > ranks[4]
    assert len(counts) <= 5000 // 50
    assert all(re.fullmatch(r"[a-z]{6}|\.\.\.", word) for word in counts)
    assert text != sorted(text, key=text.index)
    with pytest.raises(LengthError, match="too few for three words that are more frequent"):
        drawn("fwe", tokens=120)


def test_settings_that_cannot_be():
    for name, settings, message in [
        ("niah_multi", {"needles": "1"}, "needles must be at least 2, got 1"),
        ("niah_multi", {"needles": "51"}, "needles must be at most 50, got 51"),
        ("niah_single", {"depths": "0"}, "depths must be at least 1, got 0"),
        ("niah_single_1", {"values": "0"}, "values must be at least 1, got 0"),
        ("niah_single_1", {"queries": "2"}, "queries must be at most keys = 1, got 2"),
        ("niah_single_1", {"keys": "41"}, r"keys \* values must be at most 40, got 41"),
        ("niah_single_1", {"key": "number"}, "expected one of words, uuid"),
        ("passkey", {"depths": "0"}, "depths must be at least 1, got 0"),
        *(
            ("passkey", {"at": at}, r"at must be depths from 0 to 1")
            for at in ("0.1/1.5", "deep", "0.1//0.2", "nan")
        ),
    ]:
        with pytest.raises(ConfigError, match=message):
            make_task(name, settings)


def test_words(monkeypatch):
    lists = (ADJECTIVES, NOUNS, VERBS)
    assert len({word for each in lists for word in each}) == sum(map(len, lists))
    known = vocabulary()
    assert known == tuple(sorted(set(known))) and {*NOUNS, "argument"} <= set(known)
    assert all(word.isalpha() and word.islower() for word in known)
    stream = list(itertools.islice(word_stream(random.Random(3)), len(known) + 500))
    assert len(set(stream)) == len(stream) and set(stream[: len(known)]) == set(known)
    assert stream[: len(known)] != list(known)
    assert all(word.isalpha() for word in stream)
    # Pairs of words come to an end.
    monkeypatch.setattr("jax_longctx.evaluation.tasks.ruler.NOUNS", NOUNS[:2])
    with pytest.raises(LengthError, match="no more keys of two words; set key=uuid"):
        drawn("niah_multikey_2", tokens=9000, trials=1)


def test_depths_are_taken_in_turn_and_met_within_a_sentence():
    _, samples = drawn("passkey", depths=5, trials=7)
    assert [sample.meta["depth"] for sample in samples] == [0, 0.25, 0.5, 0.75, 1, 0, 0.25]
    for sample in samples:
        head, _, tail = sample.context.partition(f"The pass key is {sample.outputs[0]}")
        introduction = words(head.partition("\n\n")[0])
        before = words(head) - introduction
        around = before + words(tail) - 8
        assert before == pytest.approx(sample.meta["depth"] * around, abs=5)
        assert sample.meta["at"] == pytest.approx(before / around, abs=1e-9)
    _, samples = drawn("passkey", at="0.9/0.1")
    assert [sample.meta["depth"] for sample in samples] == [0.9, 0.1, 0.9]
    assert drawn("passkey", depths=1)[1][0].meta["depth"] == 0
    # Only the first number counts.
    task, (sample, *_) = drawn("passkey")
    key = sample.outputs[0]
    assert [task.score(f" {text}", sample) for text in (key, f"1 {key}", key + "0")] == [100, 0, 0]
    assert SENTENCE.startswith(STEM.strip())


def test_texts_and_facts_of_theirs_that_are_not_asked_for(tmp_path):
    path = tmp_path / "own.words.txt"
    path.write_text("Ducks swim. Geese fly. " * 10, encoding="utf-8")
    task, (sample, *_) = drawn("passkey", tokens=120, haystack=str(path))
    assert task.label == "passkey@own.words" and sample.context.count("Ducks swim.") > 10
    task, (sample, *_) = drawn("passkey", tokens=120)
    assert task.label == "passkey" and "Rain runs down." in sample.context
    task, samples = drawn("passkey", trials=12, haystack="topics")
    assert task.label == "passkey@topics"
    # They begin anywhere in the text.
    assert len({sample.context.partition("\n\n")[2][:40] for sample in samples}) > 8
    for content, message in [
        (None, r"own\.txt cannot be read.*give noise, topics, or"),
        (b"caf\xe9", r"own\.txt is not UTF-8 text \(byte 3\)"),
        (b" \n", r"own\.txt is empty"),
    ]:
        if content is not None:
            (tmp_path / "own.txt").write_bytes(content)
        with pytest.raises(InputError, match=message):
            drawn("passkey", haystack=str(tmp_path / "own.txt"))
    # Every place of the first adjective drawn stands in the text, so another noun is taken.
    pairs = [f"{first} {second}" for first in ADJECTIVES for second in NOUNS[:150]]
    path = tmp_path / "pairs.txt"
    path.write_text(". ".join(map(str.capitalize, pairs)), encoding="utf-8")
    _, samples = drawn("niah_single", tokens=300, trials=8, haystack=str(path))
    assert all(sample.outputs[0] not in pairs for sample in samples)
