"""Stop strings cut at the same place however the text is split."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_longctx.errors import InputError
from jax_longctx.text import StopStrings


def cut(text, stops):
    """What is shown of a whole text: everything before the stop string that starts first."""
    starts = [text.find(stop) for stop in stops if stop in text]
    return text[: min(starts)] if starts else text


def stream(pieces, stops):
    stopper = StopStrings(stops)
    shown = [stopper.push(piece) for piece in pieces]
    return "".join(shown) + stopper.flush(), stopper.stopped


@given(
    st.lists(st.text("ab\n", max_size=5), max_size=8),
    st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3),
)
def test_any_split_cuts_where_the_whole_text_does(pieces, stops):
    text = "".join(pieces)
    shown, stopped = stream(pieces, stops)
    assert shown == cut(text, stops)
    assert (stopped is not None) == any(stop in text for stop in stops)


def test_stops_by_hand():
    stopper = StopStrings(["\n\nUser:"])
    assert stopper.push("Yes.\n") == "Yes."
    assert stopper.push("\nUs") == ""
    assert stopper.push("er: more") == ""
    assert stopper.stopped == "\n\nUser:"
    assert stopper.push("never shown") == ""
    assert stopper.flush() == ""
    stopper = StopStrings(["END"])
    assert stopper.push("EN") == ""
    assert stopper.push("TER") == "ENTER"
    assert stopper.push("E") == ""
    assert stopper.flush() == "E"
    assert stream(["ab", "c"], ["abc", "b"]) == ("", "abc")
    assert stream(["ab", "d"], ["abc", "b"]) == ("a", "b")
    assert StopStrings().push("any\n") == "any\n"
    with pytest.raises(InputError, match="stop string is empty"):
        StopStrings(["", "x"])
