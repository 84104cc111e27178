"""The training loop: steps, metrics, checkpoints; begun anew or taken up where it stopped.

A run is a folder:

    run.json         what is run, and by which versions; another configuration is refused
    metrics.jsonl    one line a step: loss, gradient norm, learning rate, tokens a second
    checkpoints/     Orbax: weights, moments and step count, and the position in the data

A run that is killed resumes from its newest whole checkpoint and computes what it would have
computed, bit for bit: all that a step depends on is in the checkpoint. Lines of steps that are run
again are cut off first, so that each step has one. SIGTERM saves and ends the run in order. A loss
or gradient that is no number stops it before anything is saved, with the batch kept.
"""

import contextlib
import dataclasses
import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec

from jax_longctx.errors import CheckpointError, ConfigError, InputError
from jax_longctx.models.checkpoint import quiet_orbax
from train_cpt.attention import check_attention
from train_cpt.data import Windows, batches
from train_cpt.step import Setup, TrainState, abstract_state, init_state, text_losses, train_step

__all__ = ["VERSIONS", "LoopConfig", "Outcome", "train"]

RUN, METRICS, CHECKPOINTS = "run.json", "metrics.jsonl", "checkpoints"

# The facts that a run may be taken up with others of.
VERSIONS = "versions"

# (steps done, steps in all, the newest line of metrics)
Progress = Callable[[int, int, Mapping[str, Any]], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """What goes into a step, and what is done how often.

    Attributes:
      rows: texts of a micro-batch, over all devices.
      micro_batches: of a step; their product is the global batch.
      seed: of the order of the texts.
      save_every: steps between checkpoints; the last step is always saved.
      keep: checkpoints that stay, the newest.
      evaluate_every: steps between evaluations; 0 for none.
      evaluate_texts: texts of the dev split that an evaluation reads at most.
    """

    rows: int = 8
    micro_batches: int = 1
    seed: int = 0
    save_every: int = 100
    keep: int = 2
    evaluate_every: int = 0
    evaluate_texts: int = 64

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            least = 0 if field.name in ("seed", "evaluate_every") else 1
            if getattr(self, field.name) < least:
                raise ConfigError(
                    f"loop: {field.name} must be at least {least}, got {getattr(self, field.name)}"
                )


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run ended: after which step, why, and with which state."""

    step: int
    ended: Literal["done", "terminated"]
    state: TrainState


def train(
    loop: LoopConfig,
    setup: Setup,
    make_params: Callable[[], Any],
    windows: Windows,
    dev: Windows,
    directory: Path,
    *,
    facts: Mapping[str, Any],
    progress: Progress | None = None,
) -> Outcome:
    """Runs, or goes on with, the run in `directory`.

    Args:
      make_params: the weights to begin with; not called where the run is taken up.
      facts: what the run is, as JSON; a folder with other ones, `VERSIONS` aside, is left alone.

    Raises:
      ConfigError: texts, batch or mesh do not fit each other.
      InputError: the folder holds another run, or the loss is no number.
      CheckpointError: the newest checkpoint cannot be read.
    """
    _check(loop, setup, windows, dev)
    _claim(directory, facts)
    data = batches(
        windows,
        micro_batches=loop.micro_batches,
        rows=loop.rows,
        seed=loop.seed,
        process=0,
        processes=1,
    )
    options = ocp.CheckpointManagerOptions(max_to_keep=loop.keep, create=True)
    with (
        ocp.CheckpointManager((directory / CHECKPOINTS).absolute(), options=options) as manager,
        _termination() as terminated,
        _metrics(directory / METRICS, manager.latest_step() or 0) as write,
    ):
        step = manager.latest_step() or 0
        state = _restore(manager, step, setup, data) if step else init_state(setup, make_params())
        while step < setup.optimizer.steps and not terminated.is_set():
            tokens = next(data)
            state, line = _advance(setup, state, tokens, step + 1)
            _check_finite(line, tokens, directory, manager)
            step += 1
            if _is_due(loop.evaluate_every, step, setup):
                line["dev_loss"] = _evaluate(loop, setup, state, dev)
            write(line)
            if _is_due(loop.save_every, step, setup):
                _save(manager, step, state, data)
            if progress is not None:
                progress(step, setup.optimizer.steps, line)
        if step and manager.latest_step() != step:
            _save(manager, step, state, data)
        manager.wait_until_finished()
    done = step == setup.optimizer.steps
    return Outcome(step, "done" if done else "terminated", state)


def _advance(
    setup: Setup, state: TrainState, tokens: np.ndarray, number: int
) -> tuple[TrainState, dict[str, Any]]:
    """The state after step `number`, and its line of metrics."""
    begun = time.perf_counter()
    state, metrics = train_step(setup, state, _placed(setup, tokens))
    # Reading the numbers waits for the step.
    values = {name: float(value) for name, value in metrics.items()}
    rate = round(tokens.size / (time.perf_counter() - begun), 1)
    return state, {"step": number, **values, "tokens_per_second": rate}


def _is_due(every: int, step: int, setup: Setup) -> bool:
    """Whether something done every so many steps is due after this one, as it is after the last."""
    return every > 0 and (step % every == 0 or step == setup.optimizer.steps)


def _check(loop: LoopConfig, setup: Setup, windows: Windows, dev: Windows) -> None:
    if jax.process_count() != 1:
        raise ConfigError(f"training runs in one process, this is one of {jax.process_count()}")
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
    """Writes `run.json`, or makes sure that it says the same; nothing is overwritten."""
    path, ours = directory / RUN, json.loads(json.dumps(facts))
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        # A run that was killed as it began has left at most the unfinished file.
        if directory.exists() and any(entry != _partial(path) for entry in directory.iterdir()):
            raise InputError(f"{directory} is not empty and no run; name another folder") from None
        directory.mkdir(parents=True, exist_ok=True)
        _replace(path, json.dumps(ours, indent=1))
        return
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error!s:.200}") from error
    if found != ours:
        names = sorted(set(found) | set(ours)) if isinstance(found, dict) else []
        differ = [name for name in names if found.get(name) != ours.get(name)]
        if differ == [VERSIONS]:
            return
        other = next((name for name in differ if name != VERSIONS), RUN)
        raise InputError(
            f"{directory} holds another run (its {other!r} differs); name another folder to begin "
            f"one, or run that configuration again to go on"
        )


def _replace(path: Path, text: str) -> None:
    """Writes a file whole or not at all."""
    _partial(path).write_text(text, encoding="utf-8")
    os.replace(_partial(path), path)


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")


@contextlib.contextmanager
def _termination() -> Iterator[threading.Event]:
    """An event that SIGTERM sets; outside the main thread nothing sets it."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = signal.signal(signal.SIGTERM, lambda *_: asked.set())
    try:
        yield asked
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _metrics(path: Path, step: int) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Appends lines to a file whose lines after `step`, or cut short, are dropped first."""
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):
            if json.loads(line)["step"] <= step:
                kept.append(f"{line}\n")
    _replace(path, "".join(kept))
    with path.open("a", encoding="utf-8") as file:

        def write(line: Mapping[str, Any]) -> None:
            file.write(json.dumps(line) + "\n")
            file.flush()

        yield write


def _placed(setup: Setup, tokens: np.ndarray) -> jax.Array:
    """`[A, B, T]` with the texts divided over `data`."""
    return jax.device_put(tokens, NamedSharding(setup.mesh, PartitionSpec(None, "data")))


def _check_finite(
    line: Mapping[str, Any],
    tokens: np.ndarray,
    directory: Path,
    manager: ocp.CheckpointManager,
) -> None:
    bad = [name for name in ("loss", "gradient_norm") if not math.isfinite(line[name])]
    if bad:
        step = line["step"]
        kept = directory / f"bad-batch-{step}.npy"
        np.save(kept, tokens)
        manager.wait_until_finished()
        newest = manager.latest_step()
        raise InputError(
            f"the {bad[0].replace('_', ' ')} of step {step} is {line[bad[0]]}; its batch is in "
            f"{kept}, the newest checkpoint is "
            f"{'none' if newest is None else f'of step {newest}'}; lower the learning rate or look "
            f"at the batch"
        )


def _evaluate(loop: LoopConfig, setup: Setup, state: TrainState, dev: Windows) -> float:
    """Mean loss in nats of the dev texts' last tokens: the sparse ones, or all but the first."""
    last = setup.pattern.tail or len(dev[0]) - 1
    count = min(len(dev), loop.evaluate_texts) // loop.rows
    losses = []
    for number in range(count):
        rows = range(number * loop.rows, (number + 1) * loop.rows)
        tokens = _placed(setup, np.stack([dev[row] for row in rows])[None])[0]
        losses.append(float(text_losses(setup, state.params, tokens, last)))
    return float(np.mean(losses))


def _save(manager: ocp.CheckpointManager, step: int, state: TrainState, data: Any) -> None:
    """Begins to save; what the next step overwrites has been copied when this returns."""
    manager.save(
        step,
        args=ocp.args.Composite(
            state=ocp.args.StandardSave(_as_dict(state)), data=ocp.args.JsonSave(data.get_state())
        ),
        force=True,
    )


def _restore(manager: ocp.CheckpointManager, step: int, setup: Setup, data: Any) -> TrainState:
    target = _as_dict(abstract_state(setup))
    try:
        with quiet_orbax():
            found = manager.restore(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardRestore(target), data=ocp.args.JsonRestore()
                ),
            )
    except (OSError, ValueError, KeyError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        folder = Path(manager.directory) / str(step)
        raise CheckpointError(
            f"{folder} is damaged: {first:.200}; remove it to go on from the one before"
        ) from error
    data.set_state(found["data"])
    return TrainState(**found["state"])


def _as_dict(state: TrainState) -> dict[str, Any]:
    return {"params": state.params, "moments": state.moments, "step": state.step}
