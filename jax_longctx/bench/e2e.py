"""End to end: time to first token and time a decode step of a whole model, random weights.

Baseline: transformers with sdpa on the same device, run by `jax_longctx.bench.transformers_peer`
in a process of its own before JAX allocates memory. Roofline of a decode step: the bytes that must
be read (every weight but the embedding table, of which one row is read, and the valid keys and
values) over the copy bandwidth measured in the same run.
"""

import statistics
from collections.abc import Callable
from typing import Any

from jax_longctx.bench.timing import Shape, answered, copy_bandwidth, device_facts, run_peer
from jax_longctx.cli.bench_options import EndToEnd
from jax_longctx.engine.engine import BLOCK
from jax_longctx.methods import Full
from jax_longctx.planning.work import step_weight_bytes
from jax_longctx.run_spec import RunSpec

# Tokens of an answer: the first, the short first blocks (17), and whole blocks.
STEPS = 1 + 17 + 4 * BLOCK
CONTEXTS = (32768, 131072)


def run(
    asked: EndToEnd, spec: RunSpec, say: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Measures prefill and decode of full attention; JSON-able."""
    contexts, baseline = asked.contexts or CONTEXTS, {}
    if asked.peer:
        say("transformers (sdpa) ...")
        arguments = ("--steps", STEPS, *(["--compile"] if asked.compiled else ()), *contexts)
        module = "jax_longctx.bench.transformers_peer"
        baseline = run_peer(module, asked.model, *arguments, advice="leave it out")
    shape = Shape.make(asked.model, spec, say)
    bandwidth = copy_bandwidth()
    say(f"copy {bandwidth / 1e12:.2f} TB/s")
    weights = step_weight_bytes(shape.setup(Full()))
    engine = shape.engine(Full())
    rows: list[dict[str, Any]] = []
    for context in contexts:
        say(f"{context:,} tokens ...")
        # The last token of the prompt is the question.
        firsts, each, per_token = answered(engine, context - 1, STEPS, asked.runs, keep=True)
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
        "model": asked.model,
        **device_facts(),
        "chunk": spec.chunk,
        "copy_bandwidth": bandwidth,
        "rows": rows,
        "baseline": baseline,
    }
