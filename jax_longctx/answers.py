"""Answers: what ends them, and the text of their tokens."""

import collections
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, TypedDict

from jax_longctx.engine import Ask, Chosen, Context, RunningBatch, Sampling
from jax_longctx.engine.capacity import Fetched
from jax_longctx.engine.engine import BLOCK, FIRST_BLOCKS
from jax_longctx.engine.rows import FAULTS
from jax_longctx.errors import InputError
from jax_longctx.text import StopStrings, Tokenizer

OnText = Callable[[int, str], None]


class AnswerOptions(TypedDict, total=False):
    """How answers are sampled and where they end.

    Attributes:
      sampling: greedy by default.
      max_tokens: most tokens of an answer, 128 by default.
      stop: strings that end an answer; may be special tokens, as text.
      stop_at_eos: whether the tokenizer's end-of-text ids end an answer, True by default.
      on_text: called with (row, new text) as the answers arrive.
    """

    sampling: Sampling | None
    max_tokens: int
    stop: Sequence[str]
    stop_at_eos: bool
    on_text: OnText | None


@dataclasses.dataclass(frozen=True)
class Answer:
    """One row's answer.

    Attributes:
      text: up to, not including, the stop string that ended it.
      tokens: the generated ids, the one that ended the answer included.
      finish: "stop" (a stop id or string), "length" (max_tokens) or "interrupted" (by the caller).
      prefill_seconds: of `generate`; 0 for `ask`, whose context was prefilled earlier.
      first_token_seconds: from the start of the question to its first token.
      decode_seconds: from the first token to the last.
      warning: None, or that text, question and answer are longer than the model was trained for
        (see `LongContext.length_warning`).
      fetched: what the answers of the call fetched from the host's memory, over all its rows; None
        where contexts lie on the devices.
    """

    text: str
    tokens: list[int]
    finish: str
    prefill_seconds: float
    first_token_seconds: float
    decode_seconds: float
    warning: str | None = None
    fetched: Fetched | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """`AnswerOptions` with their defaults."""

    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    max_tokens: int = 128
    stop: Sequence[str] = ()
    stop_at_eos: bool = True
    on_text: OnText | None = None

    @staticmethod
    def of(options: AnswerOptions) -> "Asked":
        """These options. TypeError for an unknown one."""
        given: dict[str, Any] = dict(options)
        given["sampling"] = given.get("sampling") or Sampling()
        return Asked(**given)

    def tell(self, number: int, text: str) -> None:
        """Hands on the new text of an answer, if there is any."""
        if text and self.on_text is not None:
            self.on_text(number, text)


class AnswerReader:
    """One row's tokens as text, cut at the first stop string.

    Args:
      shown: special tokens that are text.

    Attributes:
      tokens: the ids so far, the one that ended the answer included.
      pieces: the text so far, as it became certain.
      interrupted: whether the caller has ended the answer.
    """

    interrupted = False

    def __init__(
        self,
        tokenizer: Tokenizer,
        after: Sequence[int],
        stop: Sequence[str],
        ends: Sequence[int],
        shown: Sequence[str] = (),
    ):
        self.decoder, self.stops = tokenizer.stream_decoder(after, shown=shown), StopStrings(stop)
        self.ends, self.ended = frozenset(ends), False
        self.tokens: list[int] = []
        self.pieces: list[str] = []

    @property
    def finished(self) -> bool:
        """Whether a stop id or string has ended the answer."""
        return self.ended or self.stops.stopped is not None

    def push(self, tokens: list[int]) -> str:
        """The new text of these tokens; empty once the answer has ended."""
        begun = len(self.pieces)
        for token in tokens:
            if self.finished:
                break
            self.tokens.append(token)
            self.ended = token in self.ends
            if not self.ended:
                self.pieces.append(self.stops.push(self.decoder.push([token])))
        return "".join(self.pieces[begun:])

    def flush(self) -> str:
        """The text that was held back, at the end of the answer."""
        self.pieces.append(self.stops.push(self.decoder.flush()) + self.stops.flush())
        return self.pieces[-1]

    def answer(
        self, first: float, decode: float, warning: str | None, fetched: Fetched | None = None
    ) -> Answer:
        """The answer, with its seconds to the first token and from there on."""
        text, finish = "".join(self.pieces), "stop" if self.finished else "length"
        finish = "interrupted" if self.interrupted else finish
        return Answer(text, self.tokens, finish, 0.0, first, decode, warning, fetched)


def answer_together(
    batch: RunningBatch,
    context: Context,
    asks: Sequence[Ask],
    readers: Sequence[AnswerReader],
    how: Asked,
) -> list[list[float]]:
    """Answers asks over one context, each into its reader, as places of the batch are free.

    Returns:
      the times at which each ask's tokens came, by `time.perf_counter`.
    """
    times: list[list[float]] = [[] for _ in asks]
    waiting, running = collections.deque(range(len(asks))), dict[int, int]()
    blocks = iter(FIRST_BLOCKS)

    def heard(place: int, chosen: Sequence[Chosen]) -> None:
        """A row's new tokens; the row leaves once its answer has ended."""
        number, reason = running[place], batch.ended.get(place)
        reader = readers[number]
        if reason in FAULTS:
            raise InputError(FAULTS[reason])
        how.tell(number, reader.push([each.token for each in chosen]))
        times[number].append(time.perf_counter())
        if reason is not None or reader.finished:
            batch.leave(place)
            del running[place]
            how.tell(number, reader.flush())

    while waiting or running:
        while waiting and batch.free:
            number = waiting.popleft()
            place, first = batch.join(context, asks[number])
            running[place] = number
            heard(place, [first])
        for place, chosen in batch.step(next(blocks, BLOCK)).items():
            if chosen or place in batch.ended:
                heard(place, chosen)
    return times
