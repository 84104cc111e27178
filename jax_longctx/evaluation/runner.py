"""Evaluation runs: a model's answers to tasks under several methods and lengths, written as rows.

One process, the leader, draws the prompts, scores the answers and writes the rows. It sends each
batch to the other processes, which run the same programs over the same mesh. All tasks of a length
share one cache size, so a method's programs are compiled once for the length. Rows of a batch are
on the disk before the next batch begins.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import itertools
import logging
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jax_longctx.api import LongContext
from jax_longctx.engine import Engine
from jax_longctx.engine.ahead import Compilation
from jax_longctx.engine.capacity import available_bytes, reserved
from jax_longctx.engine.distributed import is_leader
from jax_longctx.errors import ConfigError
from jax_longctx.evaluation.compute import (
    Batch,
    Sized,
    answer_batch,
    compile_batch,
    engine_of,
    in_rounds,
    rows_that_fit,
)
from jax_longctx.evaluation.config import Cell, EvalConfig
from jax_longctx.evaluation.prompts import Drawn, Prompt, draw, shortened
from jax_longctx.evaluation.rows import Key, RowStore, key_of, open_rows
from jax_longctx.evaluation.specs import Spec
from jax_longctx.evaluation.tasks import Task, describe, make_task
from jax_longctx.files import file_errors, sha256_of
from jax_longctx.jobs.loop import work_share, work_through
from jax_longctx.methods import make_method, settings_of
from jax_longctx.replicas import SHARES, Replicas, Share
from jax_longctx.text import PromptLayout, chat_layout

# Methods whose programs compile at a time.
TOGETHER = 10
# Settings of a task that may name a file.
SOURCES = ("haystack", "file")

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class EvalProgress:
    """Progress of a run.

    Attributes:
      total: rows of the run.
      before: rows that earlier runs finished.
      done: rows that this run finished.
      doing: the current method, task or length.
    """

    total: int
    before: int
    done: int = 0
    doing: str = ""


def check_config(config: EvalConfig) -> None:
    """Checks every method and task; computes nothing.

    Raises:
      ConfigError, InputError: a method or task is wrong, two tasks have one name, or a package that
        scores need is missing.
    """
    named: dict[str, Spec] = {}
    for cell in config.cells():
        make_method(cell.method.name, cell.method.at(cell.length))
        task = make_task(cell.task.name, cell.task.at(cell.length))
        if task.needs and importlib.util.find_spec(task.needs) is None:
            raise ConfigError(
                f"{task.name} needs {task.needs}; run: pip install 'jax-longctx[eval]'"
            )
        shown = _shown(task, cell.task)
        if named.setdefault(shown, cell.task) != cell.task:
            raise ConfigError(
                f"{named[shown].label} and {cell.task.label} are both called {shown} in rows and "
                f"tables; give one of them, or name their files differently"
            )


def check_files(config: EvalConfig) -> None:
    """Reads every file that a task names. Raises InputError where one cannot be used."""
    for task, length in dict.fromkeys((cell.task, cell.length) for cell in config.cells()):
        make_task(task.name, task.at(length)).check()


def _shown(task: Task, spec: Spec) -> str:
    """Name of a task in rows and tables: its label and the given settings."""
    settings = [f"{key}={value}" for key, value in spec.settings if key != "haystack"]
    return " ".join([task.label, *settings])


def run_eval(
    model: LongContext | Replicas,
    config: EvalConfig,
    output: Path,
    *,
    facts: Callable[[LongContext], Mapping[str, Any]],
    overwrite: bool = False,
    progress: Callable[[EvalProgress], None] | None = None,
) -> list[dict[str, Any]] | None:
    """Computes the rows that `output` does not hold yet, and returns all its rows.

    Every process of a job calls it; the leader reads and writes, the others return None.

    Args:
      model: it, or replicas that open it: these draw and answer, and this process writes.
      facts: of a model, fields of every row: checkpoint, device, mesh, versions.
      overwrite: begin anew where `output` has rows of another origin.

    Raises:
      ConfigError, InputError: a method or task is wrong.
      OriginError: `output` has rows of another origin, or damaged ones.
    """
    check_config(config)
    if isinstance(model, Replicas):
        with model.started():
            about = model.ask(functools.partial(_about, facts))
            leader = _Leader(model, config, about, output, progress, overwrite)
            for _ in leader.work():
                raise AssertionError
        return leader.store.rows
    # It needs all processes; the leader alone uses it.
    leader = _Leader(model, config, _about(facts, model), output, progress, overwrite)
    work_through(leader.work(), _computing(model, config))
    return leader.store.rows if is_leader() else None


def _about(facts: Callable[[LongContext], Any], model: LongContext) -> dict[str, Any]:
    """What the leader must know of a model."""
    setup = model.engine.setup
    forms = {"kv": setup.kv, "weights": setup.weights, "chunk": model.engine.chunk}
    forms["reading"] = setup.reading and dataclasses.asdict(setup.reading)
    memory = available_bytes(model.engine.mesh)
    return {"forms": forms, "by": model.made_by, "memory": memory, "facts": dict(facts(model))}


def _computing(
    model: LongContext, config: EvalConfig
) -> Callable[[dict[str, Any]], list[dict[str, Any]]]:
    """What answers a batch, JSON values."""
    compiled: set[Any] = set()
    used: set[Any] = set()
    engine, given = model.engine, None

    def compute(message: dict[str, Any]) -> list[dict[str, Any]]:
        nonlocal engine, given
        batch = Batch(**message)
        if given != (batch.method, batch.settings):
            given = batch.method, batch.settings
            engine = engine_of(model, make_method(*given), config.run.spec)
        if model.compiles_ahead and batch.shape not in compiled:
            # Not beside a batch: its times would be others, and memory might not do for both.
            compiled.update(_compiled_ahead(model, config, batch))
        new = model.compiles_ahead and batch.programs not in used
        used.add(batch.programs)
        found = answer_batch(model, engine, batch)
        # The first use of a program is slower than the next.
        return [row | ({"compiled": True} if new and "compiled" in row else {}) for row in found]

    return compute


# Batches, JSON values; their rows come back, or None where another replica answers.
Batches = Generator[dict[str, Any], list[dict[str, Any]] | None]


def _compiled_ahead(model: LongContext, config: EvalConfig, batch: Batch) -> set[Any]:
    """Compiles for a batch and the next methods' batches; returns the shapes.

    Python lowers one method's programs while XLA compiles another's.
    """
    begun, compilation = {batch.shape}, Compilation(model.engine.mesh)
    try:
        for each in (batch, *batch.following()):
            try:
                made = make_method(each.method, each.settings)
                engine = engine_of(model, made, config.run.spec)
                if compile_batch(model, engine, each, into=compilation) is not None:
                    begun.add(each.shape)
            except Exception as error:
                if each is batch:
                    raise
                # It is raised again where that method's turn comes.
                _logger.info("%s is not compiled ahead: %s", each.method, error)
        compilation.close()
        compilation.wait()
    except BaseException:
        compilation.cancel()
        raise
    return begun


@dataclasses.dataclass(eq=False)
class _Leader:
    """Draws prompts, plans batches, scores answers and writes rows.

    Attributes:
      model: it, or the replicas that draw, plan and score in place of this process.
      about: the model (`_about`).
    """

    model: LongContext | Replicas
    config: EvalConfig
    about: Mapping[str, Any]
    output: Path
    report: Callable[[EvalProgress], None] | None = None
    overwrite: bool = False

    def __post_init__(self) -> None:
        self.cells = self.config.cells()
        self.tasks = {
            (cell.task, cell.length): make_task(cell.task.name, cell.task.at(cell.length))
            for cell in self.cells
        }
        self.files = {key: _files_of(task) for key, task in self.tasks.items()}
        self.soon: list[Sized] = []
        self.progress = EvalProgress(0, 0)
        # A run can only be continued with the same values. The fingerprint is of the weights: a
        # checkpoint that is converted again is stored in other files.
        run, forms, by = self.config.run, dict(self.about["forms"]), self.about["by"]
        chunk = forms.pop("chunk")
        self.own = {"checkpoint": by["weights"], "seed": run.seed, "dtype": by["dtype"]}
        self.own |= {"chat": run.chat} | {k: form for k, form in forms.items() if form is not None}
        self.given = self.own | {"chunk": chunk}

    @property
    def here(self) -> LongContext:
        """The model of this process."""
        assert isinstance(self.model, LongContext)
        return self.model

    def work(self) -> Batches:
        """The batches whose rows the folder does not hold; writes their rows."""
        # Each row has its own method.
        by = self.about["by"]
        origin = self.own | {key: by[key] for key in ("model", "all_weights", "tokenizer")}
        files = {_shown(self.tasks[key], key[0]): found for key, found in self.files.items()}
        wanted = [self._key(cell, i) for cell in self.cells for i in range(cell.trials)]
        with open_rows(self.output, origin, files, overwrite=self.overwrite) as self.store:
            self.progress = EvalProgress(len(wanted), sum(key in self.store for key in wanted))
            if isinstance(self.model, Replicas):
                self._spread(self.model, wanted)
                return
            for length, cells in itertools.groupby(self.cells, lambda cell: cell.length):
                yield from self._length(length, tuple(cells))

    def _spread(self, replicas: Replicas, wanted: list[Key]) -> None:
        """Adds the rows that replicas compute, at the end in the order of a single process."""
        missing = {key[2] for key in wanted if key not in self.store}
        lengths = [each for each in dict.fromkeys(key[2] for key in wanted) if each in missing]
        of, places = SHARES * replicas.count, dict[Key, Any]()
        make = functools.partial(_sharing, self.config, self.about, self.store.snapshot())

        def left() -> Iterator[str]:
            for method, task, length, index in wanted:
                if (method, task, length, index) not in self.store:
                    yield f"row {index} of {task}, {length:,} tokens, {method}"

        shared = replicas.spread(make, lengths, of=of, most=4 * of, left=left)
        for length, before, rows in shared:
            # What was refused before a batch comes with every share.
            new = [row for row in rows if key_of(row) not in self.store]
            places |= {key_of(row): (lengths.index(length), before, n) for n, row in enumerate(new)}
            self._add(new)
        self.store.reorder(places)

    def _length(self, length: int, cells: tuple[Cell, ...]) -> Batches:
        """The batches of one length, method after method."""
        keys = (self._key(cell, i) for cell in cells for i in range(cell.trials))
        if all(key in self.store for key in keys):
            return
        drawn = self._drawn(length, cells)
        for cell in cells:
            for prompt in drawn[cell.task].prompts[: cell.trials]:
                self.store.check_prompt(self._key(cell, prompt.sample.index), prompt.sha256)
        for cell in cells:
            # A refused row for each prompt that could not be drawn.
            if reason := drawn[cell.task].refused:
                missing = range(len(drawn[cell.task].prompts), cell.trials)
                new = [i for i in missing if self._key(cell, i) not in self.store]
                self._add([self._base(cell, i) | {"refused": reason} for i in new])
        room = _room(drawn)
        trials = {
            method: [
                _Trial(drawn[cell.task].task, prompt, self._base(cell, prompt.sample.index))
                for cell in own
                for prompt in drawn[cell.task].prompts[: cell.trials]
            ]
            for method, own in itertools.groupby(cells, lambda cell: cell.method)
        }
        for method, own in trials.items():
            self._tell(doing=f"{method.label}, {length:,} tokens")
            self.soon = self._sizes(method, length, trials, room)
            yield from self._method(method, length, own, room)

    def _sizes(
        self, method: Spec, length: int, trials: dict[Spec, list["_Trial"]], room: tuple[int, int]
    ) -> list[Sized]:
        """Methods after `method` that have rows to answer, as many as compile together with it."""
        found: list[Sized] = []
        after = itertools.islice(trials.items(), list(trials).index(method) + 1, None)
        for spec, own in after if self.here.compiles_ahead else ():
            if len(found) == TOGETHER - 1:
                break
            if left := self._left(own):
                with contextlib.suppress(ConfigError):
                    engine = self._engine(spec, length)
                    rows = self._rows(engine, own, room)
                    asked = _asked(_cut(left, rows, engine))
                    found.append((spec.name, spec.at(length), rows, asked))
        return found

    def _left(self, trials: list["_Trial"]) -> list["_Trial"]:
        """Jobs whose rows are missing and whose prompts can be asked."""
        missing = [trial for trial in trials if key_of(trial.base) not in self.store]
        return [trial for trial in missing if not trial.prompt.refused]

    def _rows(self, engine: Engine, trials: list["_Trial"], room: tuple[int, int]) -> int:
        """Rows of a batch; from all trials, so that a run that goes on has a whole one's shapes."""
        texts = _alike(trials, engine)
        most = min(self.config.run.batch, max(map(len, texts)))
        more = any(len(text) > 1 for text in itertools.chain.from_iterable(texts))
        return rows_that_fit(engine, most, *room, self.about["memory"], more)

    def _engine(self, method: Spec, length: int) -> Engine:
        made = make_method(method.name, method.at(length))
        return engine_of(self.here, made, self.config.run.spec)

    def _method(
        self, method: Spec, length: int, trials: list["_Trial"], room: tuple[int, int]
    ) -> Batches:
        """The batches of one method whose rows are missing."""
        missing = [trial for trial in trials if key_of(trial.base) not in self.store]
        reasons = [(trial, trial.prompt.refused) for trial in missing if trial.prompt.refused]
        self._add([_scored(trial, {"refused": reason}) for trial, reason in reasons])
        left = self._left(trials)
        if not left:
            return
        try:
            engine = self._engine(method, length)
        except ConfigError as error:
            self._add([_scored(trial, {"refused": str(error)}) for trial in left])
            return
        slots, reserve = room
        rows = self._rows(engine, trials, room)
        batches = _cut(left, rows, engine)
        asked = _asked(batches)
        for group in batches:
            task = group[0][0].task
            batch = Batch(
                method=method.name,
                settings=method.at(length),
                contexts=[list(trials[0].prompt.context) for trials in group],
                questions=[[list(trial.prompt.question) for trial in trials] for trials in group],
                rows=rows,
                slots=slots,
                reserve=reserve,
                max_new=task.max_new,
                stop=list(task.stop),
                asked=asked,
                soon=self.soon,
            )
            if (found := (yield dataclasses.asdict(batch))) is None:
                continue
            each = itertools.chain.from_iterable(group)
            self._add([_scored(trial, row) for trial, row in zip(each, found, strict=True)])

    def _drawn(self, length: int, cells: tuple[Cell, ...]) -> dict[Spec, Drawn]:
        drawn, tokenizer = {}, self.here.tokenizer
        layout = chat_layout(tokenizer) if self.config.run.chat else PromptLayout("", "", "")
        for spec, count in _trials(cells).items():
            self._tell(doing=f"drawing {spec.label}, {length:,} tokens")
            drawn[spec] = draw(
                self.tasks[spec, length],
                tokenizer,
                layout,
                tokens=length,
                trials=count,
                seed=self.config.run.seed,
            )
        for cell in cells:
            # A file may have fewer prompts than requested.
            if drawn[cell.task].refused is None:
                short = max(cell.trials - len(drawn[cell.task].prompts), 0)
                self.progress = dataclasses.replace(
                    self.progress, total=self.progress.total - short
                )
        return drawn

    def _add(self, rows: list[dict[str, Any]]) -> None:
        if rows:
            self.store.add(rows)
        self._tell(done=self.progress.done + len(rows))

    def _tell(self, **changed: Any) -> None:
        self.progress = dataclasses.replace(self.progress, **changed)
        if self.report is not None:
            self.report(self.progress)

    def _key(self, cell: Cell, index: int) -> Key:
        shown = _shown(self.tasks[cell.task, cell.length], cell.task)
        return cell.method.label, shown, cell.length, index

    def _base(self, cell: Cell, index: int) -> dict[str, Any]:
        """The fields of a row that do not depend on the answer."""
        task = self.tasks[cell.task, cell.length]
        label, shown, length, _ = self._key(cell, index)
        names: Any = describe(cell.task.name)["settings"]
        shown_task = {"name": task.name, "settings": {name: getattr(task, name) for name in names}}
        return {
            "label": label,
            "task_label": shown,
            "length": length,
            "index": index,
            "method": settings_of(make_method(cell.method.name, cell.method.at(length))),
            "task": shown_task | {"files": self.files[cell.task, cell.length]},
            "metric": task.metric,
            **self.given,
            **self.about["facts"],
        }


