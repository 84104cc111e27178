"""Speed of a training step: tokens a second, MFU, peak memory; random weights and tokens."""

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jax_longctx.memory import peak_memory
from jax_longctx.models.params import init_params
from jax_longctx.models.presets import preset
from jax_longctx.run_spec import RunSpec
from train_cpt.metrics import device_peak, step_rates
from train_cpt.step import TrainSetup, init_state, place_texts, step_program


def measure(setup: TrainSetup, length: int, rows: int, steps: int) -> dict[str, Any]:
    """Median seconds of `steps` steps on `rows` texts, after a warm-up step."""
    rng = np.random.default_rng(0)
    texts = rng.integers(0, setup.config.vocab_size, (rows, length))
    placed = place_texts(setup.mesh, texts, np.arange(rows)[None])
    begun = time.perf_counter()
    step = step_program(setup, placed.shape)
    compiled = time.perf_counter() - begun
    state = init_state(setup, init_params(setup.config, RunSpec(mesh=setup.mesh)))
    times = []
    for _ in range(steps + 1):
        begun = time.perf_counter()
        state, metrics = step(state, placed)
        loss = float(metrics["loss"])
        times.append(time.perf_counter() - begun)
    seconds = statistics.median(times[1:])
    rates = step_rates(setup, placed.shape, seconds)
    return {
        "rows": rows,
        "remat": setup.remat,
        "loss_chunk": setup.loss_chunk,
        "pattern": dataclasses.asdict(setup.pattern),
        "mesh": dict(setup.mesh.shape),
        "seconds": seconds,
        **rates,
        "peak_bytes": peak_memory(),
        "compile_seconds": round(compiled, 1),
        "loss": loss,
    }


def run(
    model: str,
    setup_of: Callable[[Any], TrainSetup],
    *,
    length: int,
    rows: int,
    steps: int,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Measures a step; JSON-able.

    Args:
      model: a preset's name.
      setup_of: makes the setup from the model's configuration.
    """
    say("compiling ...")
    setup = setup_of(preset(model))
    ours = measure(setup, length, rows, steps)
    device = setup.mesh.devices.flat[0]
    peak, source = device_peak(device, setup.dtype)
    return {
        "model": model,
        "length": length,
        "device": device.device_kind,
        "devices": setup.mesh.size,
        "peak_flops": peak,
        "peak_source": source,
        "jax": jax.__version__,
        "ours": ours,
    }
