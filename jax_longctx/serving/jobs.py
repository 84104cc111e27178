"""Jobs that HTTP handlers give the scheduler, and the events that they get back."""

import dataclasses
from collections.abc import Callable, Sequence

from jax_longctx.answers import AnswerReader
from jax_longctx.engine.running import Chosen, Request
from jax_longctx.engine.scoring import TextScores
from jax_longctx.serving.schema import RequestError
from jax_longctx.serving.texts import Entry, Text


@dataclasses.dataclass(frozen=True)
class Reading:
    """Tokens that were read of the text of a job that reads for a client, and all of them."""

    done: int
    total: int


@dataclasses.dataclass(frozen=True)
class Piece:
    """More of an answer.

    Attributes:
      text: that is certain.
      chosen: the tokens that it came with.
      tokens: of the answer so far.
      finish: why the job ended, `stop` or `length`; a job that only reads ends by `length`.
    """

    text: str = ""
    chosen: Sequence[Chosen] = ()
    tokens: int = 0
    finish: str | None = None


# A job that fails ends with its error.
Event = Reading | Piece | RequestError


@dataclasses.dataclass(eq=False, kw_only=True)
class Job:
    """To prefill a text, or with `request` to answer a question about it.

    Attributes:
      text: counted as used by this job (`Contexts.use`); the scheduler releases it.
      send: takes the job's events, in the scheduler's thread.
      came: when its request came, of `time.monotonic`.
      entry: what names the text, of a job that reads it for a client; removed with a job that
        ends before the text is `ready`.
      about: the context that the question is about; where it is deleted before the answer begins,
        the job fails.
      reader: turns the answer's tokens into text.
      prompt: tokens of the prompt that it answers.
      cached: tokens of the text that were prefilled before this job came.
      scores: of the text's tokens and the one behind it (see `Text.scored`), once it is read.
      cancelled: the client is gone.
    """

    text: Text
    send: Callable[[Event], None]
    came: float
    entry: Entry | None = None
    about: Entry | None = None
    request: Request | None = None
    reader: AnswerReader | None = None
    prompt: int = 0
    cached: int = 0
    scores: TextScores | None = None
    ready: bool = False
    cancelled: bool = False

    @property
    def saves(self) -> bool:
        """Whether the job is to save its text."""
        return self.entry is not None and self.entry.save