def _sharing(
    config: EvalConfig, about: Mapping[str, Any], known: RowStore, model: LongContext
) -> Callable[[Share], Iterator[Any]]:
    """What computes a share of a length: every `of`-th batch from `number` on.

    It gives the length, the number of batches before, and rows.
    """
    compute, leader = _computing(model, config), _Leader(model, config, about, Path())
    leader._drawn = functools.lru_cache(1)(leader._drawn)

    def share(item: Share) -> Iterator[Any]:
        length, number, of = item
        # Batches are of the rows that were left at the start, in every share.
        leader.store = known.snapshot()
        added: Any = leader.store.journal
        cells = tuple(cell for cell in leader.cells if cell.length == length)
        work = leader._length(length, cells)
        for count, rows in work_share(work, compute, added, number, of):
            yield length, count, rows

    return share


@dataclasses.dataclass(frozen=True)
class _Trial:
    """One row to be computed; `base` holds its fields that are known."""

    task: Task
    prompt: Prompt
    base: dict[str, Any]


def _files_of(task: Task) -> dict[str, str]:
    """A digest of each file that a task's settings name."""
    paths = {key: getattr(task, key, "") for key in SOURCES}
    with file_errors(f"{task.label} cannot be drawn"):
        found = {key: path for key, path in paths.items() if os.path.isfile(path)}
        return {key: sha256_of(Path(path))[:16] for key, path in found.items()}


