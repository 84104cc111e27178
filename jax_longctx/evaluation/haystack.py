"""A text of a given size with a sentence hidden in it; and English that CPython ships."""

import bisect
import dataclasses
import functools
import importlib
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from jax_longctx.errors import InputError, LengthError
from jax_longctx.evaluation.fitting import largest

__all__ = [
    "NOISE",
    "Filled",
    "Haystack",
    "open_haystack",
    "pieces",
    "python_topics",
    "read_file",
    "read_source",
    "source_name",
]

# A text that says nothing, repeated as often as it takes: the easiest to find a sentence in.
NOISE = "Leaves fall. Rain runs down. The wind turns. Night comes. Then it is day again.\n"

# A sentence's end before a capital, or a blank line: borders at which a sentence can be put in.
_BORDER = re.compile(r"(?<=[.?!])\s+(?=[A-Z])|\n{2,}")


def python_topics() -> str:
    """The running text of Python's language reference (`pydoc_data.topics`), by paragraphs.

    Grammar, examples, tables and lists are left out and lines are joined: a model as small as the
    demo's takes up the pattern of the code around a question sooner than it looks for an answer.
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
    table = paragraph.startswith("+--")
    return len(paragraph) > 200 and not code and not table


@dataclasses.dataclass(frozen=True)
class Filled:
    """A text with sentences hidden in it.

    Attributes:
      text: the whole.
      before: about how many tokens of the text around it come before each sentence.
      around: about how many tokens the text around has.
      tokens: how many the whole has.
    """

    text: str
    before: tuple[int, ...]
    around: int
    tokens: int


class Haystack:
    """A text in sentences, whose sizes in tokens are counted once, each behind the one before.

    Alone a short sentence has more tokens than in a text.

    Args:
      count: tokens of a text, without special tokens.
    """

    def __init__(self, text: str, count: Callable[[str], int]):
        self.count = count
        self.text = text
        self.pieces = [piece for piece in pieces(text + "\n\n") if piece.strip()]
        if not self.pieces:
            raise InputError("the text to hide a sentence in is empty")
        self.sizes = [
            count(before + piece) - count(before)
            for before, piece in zip([self.pieces[-1], *self.pieces], self.pieces, strict=False)
        ]

    def hide(self, sentence: str, *, tokens: int, depth: float, start: int = 0) -> tuple[str, int]:
        """`fill` with one sentence: the text, and about how many of its tokens come before it."""
        filled = self.fill([(depth, sentence)], tokens=tokens, start=start)
        return filled.text, filled.before[0]

    def fill(
        self,
        needles: Sequence[tuple[float, str]],
        *,
        tokens: int,
        start: int = 0,
        head: str = "",
        inline: bool = False,
    ) -> Filled:
        """`head` and as much of the text from its piece `start` on as `tokens` tokens hold.

        A text that is too short starts over.

        Args:
          needles: sentences to hide in it, with their depths in rising order: shares of the
            tokens of the text around them. Each goes to the first border of sentences or
            paragraphs at or after its depth.
          head: what the text begins with, before anything that may be hidden.
          inline: sentences stand in the running text; else each is a paragraph.

        Raises:
          LengthError: there is no room for a piece of text beside the sentences.
        """
        sizes = [0]
        depths, sentences = zip(*needles, strict=True) if needles else ((), ())

        def around(units: int) -> int:
            """The tokens of the first `units` pieces; `sizes` is then known up to there."""
            while len(sizes) <= units:
                piece = (start + len(sizes) - 1) % len(self.pieces)
                # At least one: a text of which nothing counts would never fill anything.
                sizes.append(sizes[-1] + max(1, self.sizes[piece]))
            return sizes[units]

        def filled(units: int) -> Filled:
            whole = around(units)
            borders = [bisect.bisect_left(sizes, depth * whole, 0, units + 1) for depth in depths]
            chosen = [self.pieces[(start + i) % len(self.pieces)] for i in range(units)]
            text = head + _set_in(chosen, borders, sentences, inline)
            found = tuple(sizes[border] for border in borders)
            return Filled(text, found, whole, self.count(text))

        room = tokens - self.count(head + "".join(f"\n\n{each}\n\n" for each in sentences))
        guess = 0
        while room > 0 and around(guess + 1) <= room:
            guess += 1
        average = sum(self.sizes) / len(self.sizes)
        tried: dict[int, Filled] = {}

        def size(units: int) -> int:
            tried[units] = filled(units)
            return tried[units].tokens

        units = largest(size, tokens, guess=guess, each=max(average, 1.0))
        if units < 1:
            raise LengthError(
                f"{max(room, 0)} tokens beside it are too few for any text; ask for more"
            )
        return tried[units]


def _set_in(
    chosen: Sequence[str], borders: Sequence[int], sentences: Sequence[str], inline: bool
) -> str:
    """The pieces with each sentence set in before the piece of its number."""
    parts, last = [], 0
    for border, sentence in zip(borders, sentences, strict=True):
        parts += ["".join(chosen[last:border]), sentence + " " * inline]
        last = border
    parts.append("".join(chosen[last:]))
    if inline:
        return "".join(parts).strip()
    return "\n\n".join(part.strip() for part in parts if part.strip())


@functools.lru_cache(maxsize=4)
def open_haystack(source: str, count: Callable[[str], int]) -> Haystack:
    """The haystack of `read_source(source)`, kept for the next call with the same arguments."""
    return Haystack(read_source(source), count)


def read_source(source: str) -> str:
    """The text to hide in: `noise`, `topics` (Python's own documentation), or a file's path.

    Raises:
      InputError: no such file, not UTF-8, or empty.
    """
    if source == "noise":
        return NOISE
    if source == "topics":
        return python_topics()
    return read_file(source, "give noise, topics, or a text file")


def source_name(source: str) -> str:
    """A text's short name, for tables: a file is called by its name without folder and ending."""
    return source if source in ("noise", "topics") else Path(source).stem


def read_file(path: str, advice: str) -> str:
    """A user's UTF-8 file. Raises InputError that ends in the advice."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}; {advice}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text (byte {error.start}); {advice}") from error
    if not text.strip():
        raise InputError(f"{path} is empty; {advice}")
    return text


def pieces(text: str) -> Iterator[str]:
    """Sentences and paragraphs, each with the white space after it."""
    start = 0
    for border in _BORDER.finditer(text):
        yield text[start : border.end()]
        start = border.end()
    yield text[start:]
