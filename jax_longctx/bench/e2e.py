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
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jax_longctx.bench.timing import Shape, answered, copy_bandwidth, device_facts
from jax_longctx.engine.engine import BLOCK
from jax_longctx.errors import InputError
from jax_longctx.methods import Full
from jax_longctx.models.presets import PRESETS
from jax_longctx.sharding import make_mesh

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
    shape = Shape.make(model, make_mesh(), None, chunk, say)
    bandwidth = copy_bandwidth()
    say(f"copy {bandwidth / 1e12:.2f} TB/s")
    # A step reads every weight but, where it is not the head too, the embedding table.
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(shape.params))
    if not shape.config.tie_embeddings:
        weights -= shape.params["embed"]["table"].nbytes
    engine = shape.engine(Full())
    rows: list[Row] = []
    for context in contexts:
        say(f"{context:,} tokens ...")
        # The last token is the question.
        firsts, each, per_token = answered(engine, context - 1, steps, runs, keep=True)
        first, step = statistics.median(firsts), statistics.median(each)
        need = weights + per_token * context
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
    return {
        "model": model,
        **device_facts(),
        "chunk": chunk,
        "copy_bandwidth": bandwidth,
        "rows": [{**dataclasses.asdict(row), "ratio": row.ratio} for row in rows],
        "baseline": baseline,
    }