def _trials(cells: Sequence[Cell]) -> dict[Spec, int]:
    """The most prompts that cells of one length ask of each task."""
    trials: dict[Spec, int] = {}
    for cell in cells:
        trials[cell.task] = max(cell.trials, trials.get(cell.task, 0))
    return trials


def _room(drawn: Mapping[Spec, Drawn]) -> tuple[int, int]:
    """Slots and reserve of a length's caches."""
    longest, reserve = map(max, zip(*(each.sizes() for each in drawn.values()), strict=True))
    reserve = reserved(reserve)
    return longest + reserve + 1, reserve


# Trials over one text, whose questions are asked one after another.
type _Text = list[_Trial]


def _alike(trials: Sequence[_Trial], engine: Engine) -> list[list[_Text]]:
    """Texts that may share a batch: same length of answers, same stops; the longest first.

    A method that needs the question during prefill reads a text again for each.
    """
    again = engine.method.info.needs_question
    groups: dict[tuple[int, tuple[str, ...]], dict[tuple[str, int], _Text]] = {}
    for number, trial in enumerate(trials):
        texts = groups.setdefault((trial.task.max_new, tuple(trial.task.stop)), {})
        key = trial.prompt.sample.context, number if again else 0
        texts.setdefault(key, []).append(trial)
    return [
        sorted(texts.values(), key=lambda text: -len(text[0].prompt.context))
        for texts in groups.values()
    ] or [[]]


