"""Tokenizers that a stranger wrote: one line in bounded time and memory, and the next works."""

import json

import pytest

from jax_longctx.errors import CheckpointError, InputError
from jax_longctx.text import Tokenizer, child


@pytest.fixture
def loaded(tmp_path, byte_level, monkeypatch):
    """Loads the tokenizer with other steps, under less than users have."""
    monkeypatch.setattr(child, "SECONDS", 0.4)
    monkeypatch.setattr(child, "MEMORY", 2**28)

    def load(**steps):
        described = json.loads(byte_level.to_str()) | steps
        (tmp_path / "tokenizer.json").write_text(json.dumps(described))
        return Tokenizer.load(tmp_path)

    return load


def replace(old, new, kind="String"):
    return {"type": "Replace", "pattern": {kind: old}, "content": new}


def normalizers(*steps):
    return {"normalizer": {"type": "Sequence", "normalizers": list(steps)}}


def split(pattern):
    cut = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"pre_tokenizer": cut}


def decoders(*steps):
    return {"decoder": {"type": "Sequence", "decoders": list(steps)}}


LIMIT, TEXT = "takes (more than 0.4|too much)", "a" * 2000 + "c"
ENCODING = {
    "nested replacements": (normalizers(*[replace("a", "aa")] * 40), LIMIT),
    "nested replacements of others": (normalizers(*[replace("[^b]", "cd", "Regex")] * 40), LIMIT),
    "endless backtracking": (split("(a+)+$"), "fails: PanicException: .*retry-limit"),
    "cubes of the length": (split("a*?a*?[^abc]"), LIMIT),
}
DAMAGED = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
LOADING = {
    "a decoder that doubles": (decoders(*[replace("a", "aa")] * 40), "1.1e\\+12 times as long"),
    "a decoder's pattern": (decoders(replace("(a+)+$", "", "Regex")), "inf times as long"),
    "a damaged map": (
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        "it ",
    ),
    "a deep one": ({"normalizer": {"type": "Sequence", "normalizers": 1}}, "not a tokenizer file"),
}


@pytest.mark.parametrize(("steps", "words"), ENCODING.values(), ids=ENCODING)
def test_a_text_that_would_take_for_ever_is_one_line(loaded, byte_level, steps, words):
    hostile = loaded(**steps)
    with pytest.raises(InputError, match=f"tokenizer {words}.* on a text of 2,001 char") as caught:
        hostile.encode(TEXT)
    assert "\n" not in str(caught.value)
    # The process that was ended takes no other tokenizer with it.
    sound = Tokenizer(byte_level, {})
    assert sound.decode(sound.encode(TEXT)) == TEXT


@pytest.mark.parametrize(("steps", "words"), LOADING.values(), ids=LOADING)
def test_a_tokenizer_that_fails_here_is_not_loaded(loaded, steps, words):
    with pytest.raises(CheckpointError, match=rf"tokenizer\.json.* {words}"):
        loaded(**steps)


def test_ids_and_offsets_are_those_of_the_package_and_one_process_serves_them(loaded, byte_level):
    tokenizer, text = loaded(), "The pass key is 12345. Größe \U0001f9ff <|end|>" * 99
    (whole,) = byte_level.encode_batch([text], add_special_tokens=False)
    seen: list[object] = []
    for times in range(20):
        found = tokenizer._encoder._copies[True, False].encode(text, offsets=True)
        assert (found.ids, found.offsets) == (whole.ids, whole.offsets)
        assert tokenizer.encode(text, parse_special=True) == whole.ids
        started = [each._process for each in child._encoders.queue]
        assert started == seen or not times
        seen = started
