"""The method that `--method auto` takes, and the reason for it in one line.

Full attention is exact. It is chosen where the text, with question and answer, fits the trained
length and the KV cache fits the memory. Otherwise `choices.json` decides. It says of each method
how it scores at some multiples of the trained length of a model, and what a decode step costs.
`docs/choices.py` writes it from the committed results. Of the methods that the model allows, whose
caches fit, and whose prefills are few enough,

1. those count that were measured at a multiple that covers the text: on a model of the same family
   and about the same size, else on the first that has any; where none was, all count;
2. the one with the highest score is best, by the smallest measured multiple that covers the text;
3. methods whose 95% interval holds the best's score count as equally good: the cheapest decode step
   of these wins, by time where all of them were timed, else by the bytes that it reads.

The reason says where the text is longer than what was measured, and where the model is of another
family or another size than the measured one.

A method that needs the question at prefill reads the text once for each question. It takes part up
to `MOST_PREFILLS` questions, and not where the context is to be saved. If no cache fits, the
smallest is chosen, and the engine says how many tokens would fit.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any

from jax_longctx.engine.capacity import fits
from jax_longctx.errors import ConfigError
from jax_longctx.memory import shown_bytes
from jax_longctx.methods import METHODS, make_method
from jax_longctx.models.config import ModelConfig
from jax_longctx.models.params import param_infos
from jax_longctx.settings import named_text

if TYPE_CHECKING:
    from jax_longctx.api import LongContext

TABLE = "choices.json"
# Prefills of one text that a user waits for before a method without them is better.
MOST_PREFILLS = 4
# Models whose parameters differ by up to this factor count as of one size.
ALIKE = 3
FAR = 1 << 40  # longer than any text


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """A measured model: its name, family, trained length in tokens, and number of parameters."""

    name: str
    family: str
    trained: int
    parameters: int

    def unlike(self, config: Any, parameters: int) -> str:
        """How a model differs in family and size; empty where it is alike."""
        if config.family == self.family and 1 / ALIKE <= parameters / self.parameters <= ALIKE:
            return ""
        return f"; not measured on {config.family} of {parameters / 1e9:.1f}B parameters"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """The score at one length.

    Attributes:
      ratio: length of the text in trained lengths.
      share: mean score, at most 100.
      n: prompts.
      interval: 95%.
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
    model: Model
    settings: Mapping[str, str]
    found: Sequence[Found]
    read: float
    step: float | None

    def covers(self, ratio: float) -> bool:
        """Whether a text was measured that is as long; within the trained length, one within it."""
        return self.found[-1].ratio >= ratio and (ratio > 1 or self.found[0].ratio <= 1)

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
    models = {each["name"]: Model(**each) for each in described["models"]}
    return tuple(
        Measured(
            **entry | {"model": models[entry["model"]]} | {"found": [*map(found, entry["found"])]}
        )
        for entry in described["methods"]
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A text, and the model and the memory that a method is chosen for.

    Attributes:
      tokens: of the text, the longest question and its answer.
      full: full attention.
      free: bytes of each device for caches; None where unknown.
      cache: bytes on each device of the text's caches under a method; ConfigError where the
        method refuses the model.
    """

    config: ModelConfig
    tokens: int
    full: Any
    free: int | None
    cache: Callable[[Any], int]

    @classmethod
    def of(cls, model: "LongContext", tokens: int, *, reserve: int) -> "Case":
        """The case of a model under full attention. `reserve` is of question and answer."""

        def cache(method: Any) -> int:
            return model.with_method(method).engine.new_cache_bytes(tokens, reserve)

        return cls(
            config=model.config,
            tokens=tokens,
            full=model.engine.method,
            free=model.engine.memory_expected(),
            cache=cache,
        )


def choose(
    case: Case,
    *,
    questions: int = 1,
    saving: bool = False,
    measured: Sequence[Measured] | None = None,
) -> Choice:
    """The method for one text.

    Args:
      questions: how many will be asked of it.
      saving: whether the context is to be saved.
      measured: the package's table by default.
    """
    tokens, trained, free = case.tokens, case.config.trained_length, case.free
    full, need = case.full, case.cache(case.full)
    within = tokens <= trained
    if within and fits(need, free):
        short = f"{tokens:,} tokens fit the trained length of {trained:,} and the memory"
        return Choice(full, f"full: {short}; it is exact")
    ratio, smallest = tokens / trained, (need, full, "full")
    known, rows = table() if measured is None else measured, []
    for row in known:
        made = make_method(row.name, dict(row.settings))
        if made.info.needs_question and (saving or questions > MOST_PREFILLS):
            continue
        try:
            size = case.cache(made)
        except ConfigError:
            # The method refuses the model.
            continue
        smallest = min(smallest, (size, made, _shown(row)), key=lambda each: each[0])
        if fits(size, free):
            rows.append((row, made))
    why = f"{tokens:,} tokens are more than the trained length of {trained:,}"
    if within:
        assert free is not None
        why = f"full attention's cache of {shown_bytes(need)} does not fit {shown_bytes(free)}"
        why += " (`jax-longctx plan` names what makes it fit)"
    if not rows:
        return Choice(smallest[1], f"{smallest[2]}: {why}, and no cache fits; this is the smallest")
    parameters = sum(math.prod(info.shape) for info in param_infos(case.config).values())
    unlike = {row.model: row.model.unlike(case.config, parameters) for row in known}
    row, made = _best(sorted(rows, key=lambda pair: unlike[pair[0].model] != ""), ratio)
    prefills = ""
    if made.info.needs_question and questions > 1:
        prefills = f"; it reads the text {questions} times"
    why += f"; {_score(row, ratio, known)}{_beyond(row, tokens, ratio)}"
    return Choice(made, f"{_shown(row)}: {why}{unlike[row.model]}{prefills}")


def beyond_trained(config: ModelConfig, method: Any, tokens: int) -> str | None:
    """The warning for that many tokens, answer included; None for no warning.

    At positions beyond its trained length a model's output is noise. `Method.reach` gives the
    largest position that a method uses.
    """
    if method.reach(config, tokens) <= config.trained_length:
        return None
    further = [name for name in METHODS if _goes_on(name, config)]
    return (
        f"{tokens:,} tokens are more than the {config.trained_length:,} that the model was trained "
        f"to, and under this method the answer may be noise; methods that go on: "
        f"{', '.join(further)}"
    )


def _goes_on(name: str, config: ModelConfig) -> bool:
    """Whether a method keeps a text of any length within the trained one."""
    try:
        method = METHODS[name]()
    except ConfigError:
        # Another package's module cannot be imported: `jax-longctx methods` says why.
        return False
    return method.info.keeps_all and method.reach(config, FAR) < FAR


def _score(row: Measured, ratio: float, known: Sequence[Measured]) -> str:
    """What it scored where the text lies, and full attention there."""
    best = row.at(ratio)
    full = [each.at(ratio) for each in known if (each.name, each.model) == ("full", row.model)]
    beside = [f", full attention {each.share:g}" for each in full if each.ratio == best.ratio]
    length = f"{best.ratio:g} times the trained length of {row.model.name}"
    more = beside[0] if beside and row.name != "full" else ""
    return f"it scores {best.share:g} of 100 over {best.n} prompts at {length}{more}"


def _beyond(row: Measured, tokens: int, ratio: float) -> str:
    """That a text is longer than what was measured, in trained lengths or in tokens."""
    last = row.found[-1].ratio
    longest = int(last * row.model.trained)
    if ratio <= last and tokens <= longest:
        return ""
    return f"; measured up to {last:g} times and {longest:,} tokens only"


def _best(rows: Sequence[tuple[Measured, Any]], ratio: float) -> tuple[Measured, Any]:
    """The cheapest one that is as good as the best; rows of the first model go before others'."""
    reached = [pair for pair in rows if pair[0].covers(ratio)]
    rows = [pair for pair in reached if pair[0].model == reached[0][0].model] or rows
    most = max(row.at(ratio).share for row, _ in rows)
    good = [pair for pair in rows if pair[0].at(ratio).interval[1] >= most]
    if all(row.step is not None for row, _ in good):
        return min(good, key=lambda pair: pair[0].step or 0.0)
    return min(good, key=lambda pair: pair[0].read)


def _shown(row: Measured) -> str:
    return named_text(row.name, row.settings)