def _cut(left: Sequence[_Trial], rows: int, engine: Engine) -> list[list[_Text]]:
    """The batches of the trials that are left."""
    return [
        group[start : start + rows]
        for group in _alike(left, engine)
        for start in range(0, len(group), rows)
    ]


def _asked(batches: Sequence[Sequence[_Text]]) -> list[list[int]]:
    """Tokens of questions and answers that cover all programs of these batches.

    A question has one of few sizes, each several times the last. So of the lengths between
    two powers of two the least and the most will do.
    """
    kinds: dict[tuple[int, int], list[int]] = {}
    for batch in batches:
        answer = batch[0][0].task.max_new
        for asked in in_rounds(batch):
            longest = max(len(trial.prompt.question) for trial in asked)
            kinds.setdefault((longest.bit_length(), answer), []).append(longest)
    return [
        [length, answer]
        for (_, answer), lengths in kinds.items()
        for length in sorted({min(lengths), max(lengths)})
    ]


def _scored(trial: _Trial, row: dict[str, Any]) -> dict[str, Any]:
    """The finished row."""
    sample = trial.prompt.sample
    about = {
        "prompt_sha256": trial.prompt.sha256,
        "meta": sample.meta,
        "prompt": {"context": shortened(sample.context), "question": sample.query.strip()},
        "outputs": list(sample.outputs),
    }
    if "refused" in row:
        return trial.base | about | row
    answer = row["answer"]
    measures = {"score": trial.task.score(answer, sample), **trial.task.parts(answer, sample)}
    return trial.base | about | row | {"measures": measures}
