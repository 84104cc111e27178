"""The number stands where it was asked for, in the text that was asked for."""

import re

import pytest

from jax_longctx.errors import ConfigError, InputError
from jax_longctx.evaluation.tasks import make_task
from jax_longctx.evaluation.tasks.passkey import SENTENCE, STEM


def words(text: str) -> int:
    return len(text.split())


def test_depths_are_taken_in_turn_and_met_within_a_sentence():
    task = make_task("passkey", {"depths": "5"})
    samples = list(task.samples(words, tokens=1000, trials=7, seed=1))
    assert [sample.meta["depth"] for sample in samples] == [0, 0.25, 0.5, 0.75, 1, 0, 0.25]
    for sample in samples:
        head, _, tail = sample.context.partition(f"The pass key is {sample.outputs[0]}")
        introduction = words(head.partition("\n\n")[0])
        before = words(head) - introduction
        around = before + words(tail) - 8
        assert before == pytest.approx(sample.meta["depth"] * around, abs=5)
        assert sample.meta["at"] == pytest.approx(before / around, abs=1e-9)


def test_texts(tmp_path):
    path = tmp_path / "own.words.txt"
    path.write_text("Ducks swim. Geese fly. " * 10, encoding="utf-8")
    task = make_task("passkey", {"haystack": str(path)})
    assert task.label == "passkey@own.words"
    (sample,) = task.samples(words, tokens=120, trials=1, seed=1)
    assert sample.context.count("Ducks swim.") > 10
    assert make_task("passkey").label == "passkey"
    assert make_task("passkey", {"haystack": "topics"}).label == "passkey@topics"
    (sample,) = make_task("passkey").samples(words, tokens=120, trials=1, seed=1)
    assert "Rain runs down." in sample.context


def test_texts_that_cannot_be_read(tmp_path):
    def first(path):
        return next(
            make_task("passkey", {"haystack": str(path)}).samples(
                words, tokens=99, trials=1, seed=1
            )
        )

    with pytest.raises(InputError, match=r"absent\.txt cannot be read.*give noise, topics, or"):
        first(tmp_path / "absent.txt")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(InputError, match=r"latin\.txt is not UTF-8 text \(byte 3\)"):
        first(tmp_path / "latin.txt")
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(InputError, match=r"empty\.txt is empty"):
        first(tmp_path / "empty.txt")


def test_settings():
    with pytest.raises(ConfigError, match="depths must be at least 1, got 0"):
        make_task("passkey", {"depths": "0"})
    (sample,) = make_task("passkey", {"depths": "1"}).samples(words, tokens=99, trials=1, seed=1)
    assert sample.meta["depth"] == 0


def test_only_the_first_number_counts():
    task = make_task("passkey")
    (sample,) = task.samples(words, tokens=99, trials=1, seed=1)
    key = sample.outputs[0]
    assert [task.score(f" {text}", sample) for text in (key, f"1 {key}", key + "0")] == [100, 0, 0]


def test_chosen_depths_are_taken_in_turn():
    samples = make_task("passkey", {"at": "0.9/0.1"}).samples(words, tokens=400, trials=3, seed=1)
    assert [sample.meta["depth"] for sample in samples] == [0.9, 0.1, 0.9]
    for at in ("0.1/1.5", "deep", "0.1//0.2", "nan"):
        with pytest.raises(ConfigError, match=r"at must be depths from 0 to 1"):
            make_task("passkey", {"at": at})


def test_prompts_hold_a_key_of_their_own_twice():
    task = make_task("passkey", {"haystack": "topics", "depths": "3"})
    samples = [
        sample
        for tokens in (400, 1500)
        for sample in task.samples(words, tokens=tokens, trials=6, seed=3)
    ]
    keys = [sample.outputs[0] for sample in samples]
    assert len(set(keys)) == 12
    starts = {sample.context.partition("\n\n")[2][:40] for sample in samples}
    assert len(starts) > 8
    assert all(sample.context.count(key) == 2 for sample, key in zip(samples, keys, strict=True))


def test_the_same_seed_gives_the_same_prompts_for_any_number_of_them():
    task = make_task("passkey")
    more = list(task.samples(words, tokens=600, trials=4, seed=3))
    assert more[:2] == list(task.samples(words, tokens=600, trials=2, seed=3))
    assert more != list(task.samples(words, tokens=600, trials=4, seed=4))


def test_stem_begins_the_hidden_sentence():
    assert re.match(re.escape(STEM.strip()), SENTENCE)
