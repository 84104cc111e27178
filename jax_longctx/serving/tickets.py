"""Tickets that HTTP handlers give the scheduler, and the events that they get back."""

import dataclasses
from collections.abc import Callable, Sequence

from jax_longctx.answers import AnswerReader
from jax_longctx.engine.marks import Weights
from jax_longctx.engine.rows import Ask, Chosen
from jax_longctx.engine.scoring import TextScores
from jax_longctx.serving.schema import RequestError
from jax_longctx.serving.texts import Entry, Text
from jax_longctx.sources import Placed


@dataclasses.dataclass(frozen=True)
class Prefilled:
    """Tokens that were read of the text of a ticket that reads for a client, and all of them."""

    done: int
    total: int


@dataclasses.dataclass(frozen=True)
class Piece:
    """More of an answer.

    Attributes:
      text: that is certain.
      chosen: the tokens that it came with.
      tokens: of the answer so far.
      finish: why the ticket ended, `stop` or `length`; a ticket that only reads ends by `length`.
      read: what the answer read of the text, at its end, if that is wanted.
    """

    text: str = ""
    chosen: Sequence[Chosen] = ()
    tokens: int = 0
    finish: str | None = None
    read: Weights | None = None


# A ticket that fails ends with its error.
Event = Prefilled | Piece | RequestError


@dataclasses.dataclass(eq=False, kw_only=True)
class Ticket:
    """To prefill a text, or with `ask` to answer a question about it.

    Attributes:
      text: counted as used by this ticket (`Contexts.use`); the scheduler releases it.
      send: takes the ticket's events, in the scheduler's thread.
      came: when its request came, of `time.monotonic`.
      entry: what names the text, of a ticket that reads it for a client; removed with a ticket that
        ends before the text is `ready`.
      about: the context that the question is about; where it is deleted before the answer begins,
        the ticket fails.
      reader: turns the answer's tokens into text.
      prompt: tokens of the prompt that it answers.
      cached: tokens of the text that were prefilled before this ticket came.
      scores: of the text's tokens and the one behind it (see `Text.scored`), once it is read.
      placed: the text, where it is to be said which passages the answer read.
      cancelled: the client is gone.
    """

    text: Text
    send: Callable[[Event], None]
    came: float
    entry: Entry | None = None
    about: Entry | None = None
    ask: Ask | None = None
    reader: AnswerReader | None = None
    prompt: int = 0
    cached: int = 0
    scores: TextScores | None = None
    placed: Placed | None = None
    ready: bool = False
    cancelled: bool = False

    @property
    def saves(self) -> bool:
        """Whether the ticket is to save its text."""
        return self.entry is not None and self.entry.save
