"""The training loop: steps, metrics and checkpoints of a new or a resumed run.

A run is a folder:

    run.json         the configuration, which a resumed run must share (but for mesh, paths and
                     intervals of checkpoints), and the versions
    metrics.jsonl    one line a step: loss, gradient norm, learning rate, tokens a second, MFU,
                     peak memory; the dev loss after an evaluation
    tensorboard/     the same as TensorBoard events, for `tensorboard --logdir`
    checkpoints/     the newest checkpoints, and the one with the lowest dev loss: weights,
                     moments and step count (`state`), and the position in the data and the best
                     step so far (`position`), all with checksums; `state/arrays.json` and the
                     position say of which run and step they are

A killed run resumes from its newest whole checkpoint and computes the same bits as without the
kill: the checkpoint holds all that a step depends on. Metrics of steps that run again are removed
first. SIGTERM saves a checkpoint and ends the run. A loss or gradient norm that is not finite ends
the run without a checkpoint, and its batch is saved.
"""

import contextlib
import dataclasses
import json
import math
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jax.experimental import multihost_utils

from jax_longctx.engine.distributed import from_leader, is_leader
from jax_longctx.errors import CheckpointError, ConfigError, DamagedError, InputError
from jax_longctx.files import (
    file_errors,
    partial_of,
    read_sealed,
    read_text,
    reason,
    seal,
    sha256_of,
    whole_path,
    write_text,
)
from jax_longctx.memory import peak_memory
from jax_longctx.models import storage
from jax_longctx.origin import check_same
from jax_longctx.settings import at_least
from train_cpt.attention import check_attention
from train_cpt.data import Windows, batches
from train_cpt.evaluate import dev_losses, parse_method
from train_cpt.metrics import RUN, metrics_log, step_rates
from train_cpt.step import (
    TrainSetup,
    TrainState,
    abstract_state,
    init_state,
    place_texts,
    step_program,
)

CHECKPOINTS, VERSIONS = "checkpoints", "versions"
FORMAT, POSITION, ARRAYS = 1, "position.json", "arrays.json"
# Facts of `run.json` that may differ in a resumed run: they change neither texts nor steps.
FREE = (VERSIONS, "run.checkpoint", "run.output", "run.mesh", "data.directory", "data.sources")
FREE += ("loop.save_every", "loop.keep")

