"""The method that `--method auto` takes, and the reason for it in one line.

Full attention is exact. It is chosen where the text, with question and answer, fits the trained
length and the KV cache fits the memory. Otherwise `choices.json` decides. It says of each method
how many hidden facts were found at some multiples of the trained length, and what a decode step
costs. `docs/choices.py` writes it from the committed results. Of the methods that the model allows,
whose caches fit, and whose prefills are few enough,

1. the one that found most is best, by the smallest measured multiple that covers the text;
2. methods whose 95% interval holds the best's share count as equally good: the cheapest decode step
   of these wins, by time where all of them were timed, else by the bytes that it reads.

A method that needs the question at prefill reads the text once for each question. It takes part up
to `MOST_PREFILLS` questions, and not where the context is to be saved. If no cache fits, the
smallest is chosen, and the engine says how many tokens would fit.
"""

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any

from jax_longctx.engine.capacity import fits
from jax_longctx.errors import ConfigError
from jax_longctx.memory import shown_bytes
from jax_longctx.methods import make_method
from jax_longctx.settings import named_text

if TYPE_CHECKING:
    from jax_longctx.api import LongContext

TABLE = "choices.json"
# Prefills of one text that a user waits for before a method without them is better.
MOST_PREFILLS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """Hidden facts found at one length.

    Attributes:
      ratio: length of the text in trained lengths.
      share: percent of the facts.
      n: facts.
      interval: 95%, Wilson's.
    """

    ratio: float
    share: float
    n: int
    interval: tuple[float, float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """The measurements of a method.

    Attributes:
      model: which model it was measured with.
      found: by ascending ratio.
      read: bytes that a decode step reads, full attention is 1.
      step: time of a decode step, full attention is 1; None where it was not timed.
    """

    name: str
    model: str
    settings: Mapping[str, str]
    found: Sequence[Found]
    read: float
    step: float | None

    def at(self, ratio: float) -> Found:
        """What it found at the smallest measured length that covers `ratio`; else the largest."""
        return next((each for each in self.found if each.ratio >= ratio), self.found[-1])


@dataclasses.dataclass(frozen=True)
class Choice:
    """A method, and why it was chosen, in one line."""

    method: Any
    reason: str


@functools.cache
def table() -> tuple[Measured, ...]:
    """The measured methods that ship with the package."""
    text = resources.files("jax_longctx").joinpath(TABLE).read_text(encoding="utf-8")
    return parse_table(text)


def parse_table(text: str) -> tuple[Measured, ...]:
    """The methods of a file that `docs/choices.py` wrote."""

    def found(entry: dict[str, Any]) -> Found:
        low, high = entry["interval"]
        return Found(**{**entry, "interval": (low, high)})

    described = json.loads(text)
    model = described["model"].split(",")[0]
    return tuple(
        Measured(**{**entry, "model": model, "found": tuple(map(found, entry["found"]))})
        for entry in described["methods"]
    )


def choose(
    model: "LongContext",
    tokens: int,
    *,
    reserve: int,
    questions: int = 1,
    saving: bool = False,
    measured: Sequence[Measured] | None = None,
) -> Choice:
    """The method for one text.

    Args:
      model: weights or their shapes, under full attention.
      tokens: of the text, the longest question and its answer.
      reserve: of question and answer.
      questions: how many will be asked of it.
      saving: whether the context is to be saved.
      measured: the package's table by default.
    """
    trained, full = model.config.trained_length, model.engine.method
    free = model.engine.memory_expected()
    need = model.engine.new_cache_bytes(tokens, reserve)
    within = tokens <= trained
    if within and fits(need, free):
        short = f"{tokens:,} tokens fit the trained length of {trained:,} and the memory"
        return Choice(full, f"full: {short}; it is exact")
    ratio, smallest = tokens / trained, (need, full, "full")
    rows, sizes = [], {}
    for row in table() if measured is None else measured:
        made = make_method(row.name, dict(row.settings))
        if made.info.needs_question and (saving or questions > MOST_PREFILLS):
            continue
        try:
            size = model.with_method(made).engine.new_cache_bytes(tokens, reserve)
        except ConfigError:
            # The method refuses the model.
            continue
        smallest = min(smallest, (size, made, _shown(row)), key=lambda each: each[0])
        if fits(size, free):
            rows.append((row, made))
            sizes[row.name] = size
    why = f"{tokens:,} tokens are more than the trained length of {trained:,}"
    if within:
        assert free is not None
        why = f"full attention's cache of {shown_bytes(need)} does not fit {shown_bytes(free)}"
    if not rows:
        return Choice(smallest[1], f"{smallest[2]}: {why}, and no cache fits; this is the smallest")
    row, made = _best(rows, ratio)
    best = row.at(ratio)
    score = f"it found {best.share:g}% of {best.n} facts at {best.ratio:g} times the trained length"
    prefills = ""
    if made.info.needs_question and questions > 1:
        prefills = f"; it reads the text {questions} times"
    return Choice(made, f"{_shown(row)}: {why}; {score} of {row.model}{prefills}")


def _best(rows: Sequence[tuple[Measured, Any]], ratio: float) -> tuple[Measured, Any]:
    """The cheapest one that is as good as the best."""
    most = max(row.at(ratio).share for row, _ in rows)
    good = [pair for pair in rows if pair[0].at(ratio).interval[1] >= most]
    if all(row.step is not None for row, _ in good):
        return min(good, key=lambda pair: pair[0].step or 0.0)
    return min(good, key=lambda pair: pair[0].read)


def _shown(row: Measured) -> str:
    return named_text(row.name, row.settings)
