"""End to end: time to first token and time a decode step of a whole model, random weights.

Baseline: transformers with sdpa on the same device, run by `jax_longctx.bench.transformers_peer`
in a process of its own before JAX takes the memory. Roofline of a decode step: the bytes that must
be read (every weight but the embedding table, of which one row is read, and the valid keys and
values) over the copy bandwidth measured in the same run.
"""

import dataclasses
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_longctx.engine import Engine, Sampling
from jax_longctx.engine.engine import BLOCK
from jax_longctx.errors import InputError
from jax_longctx.methods import Full
from jax_longctx.models.llama import init_params
from jax_longctx.models.presets import PRESETS, preset
from jax_longctx.sharding import make_mesh
from pallas_kernels.bench import copy_bandwidth

__all__ = ["Row", "run"]


PEER_STEPS = {"transformers sdpa": "decode_step", "transformers compiled": "compiled_step"}


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the result: what was measured, at which context, against what."""

    what: str
    context: int
    seconds: float
    baseline: str
    baseline_seconds: float | None

    @property
    def ratio(self) -> float | None:
        """Our time over the baseline's: below 1 is faster."""
        return self.seconds / self.baseline_seconds if self.baseline_seconds else None


def decode_bytes(params: Any, tied: bool, cache_bytes_per_token: int, context: int) -> int:
    """Bytes one decode step of one row must read."""
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    if not tied:
        weights -= params["embed"]["table"].nbytes
    return weights + cache_bytes_per_token * context


def _median(runs: int, measure: Callable[[], float]) -> float:
    return statistics.median(measure() for _ in range(runs))


def _measure(engine: Engine, context: int, steps: int, runs: int) -> tuple[float, float, int]:
    """Seconds to the first token, seconds a decode step, and cache bytes a token."""
    rng = np.random.default_rng(context)
    tokens = [int(t) for t in rng.integers(0, engine.config.vocab_size, context)]
    decode: list[float] = []
    bytes_per_token = 0

    def first_token() -> float:
        nonlocal bytes_per_token
        begun = time.perf_counter()
        prefilled = engine.prefill([tokens[:-1]], reserve=1 + steps)
        stream = engine.stream(prefilled, [tokens[-1:]], sampling=Sampling(), max_tokens=steps)
        next(stream)
        seconds = time.perf_counter() - begun
        previous = begun + seconds
        for block in stream:
            now = time.perf_counter()
            # Whole blocks only: the shorter first ones show more of the host.
            if len(block[0]) == BLOCK:
                decode.append((now - previous) / BLOCK)
            previous = now
        assert prefilled.caches is not None
        bytes_per_token = prefilled.resident_bytes // prefilled.slots
        return seconds

    first_token()
    decode.clear()
    seconds = _median(runs, first_token)
    return seconds, statistics.median(decode), bytes_per_token


def peer(model: str, contexts: Sequence[int], steps: int, options: Sequence[str]) -> dict[str, Any]:
    """What `jax_longctx.bench.transformers_peer` prints, run in a process of its own."""
    command = [sys.executable, "-m", "jax_longctx.bench.transformers_peer"]
    config = json.dumps(PRESETS[model])
    command += ["--config", config, "--steps", str(steps), *options, *map(str, contexts)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if "Error" in line]
        reason = said[-1] if said else f"exit status {done.returncode}"
        raise InputError(f"the transformers baseline failed: {reason}; leave it out (--no-peer)")
    return json.loads(done.stdout.strip().splitlines()[-1])


def run(
    *,
    model: str = "llama-3.1-8b",
    contexts: Sequence[int] = (32768, 131072),
    steps: int = 1 + 17 + 4 * BLOCK,
    runs: int = 3,
    chunk: int = 8192,
    with_peer: bool = True,
    peer_options: Sequence[str] = (),
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Measures prefill and decode of full attention; JSON-able.

    `steps` are generated tokens: the first, the short first blocks (17), and whole blocks.
    """
    baseline: dict[str, Any] = {}
    if with_peer:
        say("transformers (sdpa) ...")
        baseline = peer(model, contexts, steps, peer_options)
    config = preset(model)
    mesh = make_mesh()
    bandwidth = copy_bandwidth()
    say(f"copy {bandwidth / 1e12:.2f} TB/s; making weights ...")
    params = init_params(config, mesh, dtype=jnp.bfloat16)
    engine = Engine(config, params, Full(), mesh, chunk=chunk)
    rows: list[Row] = []
    for context in contexts:
        say(f"{context:,} tokens ...")
        first, step, per_token = _measure(engine, context, steps, runs)
        need = decode_bytes(params, config.tie_embeddings, per_token, context)
        theirs = baseline.get(str(context), {})
        rows += [
            Row("first token", context, first, "transformers sdpa", theirs.get("first_token")),
            Row("decode step", context, step, "roofline", need / bandwidth),
        ]
        rows += [
            Row("decode step", context, step, name, theirs[key])
            for name, key in PEER_STEPS.items()
            if key in theirs
        ]
    device = jax.devices()[0]
    return {
        "model": model,
        "device": device.device_kind,
        "jax": jax.__version__,
        "chunk": chunk,
        "copy_bandwidth": bandwidth,
        "rows": [{**dataclasses.asdict(row), "ratio": row.ratio} for row in rows],
        "baseline": baseline,
    }