# (steps done, steps in all, the newest line of metrics)
OnStep = Callable[[int, int, Mapping[str, Any]], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """Batch size, and the intervals of checkpoints and evaluations.

    Attributes:
      rows: texts of a micro-batch, over all devices.
      micro_batches: of a step; the global batch has rows x micro_batches texts.
      seed: of the order of the texts.
      save_every: steps between checkpoints. The last step is always saved, and so is each with the
        lowest dev loss so far.
      keep: newest checkpoints that are kept, beside the one with the lowest dev loss.
      evaluate_every: steps between evaluations; 0 for none.
      evaluate_texts: the most texts of the dev split that an evaluation reads.
      evaluate_methods: inference methods (`train_cpt.evaluate.parse_method`). An evaluation also
        decodes the last tokens of the texts under each of them.
      evaluate_last: last tokens of a text that an evaluation scores; 0 for the pattern's tail, or
        for all tokens where the pattern has none.
    """

    rows: int = 8
    micro_batches: int = 1
    seed: int = 0
    save_every: int = 100
    keep: int = 2
    evaluate_every: int = 0
    evaluate_texts: int = 64
    evaluate_methods: tuple[str, ...] = ()
    evaluate_last: int = 0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if field.name != "evaluate_methods":
                least = 0 if field.name in ("seed", "evaluate_every", "evaluate_last") else 1
                at_least(least, self, field.name, within="loop: ")
        for spec in self.evaluate_methods:
            parse_method(spec)


@dataclasses.dataclass(frozen=True)
class Best:
    """The step with the lowest dev loss so far, and that loss; step 0 before any evaluation."""

    step: int = 0
    dev_loss: float = float("inf")


class Checkpoints:
    """The checkpoints of one run; a context manager that waits for an unfinished save.

    Args:
      folder: of the checkpoints, made if missing, in the run's folder.
      keep: number of newest checkpoints that are kept.

    Attributes:
      best: the best step so far, whose checkpoint is kept too.
      newest: the step of the newest checkpoint, which may still be written; 0 where there is none.
    """

    def __init__(self, folder: Path, keep: int):
        self.folder, self.best, self._keep = whole_path(folder), Best(), keep
        run = self.folder.parent / RUN
        self._run = sha256_of(run)[:16] if run.exists() else None
        self.newest = from_leader(lambda: max(self._steps(), default=0))
        # Of the checkpoint that is being written.
        self._position: dict[str, Any] | None = None
        self._writes: list[Any] = []

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        # Where one of several processes failed, the others do not wait for it.
        if kind is None or jax.process_count() == 1:
            self.wait()

    def _steps(self) -> list[int]:
        """The steps of the whole checkpoints, in order."""
        found = self.folder.iterdir() if self.folder.exists() else ()
        return sorted(int(path.name) for path in found if path.name.isdecimal())

    def save(self, step: int, state: TrainState, data: Any) -> None:
        """Starts a save; the next step may overwrite the state once this returns."""
        self.wait()
        partial = partial_of(self.folder / str(step))
        from_leader(lambda: shutil.rmtree(partial, ignore_errors=True))
        with storage.writing(self.folder):
            self._writes = storage.begin_arrays(partial, _by_path(state))
        # JSON has no infinity.
        best = dataclasses.asdict(self.best) if self.best.step else {}
        self._position = {"run": self._run, "step": step, "data": data.get_state(), "best": best}
        self.newest = step

    def go_on(self) -> None:
        """Ends a save whose arrays are written."""
        unfinished = not all(write.commit.done() for write in self._writes)
        if self._position is not None and not _any_process(unfinished):
            self.wait()

    def wait(self) -> None:
        """Waits for an unfinished save."""
        position, self._position = self._position, None
        if position is not None:
            with storage.writing(self.folder):
                storage.finish_arrays(self._writes)
            from_leader(lambda: self._publish(position))

    def _publish(self, position: Mapping[str, Any]) -> None:
        """Describes what all processes have written, names it, and removes older checkpoints."""
        step, best = position["step"], position["best"].get("step")
        partial = partial_of(self.folder / str(step))
        with storage.writing(self.folder):
            files, arrays = storage.join_arrays(partial)
            stored = seal(FORMAT, {"run": self._run, "files": files, "arrays": arrays})
            write_text(partial / storage.STATE / ARRAYS, json.dumps(stored))
            (partial / "position").mkdir()
            sealed = json.dumps(seal(FORMAT, position))
            write_text(partial / "position" / POSITION, sealed)
            partial.rename(self.folder / str(step))
            for older in self._steps()[: -self._keep]:
                if older != best:
                    path = self.folder / str(older)
                    path.rename(partial_of(path))
            for path in self.folder.glob(".*.partial"):
                shutil.rmtree(path)

    def offer(self, step: int, dev_loss: float) -> bool:
        """Whether this step is the best so far; if so, its checkpoint will be kept."""
        if dev_loss < self.best.dev_loss:
            self.best = Best(step, dev_loss)
            return True
        return False

    def restore(self, step: int, setup: TrainSetup, data: Any = None) -> TrainState:
        """The state of a step. With `data`, also sets its position and the best step so far.

        Raises:
          DamagedError: the checkpoint is damaged, or files of it are of another one.
          CheckpointError: it cannot be read.
        """
        folder = self.folder / str(step)
        remedy = f"move {folder} away to go on from the checkpoint before"
        try:
            position = read_sealed(folder / "position" / POSITION, FORMAT, remedy)
            runs, steps = {self._run}, {step}
            # Earlier versions wrote neither digests of arrays nor whose they are.
            if "run" in position:
                stored = read_sealed(folder / storage.STATE / ARRAYS, FORMAT, remedy)
                storage.check_stored(folder, stored["files"], stored["arrays"], remedy)
                runs |= {position["run"], stored["run"]}
                steps.add(position["step"])
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{error.filename} is missing (earlier versions wrote none); {remedy}"
            ) from None
        target = abstract_state(setup)
        arrays = storage.load_arrays(folder, _by_path(target), remedy)
        state = jax.tree.unflatten(jax.tree.structure(target), arrays.values())
        steps.add(int(state.step))
        if len(runs) + len(steps) > 2:
            raise DamagedError(f"{folder} has files of another run or another step; {remedy}")
        if data is not None:
            self.best = Best(**position["best"]) if position["best"] else Best()
            data.set_state(position["data"])
        return state


def _by_path(state: TrainState) -> dict[str, Any]:
    """The state's arrays by dot-joined path, in the order of its leaves."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree.leaves_with_path(state)
    }


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The last step of a run, why it ended, its state, and the best step so far."""

    step: int
    ended: Literal["done", "terminated"]
    state: TrainState
    best: Best


