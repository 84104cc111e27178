"""What is evaluated: models, methods, tasks, lengths and trials, from a TOML file or a suite.

    title = "Two methods"

    [run]
    checkpoint = "smollm2"
    batch = 4

    [[part]]
    methods = ["full", "snapkv:budget=L/8"]
    tasks = ["passkey", "niah_single"]
    lengths = [4096, 8192]
    trials = 50

A part is every method on every task at every length; what it leaves out is as in the part before.
Parts may overlap: a row is computed once.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jax_longctx.errors import ConfigError
from jax_longctx.evaluation.specs import Spec
from jax_longctx.evaluation.tasks import TASKS
from jax_longctx.methods import check_method
from jax_longctx.settings import check_name, from_toml, read_toml
from jax_longctx.studies.published import PUBLISHED


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How rows are computed.

    Attributes:
      checkpoint: folder of the model; empty where the command line must name it, "demo" for the
        demo's model.
      seed: of the prompts.
      batch: rows that are computed together, fewer where memory asks for it.
      chunk: tokens that a prefill pass takes.
      dtype: of weights and caches, the checkpoint's unless given.
      mesh: devices, `data=2,tensor=2`; one unless given.
      chat: the checkpoint's chat template around each prompt, or plain completion.
      by_layer: whether programs are of one layer each, which are compiled in a small part of the
        time and run slower: for prompts so few and short that compiling would be the run.
    """

    checkpoint: str = ""
    seed: int = 0
    batch: int = 4
    chunk: int = 512
    dtype: str | None = None
    mesh: str | None = None
    chat: bool = False
    by_layer: bool = False

    def __post_init__(self) -> None:
        for name, least in (("batch", 1), ("chunk", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise ConfigError(
                    f"config: [run] {name} must be at least {least}, got {getattr(self, name)}"
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """Every method on every task at every length.

    Attributes:
      methods, tasks: as `Spec.parse` reads them.
      lengths: tokens of a prompt, room for the answer included.
      trials: prompts of each task and length, the same ones for every method.
    """

    name: str
    methods: tuple[str, ...]
    tasks: tuple[str, ...]
    lengths: tuple[int, ...]
    trials: int

    def __post_init__(self) -> None:
        for name in ("methods", "tasks", "lengths"):
            if not getattr(self, name):
                raise ConfigError(f"config: part {self.name!r} has no {name}; give at least one")
        for name in self.methods:
            check_method(Spec.parse(name).name)
        for name in self.tasks:
            check_name(TASKS, Spec.parse(name).name, "task")
        if min(self.lengths) < 1 or self.trials < 1:
            raise ConfigError(
                f"config: part {self.name!r} needs lengths and trials of at least 1, got "
                f"{list(self.lengths)} and {self.trials}"
            )


@dataclasses.dataclass(frozen=True)
class Cell:
    """One method on one task at one length."""

    method: Spec
    task: Spec
    length: int
    trials: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """A whole evaluation.

    Attributes:
      title, about: of the report.
      published: papers whose own numbers the report sets beside these (`studies.published`).
    """

    run: RunOptions
    part: tuple[Part, ...]
    title: str = "Evaluation"
    about: str = ""
    published: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in self.published:
            check_name([table.paper for table in PUBLISHED], name, "paper in published")

    def cells(self) -> list[Cell]:
        """Each once, with the most trials that a part asks for; by length, method and task."""
        trials: dict[tuple[int, Spec, Spec], int] = {}
        for part in self.part:
            methods, tasks = map(Spec.parse, part.methods), map(Spec.parse, part.tasks)
            for key in itertools.product(part.lengths, methods, tasks):
                trials[key] = max(part.trials, trials.get(key, 0))
        lengths, methods = (list(dict.fromkeys(key[i] for key in trials)) for i in (0, 1))
        ordered = sorted(trials, key=lambda key: (lengths.index(key[0]), methods.index(key[1])))
        return [
            Cell(method, task, length, trials[length, method, task])
            for length, method, task in ordered
        ]


def read_config(path: Path) -> EvalConfig:
    """Reads a TOML file.

    Raises:
      InputError: it cannot be read or is no TOML.
      ConfigError: a section or key is missing, unknown, of the wrong type or out of range.
    """
    return parse_config(read_toml(path))


def parse_config(fields: Mapping[str, Any]) -> EvalConfig:
    """The configuration of a parsed file; raises ConfigError as `read_config` does."""
    parts = fields.get("part", [])
    tables = isinstance(parts, list) and all(isinstance(part, Mapping) for part in parts)
    if not tables or not parts:
        raise ConfigError("config: expected at least one [[part]] of methods, tasks and lengths")
    return from_toml(EvalConfig, {**fields, "part": list(_completed(parts))})


def _completed(parts: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Each with what it leaves out as in the one before, but for the name."""
    whole: dict[str, Any] = {}
    for part in parts:
        whole = {**whole, "name": "part", **part}
        yield whole
