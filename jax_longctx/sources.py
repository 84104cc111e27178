"""Where an answer was found: the passages of a text that the answer's tokens read most.

`engine.marks` says how much of their attention the tokens gave to each part of the text, in every
layer. Here parts become passages of whole sentences, and tokens characters.
"""

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from jax_longctx.engine import Context
from jax_longctx.engine.marks import Weights, weights_of
from jax_longctx.errors import InputError
from jax_longctx.text import PromptText, Tokenizer, chat_layout

if TYPE_CHECKING:
    from jax_longctx.api import Answer, LongContext

# Name and page of the document that has a character of the text.
Place = Callable[[int], tuple[str | None, int | None]]
# The layers that count, as shares of all: those before and behind look at what is near, or at
# everything. In these the passage that was copied stood out most, of 36 needles in essays.
LAYERS = (0.4, 0.9)
# First tokens of a context, which take what attention is left over (StreamingLLM, section 3.1).
SINKS = 1
# Tokens of a passage, before it grows to whole sentences.
PASSAGE = 64
# Characters by which a passage grows at most, at either end.
GROWTH = 160
_BORDER = re.compile(r"(?<=[.?!])\s+|\n+")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """A passage that an answer's tokens read.

    Attributes:
      start, end: its first character in the text, and the one behind its last.
      score: its share of all that was read of the text, from 0 to 1.
      best: characters of the passage that were read most: (first, behind the last) of each run.
      document, page: where it stands, if the text says so.
    """

    start: int
    end: int
    score: float
    text: str
    best: tuple[tuple[int, int], ...] = ()
    document: str | None = None
    page: int | None = None

    def record(self) -> dict[str, Any]:
        """As JSON."""
        names = ("start", "end", "score", "text", "document", "page")
        return {name: getattr(self, name) for name in names}


@dataclasses.dataclass(frozen=True)
class Placed:
    """The text of a context.

    Attributes:
      text: as it was given, without what a template puts around it.
      starts: of each of the context's tokens, its first character in `text`; negative, or beyond
        the text's end, in the template's parts.
      place: where each character stands, if the text is of documents.
    """

    text: str
    starts: Sequence[int]
    place: Place | None = None

    @property
    def span(self) -> tuple[int, int]:
        """The tokens of the text but sinks: the first, and the one behind the last."""
        first, last = np.searchsorted(np.asarray(self.starts), (0, len(self.text)))
        return max(int(first), min(SINKS, int(last) - 1)), int(last)

    @classmethod
    def of(
        cls,
        tokenizer: Tokenizer,
        tokens: Sequence[int],
        text: str | PromptText | None,
        place: Place | None = None,
    ) -> "Placed":
        """The text of these tokens.

        Args:
          text: that they were made of; None where nobody has it, for what the tokens say.

        Raises:
          InputError: they were made of another text.
        """
        if text is None:
            return cls._decoded(tokenizer, tokens)
        ids, starts = tokenizer.placed(text, bos=True)
        if ids != list(tokens):
            raise InputError("this context was read from another text; give the one it is of")
        whole = text if isinstance(text, PromptText) else PromptText.of("", text)
        (begin, _), *_, (_, end) = [*whole.plain, *whole.plain[-1:]]
        return cls(whole.text[begin:end], [start - begin for start in starts], place)

    @classmethod
    def _decoded(cls, tokenizer: Tokenizer, tokens: Sequence[int]) -> "Placed":
        decoder, starts, pieces, at = tokenizer.stream_decoder(special=True), [], [], 0
        for token in tokens:
            starts.append(at)
            pieces.append(decoder.push([token]))
            at += len(pieces[-1])
        text = "".join([*pieces, decoder.flush()])
        before = chat_layout(tokenizer).before if tokenizer.has_chat else ""
        begin = len(before) if text.startswith(before) else 0
        return cls(text[begin:], [start - begin for start in starts])


def find_sources(
    model: "LongContext",
    context: Context,
    questions: Sequence[str | PromptText | Sequence[int]],
    answers: Sequence["Answer"],
    texts: Sequence[str | PromptText | None],
    place: Place | None = None,
) -> list["Found"]:
    """Where each row's answer was found; the context stays as it is.

    Args:
      questions: as they were asked, of each row.
      texts: that the context was read from (see `Placed.of`).
      place: where their characters stand, if they are of documents.

    Raises:
      InputError, CapacityError: as `weights_of`, or the context was read from another text.
    """
    tokenizer, rows = model.tokenizer, zip(context.rows, texts, strict=False)
    placed = [Placed.of(tokenizer, row, text, place) for row, text in rows]
    asked = [tokenizer.encode(x) if isinstance(x, str | PromptText) else x for x in questions]
    tokens, spans = [answer.tokens for answer in answers], [each.span for each in placed]
    weights = weights_of(model.engine, context, asked, tokens, spans)
    return [found_in(*each) for each in zip(weights, placed, strict=True)]


@dataclasses.dataclass(frozen=True)
class Found:
    """What an answer read of its text.

    Attributes:
      sources: the passages that were read most, the best first; they do not overlap.
      shares: of X parts of the text, the share of each in all that was read.
      edges: where the parts begin, and the last one ends, in characters.
    """

    sources: list[Source]
    shares: Float[np.ndarray, " X"]
    edges: Sequence[int]


def found_in(weights: Weights, placed: Placed, most: int = 3) -> Found:
    """What was read by these weights."""
    (first, last), width = placed.span, weights.width
    edges = [*placed.starts[first:last:width], len(placed.text)]
    # Of layers without a sliding window.
    read = weights.read[weights.read.any(axis=1)]
    begin, end = (int(len(read) * share) for share in LAYERS)
    read = read[begin : max(end, begin + 1), : len(edges) - 1].sum(axis=0)
    shares = read / read.sum()
    window, left, sources = min(max(1, PASSAGE // width), len(shares)), shares.copy(), []
    for _ in range(most):
        sums = np.convolve(left, np.ones(window), "valid")
        begin = int(np.argmax(sums))
        if sums[begin] <= 0:
            break
        # What stands out of the window; the rest is chance.
        inside = left[begin : begin + window]
        strong = np.flatnonzero(inside >= inside.max() / 8)
        begin, end = begin + int(strong[0]), begin + int(strong[-1]) + 1
        sources.append(_source(placed, edges[begin : end + 1], shares[begin:end]))
        left[max(0, begin - 1) : end + 1] = 0
    return Found(sources, shares, edges)


def _source(placed: Placed, edges: Sequence[int], shares: np.ndarray) -> Source:
    """The passage of some parts, grown to whole sentences where these end near."""
    text, start, stop = placed.text, edges[0], edges[-1]
    before = [x.end() for x in _BORDER.finditer(text, max(0, start - GROWTH), start)]
    start = before[-1] if before else 0 if start <= GROWTH else start
    behind = _BORDER.search(text, max(stop - 1, 0), min(stop + GROWTH, len(text)))
    stop = behind.start() if behind else len(text) if len(text) - stop <= GROWTH else stop
    strong = np.flatnonzero(shares >= shares.max() / 2).tolist()
    best, most = [(edges[x], edges[x + 1]) for x in strong], int(np.argmax(shares))
    # A part may begin in the document or page before.
    middle = (edges[most] + edges[most + 1]) // 2
    document, page = placed.place(middle) if placed.place is not None else (None, None)
    return Source(
        start=start,
        end=stop,
        score=round(float(shares.sum()), 4),
        text=text[start:stop],
        best=tuple(best),
        document=document,
        page=page,
    )
