"""Streamed text is the whole text in linear time, cut at the same place however it is split."""

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jax_longctx.errors import InputError
from jax_longctx.text import StopStrings, Tokenizer
from jax_longctx.text.tokenizer import StreamDecoder

SETTINGS = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def split(ids, rng):
    start = 0
    while start < len(ids):
        stop = start + rng.choice([0, 1, 1, 2, 3, 7, 40])
        yield ids[start:stop]
        start = stop


def stream(tokenizer, pieces):
    decoder = tokenizer.stream_decoder()
    shown = [decoder.push(piece) for piece in pieces]
    return shown, decoder.flush()


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@pytest.mark.parametrize("seed", range(4))
def test_real_text_in_any_split(request, kind, seed, text):
    tokenizer = Tokenizer(request.getfixturevalue(kind), {})
    ids = tokenizer.encode(text)
    shown, rest = stream(tokenizer, split(ids, random.Random(seed)))
    assert "".join(shown) + rest == tokenizer.decode(ids)
    assert "\ufffd" not in "".join(shown)


@SETTINGS
@given(data=st.data())
@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_random_ids_in_any_split(request, kind, data):
    """Random ids are mostly invalid UTF-8, with special tokens between."""
    tokenizer = Tokenizer(request.getfixturevalue(kind), {})
    some = st.integers(0, tokenizer.vocab_size - 1)
    high_bytes = tokenizer.encode("🙂é€")
    one = st.one_of(some, st.sampled_from(high_bytes))
    ids = data.draw(st.lists(one, max_size=60))
    seed = data.draw(st.integers(0, 99))
    shown, rest = stream(tokenizer, split(ids, random.Random(seed)))
    assert "".join(shown) + rest == tokenizer.decode(ids)


def test_character_is_held_until_it_is_whole_and_no_longer(byte_level, byte_fallback):
    tokenizer = Tokenizer(byte_level, {})
    ids = [byte_level.token_to_id(char) for char in byte_level.encode("🙈").tokens]
    decoder = tokenizer.stream_decoder()
    assert len(ids) >= 2
    assert [decoder.push([token]) for token in ids] == [""] * (len(ids) - 1) + ["🙈"]
    # One that is not whole comes out at the end.
    decoder = tokenizer.stream_decoder()
    assert decoder.push(tokenizer.encode("key 🙈")[:-1]) == "key "
    assert decoder.flush() == "\ufffd"
    decoder = tokenizer.stream_decoder()
    for token in tokenizer.encode("The pass key is 12345."):
        assert decoder.push([token]) == tokenizer.decode([token])
    # A Llama 2 decoder drops a text's first space; an answer is not a text's beginning.
    tokenizer = Tokenizer(byte_fallback, {})
    answer = [byte_fallback.token_to_id("▁the")]
    assert tokenizer.decode(answer) == "the"
    assert tokenizer.stream_decoder(after=tokenizer.encode("the key")).push(answer) == " the"


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@pytest.mark.parametrize("sample", ["日本語 text 🙂 ", "\ufffd", "bytes"])
def test_each_id_is_decoded_a_bounded_number_of_times(request, kind, sample, monkeypatch):
    """Counted, not timed: text, and endless invalid bytes, which show no certain character."""
    tokenizer = Tokenizer(request.getfixturevalue(kind), {})
    invalid = tokenizer.encode("日")[-1:] * 3000
    ids = invalid if sample == "bytes" else (tokenizer.encode(sample) * 3000)[:3000]
    decode, seen = StreamDecoder._decode, []
    monkeypatch.setattr(
        StreamDecoder, "_decode", lambda self: seen.append(len(self._window)) or decode(self)
    )
    decoder = tokenizer.stream_decoder()
    shown = [decoder.push([token]) for token in ids]
    assert "".join(shown) + decoder.flush() == tokenizer.decode(ids)
    assert 0 < sum(seen) <= 30 * len(ids)


def cut(text, stops):
    """What is shown of a whole text: everything before the stop string that starts first."""
    starts = [text.find(stop) for stop in stops if stop in text]
    return text[: min(starts)] if starts else text


def stopped_by(pieces, stops):
    stopper = StopStrings(stops)
    shown = [stopper.push(piece) for piece in pieces]
    return "".join(shown) + stopper.flush(), stopper.stopped


@given(
    st.lists(st.text("ab\n", max_size=5), max_size=8),
    st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3),
)
def test_any_split_cuts_where_the_whole_text_does(pieces, stops):
    text = "".join(pieces)
    shown, stopped = stopped_by(pieces, stops)
    assert shown == cut(text, stops)
    assert (stopped is not None) == any(stop in text for stop in stops)


def test_stops_by_hand():
    for stop, pieces, shown, rest in [
        ("\n\nUser:", ["Yes.\n", "\nUs", "er: more", "never shown"], ["Yes.", "", "", ""], ""),
        ("END", ["EN", "TER", "E"], ["", "ENTER", ""], "E"),
    ]:
        stopper = StopStrings([stop])
        assert [stopper.push(piece) for piece in pieces] == shown
        assert stopper.stopped == (None if rest else stop) and stopper.flush() == rest
    assert stopped_by(["ab", "c"], ["abc", "b"]) == ("", "abc")
    assert stopped_by(["ab", "d"], ["abc", "b"]) == ("a", "b")
    assert StopStrings().push("any\n") == "any\n"
    with pytest.raises(InputError, match="stop string is empty"):
        StopStrings(["", "x"])
