import numpy as np
import pytest

from jax_longctx.engine.marks import Weights
from jax_longctx.errors import InputError
from jax_longctx.sources import SINKS, Placed, found_in
from jax_longctx.text import chat_layout
from tests.jax_longctx.cli.conftest import tiny, tokenizer_folder

__all__ = ["tiny", "tokenizer_folder"]

# Sentences of 20 characters, each of which is five tokens.
TEXT = " ".join(f"Sentence number {n:03d}." for n in range(100))


def weights(read, first=0, width=5, layers=10):
    """As if two layers in the middle had read the parts, and the others only the first."""
    of_layers = np.full((layers, len(read)), 1e-6)
    of_layers[5], of_layers[:4, 0], of_layers[9, -1] = read, 50, 50
    return Weights(of_layers, first, width)


def test_passages_are_the_sentences_that_were_read_most():
    starts = [-2, -1, *range(0, len(TEXT), 4)]
    placed = Placed(TEXT, starts, lambda at: ("book.pdf", 1 + at // 1000))
    assert placed.span == (2, len(starts))
    read = np.full(110, 0.01)
    read[[30, 31, 80]] = 3, 9, 2
    found = found_in(weights(read, first=2), placed)
    best, second, _ = found.sources
    assert best.text.startswith("Sentence") and best.text.endswith(".")
    assert best.text == TEXT[best.start : best.end] and "030" in best.text
    assert best.best == ((31 * 20, 32 * 20),) and best.start <= 30 * 20 and best.end >= 32 * 20
    assert best.score == pytest.approx(12 / found_total(read), abs=1e-3)
    assert second.start <= 80 * 20 < second.end
    assert best.record() == {
        **{"start": best.start, "end": best.end, "score": best.score, "text": best.text},
        **{"document": "book.pdf", "page": 1},
    }
    assert second.page == 2 and not best.end > second.start > best.start
    # A part that is read begins in the document before.
    placed = Placed(TEXT, starts, lambda at: ("b" if at > 605 else "a", None))
    assert found_in(weights(np.eye(110)[30], first=2), placed).sources[0].document == "b"
    # Fewer passages than were wanted, in a text that is shorter than one.
    (only,) = found_in(weights(np.ones(1), width=64), Placed("So it is.", [0, 2, 5, 8])).sources
    assert (only.text, only.score) == ("So it is.", 1.0)


def found_total(read):
    """Of the parts that the text has."""
    return read[: -(-len(TEXT) // 20)].sum()


def test_tokens_stand_where_their_characters_are(tiny):
    tokenizer, text = tiny.tokenizer, "Ein Schlüssel: 7 🗝.\n\nThe pass key is <|im_end|> 42. "
    for layout in (chat_layout(tokenizer), None):
        prompt = text if layout is None else layout.context(text)
        tokens = tokenizer.encode(prompt, bos=True)
        placed = Placed.of(tokenizer, tokens, prompt)
        first, last = placed.span
        assert placed.text == text and len(placed.starts) == len(tokens)
        inside = placed.starts[first:last]
        assert inside == sorted(inside) and inside[0] == (
            0 if first > SINKS else placed.starts[SINKS]
        )
        for number, start in enumerate(inside[:-1]):
            if start < inside[number + 1] and (number == 0 or inside[number - 1] < start):
                piece = tokenizer.decode([tokens[first + number]], special=True)
                assert text[start : inside[number + 1]].strip() == piece.strip()
        with pytest.raises(InputError, match="read from another text"):
            Placed.of(tokenizer, tokens[:-1], prompt)
    plain = "The pass key is 42."
    tokens = tokenizer.encode(chat_layout(tokenizer).context(plain), bos=True)
    prompt = chat_layout(tokenizer).context(plain)
    given, decoded = (Placed.of(tokenizer, tokens, x) for x in (prompt, None))
    assert decoded.text == given.text == plain and decoded.span == given.span
