"""Configuration of an evaluation, from a TOML file or a suite of that name.

    title = "Two methods"

    [run]
    checkpoint = "smollm2"
    batch = 4

    [[part]]
    methods = ["full", "snapkv:budget=L/8"]
    tasks = ["passkey", "niah_single"]
    lengths = [4096, 8192]
    trials = 50

A part is every method on every task at every length. It inherits fields that it leaves out, except
`name`, from the part before it. Parts may overlap: a row is computed once.

Suites are the TOML files of `suites` beside this module. `paper:NAME` is the file `NAME.toml` of
`research/suites`, which a checkout of the repository has beside the packages.
"""

import dataclasses
import importlib
import itertools
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax_longctx.errors import ConfigError, InputError
from jax_longctx.evaluation.specs import Spec
from jax_longctx.evaluation.tasks import TASKS
from jax_longctx.methods import check_method
from jax_longctx.run_spec import RunSpec
from jax_longctx.settings import at_least, check_name, from_toml, look_up, read_toml

SUITES = Path(__file__).parent / "suites"
RESEARCH = Path(__file__).parents[2] / "research"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How rows are computed.

    Attributes:
      checkpoint: folder of the model, or "demo" for the demo's model; if empty, the command line
        must name it.
      seed: of the prompts.
      batch: rows that are computed together, fewer where memory is short.
      chat: whether prompts use the checkpoint's chat template.
      chunk, dtype, mesh, kv, weights, offload, working_set, reading: of the `RunSpec`. Contexts of
        exact attention are not offloaded. Answers do not depend on where contexts lie, so a run may
        go on with another place.
    """

    checkpoint: str = ""
    seed: int = 0
    batch: int = 4
    chunk: int = 512
    dtype: str | None = None
    mesh: str | None = None
    chat: bool = False
    kv: str | None = None
    weights: str | None = None
    offload: str | None = None
    working_set: int | None = None
    reading: str | None = None

    def __post_init__(self) -> None:
        at_least(1, self, "batch", "chunk", within="config: [run] ")
        at_least(0, self, "seed", within="config: [run] ")
        _ = self.spec

    @property
    def spec(self) -> RunSpec:
        """How the model runs; `compared` gives each method's own."""
        names = ("mesh", "dtype", "chunk", "kv", "weights", "offload", "working_set", "reading")
        return RunSpec(**{name: getattr(self, name) for name in names})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """Every method on every task at every length.

    Attributes:
      methods, tasks: in the form of `Spec.parse`.
      lengths: tokens of a prompt, room for the answer included.
      trials: prompts of each task and length, the same for every method.
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
      published: papers whose own results the report shows (`research.published`).
    """

    run: RunOptions
    part: tuple[Part, ...]
    title: str = "Evaluation"
    about: str = ""
    published: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in self.published:
            known = [table.paper for table in research().PUBLISHED]
            check_name(known, name, "paper in published")

    def cells(self) -> list[Cell]:
        """All cells by length, method and task, each once with the most trials of any part."""
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
    whole = itertools.accumulate(
        parts, lambda before, part: {**before, "name": "part", **part}, initial={}
    )
    return from_toml(EvalConfig, {**fields, "part": list(whole)[1:]})


@dataclasses.dataclass(frozen=True)
class PublishedTable:
    """One table of a paper.

    Attributes:
      paper: as suites name it.
      title: paper, table, model, length.
      note: how the paper made it.
      tasks: our names of its columns.
      rows: the paper's name of a method -> `method`, ours with its settings as `Spec.parse` reads
        it, and `values`, one for each task.
    """

    paper: str
    title: str
    note: str
    tasks: list[str]
    rows: dict[str, dict]


def research() -> Any:
    """The module `research.published`; the methods of `research` have names from then on.

    Raises:
      InputError: this is no checkout of the repository, or another package has its name.
    """
    if not (RESEARCH / "suites").is_dir():
        raise InputError(
            "the papers' suites, methods and figures are in research/ of the repository, which the "
            "installed package does not hold; run jax-longctx in a checkout, after pip install -e ."
        )
    if str(RESEARCH.parent) not in sys.path:
        sys.path.append(str(RESEARCH.parent))
    found = importlib.import_module("research")
    if Path(found.__file__ or "").resolve().parent != RESEARCH.resolve():
        raise InputError(
            f"another package is called research, {found.__file__}, and hides the repository's "
            f"{RESEARCH}; run in another folder, or without it on PYTHONPATH"
        )
    found.offer()
    return importlib.import_module("research.published")


def _files() -> dict[str, Path]:
    folders = (SUITES, RESEARCH / "suites")
    own, papers = ({path.stem: path for path in f.glob("*.toml")} for f in folders)
    return dict(sorted((own | {f"paper:{name}": path for name, path in papers.items()}).items()))


def suites() -> list[str]:
    """Names of all suites."""
    return list(_files())


def read_suite(name: str) -> EvalConfig:
    """The evaluation of that name.

    Raises:
      ConfigError: there is none.
      InputError: it is a paper's, and this is no checkout of the repository.
    """
    if name.startswith("paper:"):
        research()
    return read_config(look_up(_files(), name, "suite"))
