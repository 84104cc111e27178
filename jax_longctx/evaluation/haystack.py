"""Texts of a given number of tokens with sentences hidden in them, from English in CPython."""

import bisect
import dataclasses
import functools
import importlib
import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from jax_longctx.errors import InputError, LengthError
from jax_longctx.files import read_text

# Fewest units that give an estimate of one unit's tokens.
_PROBE = 20
# A text without facts, repeated to any length: a hidden sentence is easiest to find in it.
NOISE = "Leaves fall. Rain runs down. The wind turns. Night comes. Then it is day again.\n"

# The end of a sentence before a capital, or a blank line: places for a hidden sentence.
_BORDER = re.compile(r"(?<=[.?!])\s+(?=[A-Z])|\n{2,}")


def python_topics() -> str:
    """The running text of Python's language reference (`pydoc_data.topics`), by paragraphs.

    Grammar, examples, tables and lists are left out and lines are joined: a small model continues
    the code around a question instead of answering it.
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
class Fitted:
    """A text that fills a given number of tokens.

    Attributes:
      tokens: of the text.
      units: sentences, lines or words that fitted.
      depths: the place of each hidden sentence, as a share of the tokens of the text around it.
    """

    text: str
    tokens: int
    units: int = 1
    depths: tuple[float, ...] = ()


class Haystack:
    """A text in sentences. The tokens of each are counted once, behind the sentence before it.

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

    def fill(
        self,
        needles: Sequence[tuple[float, str]],
        *,
        tokens: int,
        start: int = 0,
        head: str = "",
        inline: bool = False,
    ) -> Fitted:
        """`head` and as much of the text from its piece `start` on as `tokens` tokens hold.

        A text that is too short is repeated.

        Args:
          needles: (depth, sentence) of the sentences to hide, in the order of their depths: shares
            of the tokens of the text around them. Each goes to the first border of sentences or
            paragraphs at or after its depth.
          head: the start of the text; nothing is hidden in it.
          inline: sentences stand in the running text; otherwise each is a paragraph.

        Raises:
          LengthError: there is no room for a piece of text beside the sentences.
        """
        sizes = [0]
        depths, sentences = zip(*needles, strict=True) if needles else ((), ())

        def around(units: int) -> int:
            """The tokens of the first `units` pieces; extends `sizes`."""
            while len(sizes) <= units:
                piece = (start + len(sizes) - 1) % len(self.pieces)
                # At least one: pieces without tokens would never fill the room.
                sizes.append(sizes[-1] + max(1, self.sizes[piece]))
            return sizes[units]

        def filled(units: int) -> Fitted:
            whole = around(units)
            borders = [bisect.bisect_left(sizes, depth * whole, 0, units + 1) for depth in depths]
            chosen = [self.pieces[(start + i) % len(self.pieces)] for i in range(units)]
            text = head + _set_in(chosen, borders, sentences, inline)
            found = tuple(sizes[border] / whole for border in borders) if whole else ()
            return Fitted(text, self.count(text), units, found)

        room = tokens - self.count(head + "".join(f"\n\n{each}\n\n" for each in sentences))
        guess = 0
        while room > 0 and around(guess + 1) <= room:
            guess += 1
        average = sum(self.sizes) / len(self.sizes)
        tried: dict[int, Fitted] = {}

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
    """The pieces, with each sentence before the piece whose index is its border."""
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
    """`noise`, `topics` (Python's own documentation), or a file's text.

    Raises:
      InputError: no such file, not UTF-8, or empty.
    """
    if source == "topics":
        return Haystack(python_topics(), count)
    advice = "give noise, topics, or a text file"
    return Haystack(NOISE if source == "noise" else read_file(source, advice), count)


def source_name(source: str) -> str:
    """A text's short name for tables: of a file, its name without folder and ending."""
    return source if source in ("noise", "topics") else Path(source).stem


def read_file(path: str, advice: str) -> str:
    """The text of a user's UTF-8 file. Raises InputError, which ends in the advice."""
    try:
        text = read_text(path, "utf-8-sig")
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


def largest(
    size: Callable[[int], int], most: int, *, guess: int, each: float, limit: int | None = None
) -> int:
    """The greatest `n` from 0 to `limit` with `size(n) <= most`; -1 where there is none.

    Two or three calls suffice when the guess is good. `size` may fall now and then, as tokens may
    where pieces join: then the result fits, and one unit more does not.

    Args:
      size: tokens of a text of n units, growing with n.
      guess: the first n to try.
      each: about how many tokens a unit has, which sets the steps of the search.
    """
    low, high = -1, math.inf if limit is None else limit + 1
    n, known, tried = guess, None, 0
    while high - low > 1:
        n = int(min(max(n, low + 1), high - 1))
        tried += 1
        if tried % 4 == 0 and high < math.inf:
            # Every fourth step halves the range, however irregular the sizes are.
            n = (low + int(high)) // 2
        over = size(n) - most
        if known is not None and (over - known[1]) * (n - known[0]) > 0:
            each = (over - known[1]) / (n - known[0])
        known = n, over
        if over > 0:
            high = n
            n -= math.ceil(over / each)
        else:
            low = n
            n += max(1, math.floor(-over / each))
    return low


def most_units(
    count: Callable[[str], int],
    text: Callable[[int], str],
    room: int,
    *,
    fewest: int = 1,
    limit: int | None = None,
) -> Fitted:
    """`text` of the most units, from `fewest` to `limit`, that has at most `room` tokens.

    Raises:
      LengthError: not even `fewest` fit.
    """
    sizes: dict[int, int] = {}

    def size(units: int) -> int:
        sizes[units] = count(text(units))
        return sizes[units]

    base, each, guess, probe = size(0), 1.0, 0, _PROBE
    # The tokens of a unit are estimated from a few units, then from an eighth of the guess.
    for _ in range(2):
        probe = probe if limit is None else min(probe, max(limit, 1))
        each = max((size(probe) - base) / probe, 1.0)
        guess = max(int((room - base) / each), 0)
        probe = max(guess // 8, _PROBE)
    units = largest(size, room, guess=guess, each=each, limit=limit)
    if units < fewest:
        raise LengthError(f"{max(room, 0)} tokens are too few for this task's text; ask for more")
    return Fitted(text(units), sizes[units], units)
