"""A run's metrics: JSON lines, TensorBoard events, a plot, and how fast a step is (MFU).

MFU = model FLOPs of the step / (its seconds x devices x peak of one device), as in Chowdhery et al.
2022, "PaLM", appendix B. For a text of T tokens a step has

    6 P T                      matmul weights, forward and backward; P includes the output table
                               and excludes the embedding, which is only looked up
    + 3 x 4 N H L x pairs      scores and outputs of attention, N heads of width H in L layers

A pair is a query and a key that it attends: T (T + 1) / 2 pairs where all attention is causal,
fewer with a sparse tail. Rematerialised work is not counted: MFU measures the model's FLOPs, not
the hardware's.
"""

import contextlib
import functools
import json
import math
import socket
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from tensorboardX.proto import event_pb2
from tensorboardX.record_writer import masked_crc32c
from tensorboardX.summary import scalar

from jax_longctx.errors import InputError
from jax_longctx.files import file_errors, save_figure, write_all, write_text
from jax_longctx.jobs import lines
from jax_longctx.models.config import ModelConfig
from jax_longctx.planning.work import matmul_weights
from train_cpt.attention import Pattern
from train_cpt.step import TrainSetup

# Dense bfloat16 FLOP/s of one device, as JAX counts devices, from the makers' data sheets.
DATA_SHEETS = {
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA H100 80GB HBM3": 989.4e12,
    "NVIDIA H200": 989.4e12,
    "TPU v4": 275e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
}

RUN, METRICS, EVENTS, PLOT = "run.json", "metrics.jsonl", "tensorboard", "loss.png"

Line = Mapping[str, Any]
# Its classes are made when it is imported.
_proto: Any = event_pb2


@contextlib.contextmanager
def metrics_log(
    directory: Path, step: int, *, write: bool = True
) -> Iterator[Callable[[Line], None]]:
    """Appends lines to a run's metrics, after it drops an incomplete one and those after `step`.

    Each line has a CRC-32 (`jax_longctx.jobs.lines`) that begins with `run.json`.

    TensorBoard's files are append-only: an entry tells TensorBoard to ignore later steps.

    Args:
      write: False in all processes but the leader.
    """
    if not write:
        yield lambda line: None
        return
    path, shown = directory / METRICS, directory / EVENTS
    # Names have a resolution of a second; a run may resume within one.
    own = shown / f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{time.time_ns()}"
    with contextlib.ExitStack() as held:
        with _writing(path):
            first = _first_of(directory)
            kept = [line for line in _whole_lines(directory) if line["step"] <= step]
            write_text(
                path, "".join(f"{json.dumps(lines.checked(line, first))}\n" for line in kept)
            )
            file = held.enter_context(path.open("ab", 0))
        with _writing(own):
            shown.mkdir(parents=True, exist_ok=True)
            events = held.enter_context(own.open("wb", 0))
            write_all(events, _record(file_version="brain.Event:2"))
            if step:
                forget = {"status": _proto.SessionLog.START}
                write_all(events, _record(step=step + 1, session_log=forget))

        def append(line: Line) -> None:
            values = [scalar(name, value) for name, value in line.items() if name != "step"]
            with _writing(path):
                lines.append(file, [lines.checked(line, first)])
            with _writing(own):
                for summary in values:
                    write_all(events, _record(step=line["step"], summary=summary))

        yield append


def _writing(path: Path) -> contextlib.AbstractContextManager[None]:
    return file_errors(f"{path} could not be written", "run again to go on")


