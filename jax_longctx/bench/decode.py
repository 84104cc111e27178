"""Time of a decode step by method, context and batch, beside full attention in the same run.

Random weights of a published shape. The prediction beside each figure is the bytes that must be
read a step (every weight but the embedding table, and what the method says it reads of its caches)
over the copy bandwidth measured in the same run. With `random_cache` the context is not read:
stored keys and values are drawn at random, which is as good for timing where what is read does not
depend on them, and lets long contexts be measured in seconds.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_longctx.bench.e2e import decode_bytes
from jax_longctx.caches import AppendCache
from jax_longctx.engine import Context, Engine, programs
from jax_longctx.engine.capacity import bucket
from jax_longctx.engine.engine import BLOCK, FIRST_BLOCKS
from jax_longctx.engine.footprint import footprint
from jax_longctx.errors import CapacityError
from jax_longctx.methods import Full, make_method
from jax_longctx.models.llama import init_params
from jax_longctx.models.presets import preset
from jax_longctx.sharding import make_mesh, tree_shardings
from pallas_kernels.bench import copy_bandwidth

__all__ = ["run"]

# The question's one token, the short first blocks, and whole blocks that are timed.
WARM = 1 + sum(FIRST_BLOCKS)


def _is_store(node: Any) -> bool:
    return isinstance(node, AppendCache)


def random_context(engine: Engine, batch: int, length: int, reserve: int) -> Context:
    """A context of `length` tokens a row whose append-only caches hold random keys and values."""
    setup = engine.setup
    slots = bucket(length + reserve + 1, engine.mesh.shape["seq"])
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
        """One program for all layers that are alike; nothing is made twice."""
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


def step_seconds(engine: Engine, context: Context, blocks: int) -> float:
    """Mean seconds of a decode step over whole blocks, all rows together."""
    question = [[1]] * context.batch
    steps = WARM + blocks * BLOCK
    stream = engine.stream(context, question, max_tokens=steps, keep=False)
    times, counted = [], 0
    previous = time.perf_counter()
    for block in stream:
        now = time.perf_counter()
        if len(block[0]) == BLOCK:
            times.append(now - previous)
            counted += BLOCK
        previous = now
    return sum(times) / counted


def run(
    *,
    model: str,
    methods: Sequence[tuple[str, dict[str, str]]],
    cases: Sequence[tuple[int, int]],
    blocks: int,
    random_cache: bool,
    chunk: int = 8192,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Full attention and `methods` at every (batch, context) of `cases`; JSON-able.

    A case that does not fit the memory is recorded as such.
    """
    config, mesh = preset(model), make_mesh()
    bandwidth = copy_bandwidth()
    say(f"copy {bandwidth / 1e12:.2f} TB/s; making weights ...")
    params = init_params(config, mesh, dtype=jnp.bfloat16)
    made = [("full", {}, Full())]
    made += [(name, settings, make_method(name, settings)) for name, settings in methods]
    rows = []
    for batch, length in cases:
        full = None
        for name, settings, method in made:
            say(f"{name}, {batch} x {length:,} ...")
            engine = Engine(config, params, method, mesh, chunk=chunk)
            row: dict[str, Any] = {"method": name, "settings": settings}
            row |= {"batch": batch, "context": length}
            row |= _case(engine, batch, length, blocks, random_cache)
            if "seconds" in row:
                row["roofline_seconds"] = row["bytes"] / bandwidth
                full = full or row
                row["speedup"] = full["seconds"] / row["seconds"]
                row["predicted_speedup"] = full["bytes"] / row["bytes"]
                say(
                    f"  {row['seconds'] * 1e3:.2f} ms, {row['speedup']:.2f}x full attention's speed"
                )
            rows.append(row)
    return {
        "model": model,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "copy_bandwidth": bandwidth,
        "rows": rows,
    }


def _case(engine: Engine, batch: int, length: int, blocks: int, random_cache: bool) -> dict:
    reserve = 1 + WARM + blocks * BLOCK
    weights = decode_bytes(engine.params, engine.config.tie_embeddings, 0, 0)
    found = footprint(engine.setup, batch=batch, context=length, reserve=reserve)
    try:
        if random_cache:
            context = random_context(engine, batch, length, reserve)
        else:
            draw = np.random.default_rng(length).integers(0, engine.config.vocab_size, length)
            context = engine.prefill([list(map(int, draw))] * batch, reserve=reserve)
        seconds = step_seconds(engine, context, blocks)
    except (CapacityError, jax.errors.JaxRuntimeError) as error:
        return {"failed": str(error).splitlines()[0]}
    return {"seconds": seconds, "bytes": weights + found.read, **dataclasses.asdict(found)}
