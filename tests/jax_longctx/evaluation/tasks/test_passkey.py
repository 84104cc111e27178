"""The number stands where it was asked for, in the text that was asked for."""

import pytest

from jax_longctx.errors import ConfigError, InputError
from jax_longctx.evaluation.tasks import make_task
from jax_longctx.evaluation.tasks.passkey import SENTENCE, STEM
from tests.jax_longctx.evaluation.tasks.cases import drawn, words


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


def test_texts(tmp_path):
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


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"own\.txt cannot be read.*give noise, topics, or"),
        (b"caf\xe9", r"own\.txt is not UTF-8 text \(byte 3\)"),
        (b" \n", r"own\.txt is empty"),
    ],
)
def test_texts_that_cannot_be_read(tmp_path, content, message):
    path = tmp_path / "own.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        drawn("passkey", haystack=str(path))


def test_depths_that_cannot_be():
    with pytest.raises(ConfigError, match="depths must be at least 1, got 0"):
        make_task("passkey", {"depths": "0"})
    for at in ("0.1/1.5", "deep", "0.1//0.2", "nan"):
        with pytest.raises(ConfigError, match=r"at must be depths from 0 to 1"):
            make_task("passkey", {"at": at})


def test_only_the_first_number_counts():
    task, (sample, *_) = drawn("passkey")
    key = sample.outputs[0]
    assert [task.score(f" {text}", sample) for text in (key, f"1 {key}", key + "0")] == [100, 0, 0]
    assert SENTENCE.startswith(STEM.strip())
