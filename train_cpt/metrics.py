"""A run's metrics: one JSON line a step, the same as TensorBoard events, and a plot of the losses.

metrics.jsonl    one line a step; what `read_metrics` gives back
tensorboard/     the same numbers as events, for `tensorboard --logdir`
loss.png         the loss over steps, and the dev loss where there were evaluations
"""

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tensorboardX

from jax_longctx.errors import InputError

__all__ = [
    "METRICS",
    "Line",
    "metrics_log",
    "partial_of",
    "plot_losses",
    "read_metrics",
    "replace_file",
]

METRICS, EVENTS, PLOT = "metrics.jsonl", "tensorboard", "loss.png"

Line = Mapping[str, Any]


@contextlib.contextmanager
def metrics_log(
    directory: Path, step: int, *, write: bool = True
) -> Iterator[Callable[[Line], None]]:
    """Appends lines to a run's metrics; what was there after `step`, or cut short, is dropped.

    TensorBoard's files are only appended to: they are told to forget what comes after `step`.

    Args:
      write: False in the processes that leave it to the first one.
    """
    if not write:
        yield lambda line: None
        return
    path = directory / METRICS
    kept = [line for line in _whole_lines(path) if line["step"] <= step]
    replace_file(path, "".join(f"{json.dumps(line)}\n" for line in kept))
    events = tensorboardX.SummaryWriter(
        str(directory / EVENTS),
        purge_step=step + 1 if step else None,
        flush_secs=10,
        # Names go by the second; a run may be taken up within one.
        filename_suffix=f".{time.time_ns()}",
    )
    with contextlib.closing(events), path.open("a", encoding="utf-8") as file:

        def append(line: Line) -> None:
            file.write(json.dumps(line) + "\n")
            file.flush()
            for name, value in line.items():
                if name != "step":
                    events.add_scalar(name, value, line["step"])

        yield append


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics, in order.

    Raises:
      InputError: there are none.
    """
    lines = list(_whole_lines(directory / METRICS))
    if not lines:
        raise InputError(f"{directory} holds no metrics of a training run ({METRICS})")
    return lines


def _whole_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Every line but one that was cut short."""
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):
            yield json.loads(line)


def plot_losses(runs: Sequence[Path], path: Path) -> None:
    """Loss over steps of one or several runs, and their dev losses, as a PNG.

    Raises:
      InputError: a run has no metrics.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    metrics = [read_metrics(run) for run in runs]
    figure, axis = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for number, (run, lines) in enumerate(zip(runs, metrics, strict=True)):
        name = f"{run.name}: " if len(runs) > 1 else ""
        colour = f"C{number}"
        axis.plot(*_curve(lines, "loss"), color=colour, linewidth=1, label=f"{name}training")
        steps, losses = _curve(lines, "dev_loss")
        if steps:
            axis.plot(
                steps, losses, color=colour, marker="o", linestyle="--", label=f"{name}dev split"
            )
    axis.set_xlabel("step")
    axis.set_ylabel("loss (nats a token)")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(partial_of(path), dpi=150, format="png")
    pyplot.close(figure)
    os.replace(partial_of(path), path)


def _curve(lines: Sequence[Line], name: str) -> tuple[list[int], list[float]]:
    points = [(line["step"], line[name]) for line in lines if name in line]
    return [step for step, _ in points], [value for _, value in points]


def replace_file(path: Path, text: str) -> None:
    """Writes a file whole or not at all."""
    partial_of(path).write_text(text, encoding="utf-8")
    os.replace(partial_of(path), path)


def partial_of(path: Path) -> Path:
    """What a file is called until it is whole."""
    return path.with_name(f".{path.name}.partial")
