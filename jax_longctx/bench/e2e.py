"""End to end: time to first token and time a decode step of a whole model, random weights.

Baseline: transformers with sdpa on the same device, run by `jax_longctx.bench.transformers_peer`
in a process of its own before JAX allocates memory. Roofline of a decode step: the bytes that must
be read (every weight but the embedding table, of which one row is read, and the valid keys and
values) over the copy bandwidth measured in the same run.
"""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from jax_longctx.bench.timing import Shape, answered, copy_bandwidth, device_facts, run_peer
from jax_longctx.engine.engine import BLOCK
from jax_longctx.methods import Full
from jax_longctx.planning.work import step_weight_bytes
from jax_longctx.sharding import make_mesh


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
        arguments = ("--steps", steps, *peer_options, *contexts)
        module = "jax_longctx.bench.transformers_peer"
        baseline = run_peer(module, model, *arguments, advice="leave it out")
    shape = Shape.make(model, make_mesh(), None, chunk, say)
    bandwidth = copy_bandwidth()
    say(f"copy {bandwidth / 1e12:.2f} TB/s")
    weights = step_weight_bytes(shape.setup(Full()))
    engine = shape.engine(Full())
    rows: list[dict[str, Any]] = []
    for context in contexts:
        say(f"{context:,} tokens ...")
        # The last token of the prompt is the question.
        firsts, each, per_token = answered(engine, context - 1, steps, runs, keep=True)
        first, step = statistics.median(firsts), statistics.median(each)
        need = weights + per_token * context
        theirs = baseline.get(str(context), {})
        against = [
            ("first token", first, "transformers sdpa", theirs.get("first_token")),
            ("decode step", step, "roofline", need / bandwidth),
        ]
        for name, key in (("sdpa", "decode_step"), ("compiled", "compiled_step")):
            if key in theirs:
                against.append(("decode step", step, f"transformers {name}", theirs[key]))
        rows += [
            {
                "what": what,
                "context": context,
                "seconds": ours,
                "baseline": name,
                "baseline_seconds": seconds,
                # Below 1 ours is faster.
                "ratio": ours / seconds if seconds else None,
            }
            for what, ours, name, seconds in against
        ]
    return {
        "model": model,
        **device_facts(),
        "chunk": chunk,
        "copy_bandwidth": bandwidth,
        "rows": rows,
        "baseline": baseline,
    }
