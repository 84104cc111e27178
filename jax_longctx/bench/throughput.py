"""Tokens a second of decoding, by method and context, at the largest batch of rows that fits.

Methods that evict answer more rows in the same memory. The largest batch is the one whose caches
fit into the free memory by the engine's own arithmetic (`capacity.footprint`), with the tenth that
the engine keeps free. It is confirmed by running it. If it does not run, a smaller one is tried.

Time and limit of a step are those of `decode`. A step gives each row one token. Prefill is not in
the time: all rows are copies of one (see `steps`).
"""

from collections.abc import Callable, Sequence
from typing import Any

from jax.sharding import Mesh

from jax_longctx.bench.decode import Methods, Timed, beside_full
from jax_longctx.bench.steps import answer_tokens, check_mesh
from jax_longctx.bench.timing import Shape, copy_bandwidth
from jax_longctx.contract import Method
from jax_longctx.engine.capacity import USABLE, available_bytes, footprint
from jax_longctx.engine.setup import Setup
from jax_longctx.errors import ConfigError, InputError
from jax_longctx.methods import make_method
from jax_longctx.sharding import make_mesh

# How many batches are tried, each a sixteenth smaller.
TRIES = 4


def run(
    *,
    model: str,
    methods: Methods,
    contexts: Sequence[int],
    blocks: int,
    most: int | None = None,
    memory: int | None = None,
    random_cache: bool = False,
    chunk: int = 8192,
    kv: str | None = None,
    weights: str | None = None,
    mesh: Mesh | None = None,
    kernels: bool = True,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Full attention and `methods` at every length of `contexts`; JSON-able.

    Args:
      most: rows beyond which no batch is tried.
      memory: bytes of each device that caches may use, in place of what is free.
      mesh, random_cache, kernels: as in `decode.run`.

    Raises:
      InputError: the platform does not tell its free memory, and `memory` is not given.
    """
    mesh = make_mesh() if mesh is None else mesh
    check_mesh(mesh)
    shape = Shape.make(model, mesh, None, chunk, say, kv, weights)
    bandwidth = copy_bandwidth()
    free = available_bytes(mesh) if memory is None else memory
    if free is None:
        raise InputError("this device does not tell its free memory; give it with --memory")
    timed, rows = Timed(shape, blocks, bandwidth, random_cache, kernels), []
    for length in contexts:
        for name, settings in beside_full(methods):
            say(f"{name}, {length:,} tokens ...")
            row: dict[str, Any] = {"method": name, "settings": settings, "context": length}
            row |= _row(timed, make_method(name, settings), length, most, free)
            if "seconds" in row:
                row["tokens_per_second"] = row["batch"] / row["seconds"] / mesh.size
                row["limit_tokens_per_second"] = row["batch"] / row["limit_seconds"] / mesh.size
                said = f"  {row['batch']} rows, {row['tokens_per_second']:,.0f} tokens/s a device"
                say(f"{said}, {row['share']:.0%} of the limit")
            else:
                say(f"  {row['failed']}")
            rows.append(row)
    facts = {**shape.facts(), "devices": mesh.size, "free": free}
    return {"model": model, **facts, "copy_bandwidth": bandwidth, "rows": rows}


def _row(timed: Timed, method: Method, length: int, most: int | None, free: int) -> dict[str, Any]:
    """The step at the largest batch that runs, or why none does.

    `by_arithmetic` is the batch that fits by arithmetic, which `most` does not bound.
    """
    shape, reserve = timed.shape, 1 + answer_tokens(timed.blocks)
    try:
        method.validate(shape.config)
        fits = largest_batch(shape.setup(method), length, reserve, int(USABLE * free))
    except ConfigError as error:
        return {"failed": str(error).splitlines()[0]}
    row: dict[str, Any] = {"by_arithmetic": fits}
    if not fits:
        return {**row, "failed": "no row fits the memory"}
    batch = fits if most is None else min(fits, most)
    for left in reversed(range(TRIES)):
        found = timed.row(method, batch, length, free)
        smaller = batch - max(batch // 16, 1)
        if "seconds" in found or not left or not smaller:
            break
        batch = smaller
    return {**row, "batch": batch, **found}


def largest_batch(setup: Setup, context: int, reserve: int, usable: int) -> int:
    """The most rows whose caches fit `usable` bytes of each device while they answer; 0 if none."""

    def held(rows: int) -> int:
        sizes: dict[str, Any] = dict(batch=rows, context=context, reserve=reserve)
        return footprint(setup, **sizes, per_device=True).resident

    one = held(1)
    rows = 1 + int((usable - one) // max(held(2) - one, 1)) if one <= usable else 0
    # Caches grow with the rows almost in proportion.
    while rows and held(rows) > usable:
        rows -= 1
    while rows and held(rows + 1) <= usable:
        rows += 1
    return rows
