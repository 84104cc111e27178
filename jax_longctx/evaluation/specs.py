"""Text form of methods and tasks with settings, and the protocols of perplexity."""

import dataclasses
import re
from typing import Literal

from jax_longctx.errors import InputError
from jax_longctx.settings import named_text, parse_named

# A share of the length: "L/8", or all of it.
_SHARE = re.compile(r"L(?:/(\d+))?")


@dataclasses.dataclass(frozen=True)
class Spec:
    """A name and settings as text: `name:key=value,...`.

    A setting `L/8` is an eighth of the prompt's length, in tokens.
    """

    name: str
    settings: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, text: str) -> "Spec":
        """Parses `"citrus:budget=1024,chunk=256"`. Raises InputError as `parse_named`."""
        return cls(*parse_named(text))

    @property
    def label(self) -> str:
        """Name in rows and tables: `citrus budget=1024`."""
        return named_text(self.name, dict(self.settings), " ", " ")

    def at(self, length: int) -> dict[str, str]:
        """The settings for prompts of `length` tokens, with shares as numbers.

        Raises:
          InputError: a setting is `L/0`.
        """
        values = {}
        for key, value in self.settings:
            share = _SHARE.fullmatch(value)
            if share and share[1] is not None and not int(share[1]):
                raise InputError(f"{key}={value} of {self.name} is no share of a length")
            values[key] = str(length // int(share[1] or 1)) if share else value
        return values


@dataclasses.dataclass(frozen=True, kw_only=True)
class Protocol:
    """Which tokens of a text are scored, and how they are fed.

    Attributes:
      through: argument of `engine.scoring.forced_states`.
      length: tokens of a text, the scored ones included.
      score: number of last tokens that are scored; None for all but the first.
      window: scored tokens of a point in a curve over positions.
      stream: whether a text may span several documents.
    """

    through: Literal["decode", "context", "question"]
    length: int
    score: int | None
    window: int
    stream: bool = False


PROTOCOLS = {
    "P1": Protocol(through="decode", length=16384, score=256, window=16),
    "P2": Protocol(through="decode", length=16384, score=50, window=10),
    "P3": Protocol(through="context", length=65536, score=None, window=8192, stream=True),
    "P4": Protocol(through="context", length=65536, score=None, window=4096, stream=True),
    "P5": Protocol(through="question", length=16384, score=256, window=16),
}