def _record(**fields: Any) -> bytes:
    """An event as TensorBoard reads it: its length, the event, and a checksum of each."""
    event = _proto.Event(wall_time=time.time(), **fields).SerializeToString()
    length = struct.pack("<Q", len(event))
    parts = (length, event)
    return b"".join(part + struct.pack("<I", masked_crc32c(part)) for part in parts)


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics, in order; raises InputError where there are none."""
    found = _whole_lines(directory)
    if not found:
        raise InputError(f"{directory} holds no metrics of a training run ({METRICS})")
    return found


def _first_of(directory: Path) -> int:
    """What the checksums of a run's lines begin with, so that other runs' checksums differ."""
    path = directory / RUN
    return zlib.crc32(path.read_bytes()) if path.exists() else 0


def _whole_lines(directory: Path) -> list[dict[str, Any]]:
    """All complete lines. Raises InputError where one is damaged or of another run."""
    path = directory / METRICS
    try:
        found = lines.read(path) if path.exists() else []
        # Earlier versions wrote no checksums.
        if any(lines.CHECKSUM in line for line in found):
            found = lines.verified(found, _first_of(directory))
        if not all(type(line.get("step")) is int for line in found):
            raise ValueError("a line has no step")
    except ValueError as error:
        raise InputError(
            f"{path} is damaged: {error}; remove that line to go on without it"
        ) from error
    return found


def plot_losses(run: Path, path: Path) -> None:
    """A run's loss over its steps, and its dev losses, as a PNG; InputError without metrics."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    found = read_metrics(run)
    figure, axis = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axis.plot(*_curve(found, "loss"), color="C0", linewidth=1, label="training")
    steps, losses = _curve(found, "dev_loss")
    if steps:
        axis.plot(steps, losses, color="C0", marker="o", linestyle="--", label="dev split")
    axis.set_xlabel("step")
    axis.set_ylabel("loss (nats a token)")
    axis.grid(alpha=0.3)
    axis.legend()
    save_figure(figure, path, dpi=150, format="png")
    pyplot.close(figure)


def _curve(metrics: Sequence[Line], name: str) -> tuple[list[int], list[float]]:
    points = [(line["step"], line[name]) for line in metrics if name in line]
    return [step for step, _ in points], [value for _, value in points]


def text_flops(config: ModelConfig, pattern: Pattern, length: int) -> int:
    """Model FLOPs of training on one text of `length` tokens, forward and backward."""
    weights = sum(matmul_weights(config))
    prefix, tail = length - pattern.tail, pattern.tail
    pairs = prefix * (prefix + 1) // 2 + tail * (tail + 1) // 2
    pairs += tail * min(pattern.budget, prefix)
    width = config.num_heads * config.head_dim
    return 6 * weights * length + 12 * width * config.num_layers * pairs


def step_rates(setup: TrainSetup, shape: tuple[int, ...], seconds: float) -> dict[str, float]:
    """Tokens a second and MFU of a step on `shape` = (A, B, T) tokens."""
    peak = device_peak(setup.mesh.devices.flat[0], setup.dtype)
    flops = math.prod(shape[:-1]) * text_flops(setup.config, setup.pattern, shape[-1])
    return {
        "tokens_per_second": round(math.prod(shape) / seconds, 1),
        "mfu": float(f"{flops / (seconds * setup.mesh.size * peak):.4g}"),
    }


def device_peak(device: Any, dtype: str) -> float:
    """FLOP/s of one device in matmuls of a dtype.

    Of bfloat16 on a listed device the data sheet's, else measured with square matrices.
    """
    if dtype == "bfloat16" and device.device_kind in DATA_SHEETS:
        return DATA_SHEETS[device.device_kind]
    return _measured_peak(device, dtype)


@functools.lru_cache(maxsize=8)
def _measured_peak(device: Any, dtype: str) -> float:
    size, times = (1024 if device.platform == "cpu" else 8192), []
    with jax.default_device(device):
        # Each result is the next input, so that no product is skipped.
        x = jnp.full((size, size), 1 / size, dtype)
        multiply = jax.jit(lambda x, y: (x @ y).astype(dtype))
        y = multiply(x, x).block_until_ready()
        for _ in range(5):
            begun = time.perf_counter()
            y = multiply(x, y).block_until_ready()
            times.append(time.perf_counter() - begun)
    return 2 * size**3 / min(times)
