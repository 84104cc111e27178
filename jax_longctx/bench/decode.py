"""Time of a decode step by method, context and batch, beside full attention in the same run.

Random weights of a published shape. The prediction beside each time is the bytes that a step must
read (every weight but the embedding table, and what the method says it reads of its caches) over
the copy bandwidth measured in the same run. With `random_cache` there is no prefill: keys and
values are random, so that long contexts are measured in seconds. The time is the same where the
amount that a step reads does not depend on the values.
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_longctx.bench.timing import TOO_MUCH, Shape, copy_bandwidth, scaled, streamed
from jax_longctx.caches import AppendCache
from jax_longctx.contract import Method
from jax_longctx.engine import Context, Engine, programs
from jax_longctx.engine.capacity import footprint, reserved, slots_for
from jax_longctx.engine.engine import BLOCK, FIRST_BLOCKS
from jax_longctx.methods import Full, make_method
from jax_longctx.planning.plan import step_weight_bytes
from jax_longctx.sharding import make_mesh, tree_shardings

# Steps before the full blocks that are timed: the question's token and the short first blocks.
WARM = 1 + sum(FIRST_BLOCKS)


def _is_store(node: Any) -> bool:
    return isinstance(node, AppendCache)


def random_context(engine: Engine, batch: int, length: int, reserve: int) -> Context:
    """A context of `length` tokens a row, with random keys and values in append-only caches."""
    setup = engine.setup
    reserve = reserved(reserve)
    slots = slots_for(length, reserve, engine.mesh.shape["seq"])
    shapes = programs.abstract_caches(setup, batch, slots, reserve)

    def draw(node: Any, seed: Any) -> Any:
        if not _is_store(node):
            return jnp.zeros(node.shape, node.dtype)
        keys = jax.random.split(jax.random.key(seed), 2)
        k, v = (jax.random.normal(key, node.k.shape, node.k.dtype) for key in keys)
        at = [jnp.full(node.length.shape, length, jnp.int32) for _ in range(4)]
        return AppendCache(k, v, *at)

    made: dict[Any, Any] = {}

    def layer(index: int, cache: Any) -> Any:
        """Fills a layer's cache; layers of the same shapes share one program."""
        key = jax.tree.structure(cache), tuple(leaf.shape for leaf in jax.tree.leaves(cache))
        if key not in made:

            def make(seed: Any) -> Any:
                stores = functools.partial(jax.tree.map, is_leaf=_is_store)
                return stores(lambda node: draw(node, seed), cache)

            made[key] = jax.jit(make, out_shardings=tree_shardings(setup.mesh, cache))
        return made[key](index)

    filled = tuple(layer(index, cache) for index, cache in enumerate(shapes))
    rows = [[0] * length for _ in range(batch)]
    total = jnp.full((batch,), length, jnp.int32)
    return Context(rows, batch, slots, reserve, total, filled)


def step_seconds(engine: Engine, context: Context) -> float:
    """Seconds of a decode step of all rows: the median of the full blocks that fit."""
    question = [[1]] * context.batch
    stream = engine.stream(context, question, max_tokens=context.reserve - 1, keep=False)
    return statistics.median(streamed(time.perf_counter(), stream)[1])


def run(
    *,
    model: str,
    methods: Sequence[tuple[str, dict[str, str]]],
    cases: Sequence[tuple[int, int]],
    blocks: int,
    random_cache: bool,
    layers: int | None = None,
    chunk: int = 8192,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Full attention and `methods` at every (batch, context) of `cases`; JSON-able.

    A case that does not fit the memory is recorded as failed. Where full attention fails, the other
    methods' rows have times and no ratios.

    Args:
      layers: to time; all of the shape's unless given (see `timing`).
    """
    shape = Shape.make(model, make_mesh(), layers, chunk, say)
    bandwidth = copy_bandwidth()
    say(f"copy {bandwidth / 1e12:.2f} TB/s")
    made = [("full", {}, Full())]
    made += [(name, settings, make_method(name, settings)) for name, settings in methods]
    rows = []
    for batch, length in cases:
        full = None
        for name, settings, method in made:
            say(f"{name}, {batch} x {length:,} ...")
            row: dict[str, Any] = {"method": name, "settings": settings}
            row |= {"batch": batch, "context": length}
            row |= _case(shape, method, batch, length, blocks, random_cache)
            if "seconds" in row:
                row["roofline_seconds"] = row["bytes"] / bandwidth
                said = f"  {row['seconds'] * 1e3:.2f} ms"
                full = row if method is made[0][2] else full
                if full is not None:
                    row["speedup"] = full["seconds"] / row["seconds"]
                    row["predicted_speedup"] = full["bytes"] / row["bytes"]
                    said += f", {row['speedup']:.2f}x full attention's speed"
                say(said)
            rows.append(row)
    return {"model": model, **shape.facts(), "copy_bandwidth": bandwidth, "rows": rows}


def _case(
    shape: Shape, method: Method, batch: int, length: int, blocks: int, random_cache: bool
) -> dict[str, Any]:
    """Seconds and bytes of a step of the whole model, or the reason why it failed."""
    config, reserve, setup = shape.config, 1 + WARM + blocks * BLOCK, shape.setup(method)
    found = footprint(setup, batch=batch, context=length, reserve=reserve)

    def measure(engine: Engine) -> float:
        if random_cache:
            return step_seconds(engine, random_context(engine, batch, length, reserve))
        draw = np.random.default_rng(length).integers(0, config.vocab_size, length)
        rows = [list(map(int, draw))] * batch
        return step_seconds(engine, engine.prefill(rows, reserve=reserve))

    try:
        seconds = shape.times(method, measure)
    except TOO_MUCH as error:
        return {"failed": str(error).splitlines()[0]}
    row = scaled("seconds", seconds, config.num_layers) | dataclasses.asdict(found)
    return {**row, "bytes": step_weight_bytes(setup) + found.read}
