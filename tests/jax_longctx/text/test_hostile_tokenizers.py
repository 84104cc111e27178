"""Tokenizers that a stranger wrote: one line in bounded time and memory, and the next works."""

import json

import pytest

from jax_longctx.errors import CheckpointError, InputError
from jax_longctx.text import Tokenizer, child


@pytest.fixture
def loaded(tmp_path, byte_level, monkeypatch):
    """Loads the tokenizer with another step, under less than users have."""
    monkeypatch.setattr(child, "SECONDS", 0.4)
    monkeypatch.setattr(child, "MEMORY", 2**28)

    def load(place, step):
        described = json.loads(byte_level.to_str()) | {place: step}
        (tmp_path / "tokenizer.json").write_text(json.dumps(described))
        return Tokenizer.load(tmp_path)

    return load


def replaced(place, old, new, kind="String", times=40):
    step = {"type": "Replace", "pattern": {kind: old}, "content": new}
    return place, {"type": "Sequence", f"{place}s": [step] * times}


def split(pattern):
    cut = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return "pre_tokenizer", cut


LIMIT, TEXT = "takes (more than 0.4|too much)", "a" * 2000 + "c"
ENCODING = {
    "nested replacements": (replaced("normalizer", "a", "aa"), LIMIT),
    "nested replacements of others": (replaced("normalizer", "[^b]", "cd", "Regex"), LIMIT),
    "endless backtracking": (split("(a+)+$"), "fails: PanicException: .*retry-limit"),
    "cubes of the length": (split("a*?a*?[^abc]"), LIMIT),
}
LOADING = {
    "a decoder that doubles": (replaced("decoder", "a", "aa"), "1.1e\\+12 times as long"),
    "a decoder's pattern": (replaced("decoder", "(a+)+$", "", "Regex", 1), "inf times as long"),
    "a damaged map": (("normalizer", {"type": "Precompiled", "precompiled_charsmap": "A"}), "it "),
}


@pytest.mark.parametrize(("step", "words"), ENCODING.values(), ids=ENCODING)
def test_a_text_that_would_take_for_ever_is_one_line(loaded, byte_level, step, words):
    hostile = loaded(*step)
    with pytest.raises(InputError, match=f"tokenizer {words}.* on a text of 2,001 char") as caught:
        hostile.encode(TEXT)
    assert "\n" not in str(caught.value)
    # The process that was ended takes no other tokenizer with it.
    sound = Tokenizer(byte_level, {})
    assert sound.decode(sound.encode(TEXT)) == TEXT


@pytest.mark.parametrize(("step", "words"), LOADING.values(), ids=LOADING)
def test_a_tokenizer_that_fails_here_is_not_loaded(loaded, step, words):
    with pytest.raises(CheckpointError, match=rf"tokenizer\.json.* {words}"):
        loaded(*step)


def test_ids_and_offsets_are_those_of_the_package_and_one_process_serves_them(byte_level):
    bounded, text = child.BoundedTokenizer(byte_level.to_str()), "Größe \U0001f9ff <|end|>" * 99
    (whole,) = byte_level.encode_batch([text], add_special_tokens=False)
    bounded.encode(text)
    started = [each._process for each in child._encoders.queue]
    for _ in range(20):
        found = bounded.encode(text, offsets=True)
        assert (found.ids, found.offsets) == (whole.ids, whole.offsets)
        assert [each._process for each in child._encoders.queue] == started
