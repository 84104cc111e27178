"""A text of a given size with a sentence hidden in it; and English that CPython ships."""

import bisect
import importlib
import itertools
import re
from collections.abc import Callable, Iterator

from jax_longctx.errors import InputError

__all__ = ["NOISE", "Haystack", "pieces", "python_topics"]

# A text that says nothing, repeated as often as it takes: the easiest to find a sentence in.
NOISE = "Leaves fall. Rain runs down. The wind turns. Night comes. Then it is day again.\n"

# A sentence's end before a capital, or a blank line: borders at which a sentence can be put in.
_BORDER = re.compile(r"(?<=[.?!])\s+(?=[A-Z])|\n{2,}")


def python_topics() -> str:
    """The running text of Python's language reference (`pydoc_data.topics`), by paragraphs.

    Grammar, examples and lists are left out and lines are joined: a model as small as the demo's
    takes up the pattern of the code around a question sooner than it looks for an answer.
    """
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except ModuleNotFoundError as error:
        raise InputError(
            "this Python comes without its help texts (pydoc_data.topics); "
            "use a Python with its full standard library"
        ) from error
    paragraphs = "\n\n".join(topics.values()).split("\n\n")
    return "\n\n".join(" ".join(text.split()) for text in paragraphs if _is_prose(text))


def _is_prose(paragraph: str) -> bool:
    code = paragraph.startswith(" ") or "::=" in paragraph or ">>>" in paragraph
    return len(paragraph) > 200 and not code


class Haystack:
    """A text in sentences, whose sizes in tokens are counted once, each behind the one before.

    Alone a short sentence has more tokens than in a text.

    Args:
      count: tokens of a text, without special tokens.
    """

    def __init__(self, text: str, count: Callable[[str], int]):
        self.count = count
        self.pieces = [piece for piece in pieces(text + "\n\n") if piece.strip()]
        if not self.pieces:
            raise InputError("the text to hide a sentence in is empty")
        self.sizes = [
            count(before + piece) - count(before)
            for before, piece in zip([self.pieces[-1], *self.pieces], self.pieces, strict=False)
        ]

    def hide(self, sentence: str, *, tokens: int, depth: float, start: int = 0) -> tuple[str, int]:
        """At most `tokens` tokens of the text from its piece `start` on, with `sentence` in it.

        A text that is too short starts over. The sentence goes to the first border of sentences
        or paragraphs at or after `depth`, a share of the tokens around it.

        Returns:
          The text, and about how many of its tokens come before the sentence.

        Raises:
          InputError: there is no room for a piece beside the sentence.
        """
        room = tokens - self.count(f"\n\n{sentence}\n\n")
        while True:
            text, before = self._filled(sentence, room, depth, start)
            over = self.count(text) - tokens
            if over <= 0:
                return text, before
            # Where pieces join, tokens may be more than were counted.
            room -= over

    def _filled(self, sentence: str, room: int, depth: float, start: int) -> tuple[str, int]:
        """The sentence in at most `room` counted tokens of the text."""
        chosen, sizes = [], [0]
        for index in itertools.count(start):
            index %= len(self.pieces)
            if sizes[-1] + self.sizes[index] > room:
                break
            chosen.append(self.pieces[index])
            sizes.append(sizes[-1] + self.sizes[index])
        if not chosen:
            raise InputError(f"{room} tokens beside it are too few for any text; ask for more")
        at = bisect.bisect_left(sizes, depth * sizes[-1])
        head, tail = "".join(chosen[:at]).rstrip(), "".join(chosen[at:]).strip()
        return "\n\n".join(part for part in (head, sentence, tail) if part), sizes[at]


def pieces(text: str) -> Iterator[str]:
    """Sentences and paragraphs, each with the white space after it."""
    start = 0
    for border in _BORDER.finditer(text):
        yield text[start : border.end()]
        start = border.end()
    yield text[start:]