def train(
    loop: LoopConfig,
    setup: TrainSetup,
    make_params: Callable[[], Any],
    windows: Windows,
    dev: Windows,
    directory: Path,
    *,
    facts: Mapping[str, Any],
    progress: OnStep | None = None,
) -> Outcome:
    """Starts or resumes the run in `directory`.

    Args:
      make_params: makes the initial weights; not called for a resumed run.
      facts: the configuration of the run, JSON-able. Those of an existing run may differ in
        `FREE` alone.

    Raises:
      ConfigError: texts, batch or mesh do not fit each other.
      InputError: the folder holds another run, or the loss is not finite.
      CheckpointError: the newest checkpoint cannot be read.
    """
    _check(loop, setup, windows, dev)
    directory = whole_path(directory)
    from_leader(lambda: _claim(directory, facts))
    data = batches(
        windows,
        micro_batches=loop.micro_batches,
        rows=loop.rows,
        seed=loop.seed,
    )
    with (
        Checkpoints(directory / CHECKPOINTS, loop.keep) as saved,
        _termination() as terminated,
        metrics_log(directory, saved.newest, write=is_leader()) as write,
    ):
        step = saved.newest
        state = saved.restore(step, setup, data) if step else init_state(setup, make_params())
        while step < setup.optimizer.steps and not _any_process(terminated.is_set()):
            numbers = next(data)
            tokens = place_texts(setup.mesh, windows, numbers)
            state, line = _advance(setup, state, tokens, step + 1)
            _check_finite(line, windows, numbers, directory, saved)
            step += 1
            is_best = False
            if _is_due(loop.evaluate_every, step, setup):
                line |= dev_losses(
                    setup,
                    state.params,
                    dev,
                    rows=loop.rows,
                    texts=loop.evaluate_texts,
                    last=loop.evaluate_last,
                    methods=loop.evaluate_methods,
                )
                is_best = saved.offer(step, line["dev_loss"])
            write(line)
            saved.go_on()
            if is_best or _is_due(loop.save_every, step, setup):
                saved.save(step, state, data)
            if progress is not None:
                progress(step, setup.optimizer.steps, line)
        if step and saved.newest != step:
            saved.save(step, state, data)
        saved.wait()
        best = saved.best
    done = step == setup.optimizer.steps
    return Outcome(step, "done" if done else "terminated", state, best)


def _advance(
    setup: TrainSetup, state: TrainState, tokens: jax.Array, number: int
) -> tuple[TrainState, dict[str, Any]]:
    """The state after step `number`, and its line of metrics."""
    run = step_program(setup, tokens.shape)
    begun = time.perf_counter()
    state, metrics = run(state, tokens)
    # This waits for the step.
    values = {name: float(value) for name, value in metrics.items()}
    seconds = time.perf_counter() - begun
    rates = step_rates(setup, tokens.shape, seconds)
    return state, {"step": number, **values, **rates, "peak_bytes": peak_memory()}


def _is_due(every: int, step: int, setup: TrainSetup) -> bool:
    """Whether something with this interval is due after this step; it is after the last one."""
    return every > 0 and (step % every == 0 or step == setup.optimizer.steps)


def _check(loop: LoopConfig, setup: TrainSetup, windows: Windows, dev: Windows) -> None:
    if not len(windows):
        raise InputError("the training split has no text; prepare more documents")
    check_attention(setup.config, setup.mesh, setup.pattern, len(windows[0]))
    shards = setup.mesh.shape["data"]
    if loop.rows % shards:
        raise ConfigError(f"loop: rows={loop.rows} do not divide over mesh axis data={shards}")
    if loop.evaluate_every and min(len(dev), loop.evaluate_texts) < loop.rows:
        raise ConfigError(
            f"loop: an evaluation reads rows={loop.rows} texts at a time, the dev split has "
            f"{len(dev)} of which evaluate_texts={loop.evaluate_texts} are read; lower rows or "
            f"set evaluate_every=0"
        )


def _claim(directory: Path, facts: Mapping[str, Any]) -> None:
    """Writes `run.json`, or checks that it holds the same facts; overwrites nothing."""
    path, ours = directory / RUN, json.loads(json.dumps(facts))
    try:
        found = json.loads(read_text(path))
    except FileNotFoundError:
        # A run killed at its start has left at most the unfinished file.
        if directory.exists() and any(entry != partial_of(path) for entry in directory.iterdir()):
            raise InputError(f"{directory} is not empty and no run; name another folder") from None
        with file_errors(f"{path} could not be written"):
            directory.mkdir(parents=True, exist_ok=True)
            write_text(path, json.dumps(ours, indent=1))
        return
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} cannot be read: {reason(error)}") from error
    if not isinstance(found, dict):
        raise InputError(f"{path} holds no facts of a run; name another folder")
    check_same(directory, found, ours, "name another folder to begin a run", free=FREE)


@contextlib.contextmanager
def _termination() -> Iterator[threading.Event]:
    """An event that SIGTERM sets; outside the main thread nothing sets it."""
    terminated = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield terminated
        return
    before = signal.signal(signal.SIGTERM, lambda *_: terminated.set())
    try:
        yield terminated
    finally:
        signal.signal(signal.SIGTERM, before)


def _check_finite(
    line: Mapping[str, Any],
    windows: Windows,
    numbers: np.ndarray,
    directory: Path,
    saved: Checkpoints,
) -> None:
    bad = [name for name in ("loss", "gradient_norm") if not math.isfinite(line[name])]
    if bad:
        step = line["step"]
        kept = directory / f"bad-batch-{step}.npy"
        if is_leader():
            with file_errors(f"{kept} could not be written"):
                np.save(kept, windows[numbers])
        saved.wait()
        newest = f"of step {saved.newest}" if saved.newest else "none"
        raise InputError(
            f"the {bad[0].replace('_', ' ')} of step {step} is {line[bad[0]]}; its batch is in "
            f"{kept}, the newest checkpoint is {newest}; lower the learning rate or look at the "
            f"batch"
        )


def _any_process(value: bool) -> bool:
    """Whether `value` is true in any process; all processes must call this."""
    if jax.process_count() == 1:
        return value
    return bool(np.any(multihost_utils.process_allgather(np.array(value))))
