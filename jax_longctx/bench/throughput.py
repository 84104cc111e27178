"""Tokens a second of decoding, by method and context, at the largest batch of rows that fits.

Methods that evict answer more rows in the same memory. The largest batch is the one whose caches
fit into the free memory by the engine's own arithmetic (`capacity.footprint`), with the tenth that
the engine keeps free. It is confirmed by running it. If it does not run, a smaller one is tried.

Time and limit of a step are those of `decode`. A step gives each row one token. Prefill is not in
the time: all rows are copies of one (see `steps`).
"""

from collections.abc import Callable
from typing import Any

from jax_longctx.bench.asked import Throughput
from jax_longctx.bench.decode import Timed
from jax_longctx.bench.steps import answer_tokens, check_mesh
from jax_longctx.bench.timing import Shape, copy_bandwidth
from jax_longctx.contract import Method
from jax_longctx.engine.capacity import USABLE, available_bytes, footprint
from jax_longctx.engine.setup import Setup
from jax_longctx.errors import ConfigError, InputError
from jax_longctx.methods import make_method
from jax_longctx.run_spec import RunSpec

# How many batches are tried, each a sixteenth smaller.
TRIES = 4


def run(
    asked: Throughput, spec: RunSpec, say: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Full attention and the methods at every length; JSON-able. The mesh has no data axis.

    Raises:
      InputError: the platform does not tell its free memory, and none is given.
    """
    mesh = spec.devices()
    check_mesh(mesh)
    shape = Shape.make(asked.model, spec, say)
    bandwidth = copy_bandwidth()
    free = available_bytes(mesh) if asked.memory is None else int(asked.memory * 2**30)
    if free is None:
        raise InputError("this device does not tell its free memory; give it with --memory")
    timed, rows = Timed(shape, bandwidth, asked), []
    for length in asked.contexts or [32768]:
        for name, settings in asked.beside_full():
            say(f"{name}, {length:,} tokens ...")
            row: dict[str, Any] = {"method": name, "settings": settings, "context": length}
            row |= _row(timed, make_method(name, settings), length, asked.most, free)
            if "seconds" in row:
                row["tokens_per_second"] = row["batch"] / row["seconds"] / mesh.size
                row["limit_tokens_per_second"] = row["batch"] / row["limit_seconds"] / mesh.size
                said = f"  {row['batch']} rows, {row['tokens_per_second']:,.0f} tokens/s a device"
                say(f"{said}, {row['share']:.0%} of the limit")
            else:
                say(f"  {row['failed']}")
            rows.append(row)
    facts = {**shape.facts(), "devices": mesh.size, "free": free}
    return {"model": asked.model, **facts, "copy_bandwidth": bandwidth, "rows": rows}


def _row(timed: Timed, method: Method, length: int, most: int | None, free: int) -> dict[str, Any]:
    """The step at the largest batch that runs, or why none does.

    `by_arithmetic` is the batch that fits by arithmetic, which `most` does not bound.
    """
    shape, reserve = timed.shape, 1 + answer_tokens(timed.asked.blocks)
    try:
        method.check_model(shape.config)
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
