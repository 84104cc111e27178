"""Time of a decode step by method, context and batch, beside full attention in the same run.

Random weights of a published shape. The limit beside each time is the bytes that a step must read
(every weight but the embedding table, and what the method says it reads of its caches) over the
copy bandwidth measured in the same run. See `steps` for how a step is timed.

The most rows that fit are those whose caches fit into the free memory by the engine's own
arithmetic (`capacity.footprint`), with the tenth that the engine keeps free. A run confirms them;
if it fails, fewer are tried. Methods that evict answer more rows in the same memory.

With `random_cache` the methods that keep all keys need no prefill: keys and values are random, so
that long contexts are measured in seconds. The time is the same where the amount that a step reads
does not depend on the values.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from jax_longctx.bench.asked import Decode
from jax_longctx.bench.steps import Step, answer_tokens, check_mesh, one_row, step_of
from jax_longctx.bench.timing import TOO_MUCH, Shape, copy_bandwidth, scaled
from jax_longctx.contract import Method
from jax_longctx.engine import Engine
from jax_longctx.engine.capacity import USABLE, available_bytes, check_fits, footprint
from jax_longctx.engine.setup import Setup
from jax_longctx.errors import ConfigError, InputError
from jax_longctx.methods import make_method
from jax_longctx.planning.work import decode_work
from jax_longctx.run_spec import RunSpec

FULL = ("full", {})
# How many batches are tried as the largest, each a sixteenth smaller.
TRIES = 4


def run(
    asked: Decode, spec: RunSpec, say: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Full attention and the methods at every case; JSON-able.

    A case that does not fit the memory, or a method that refuses the model, is recorded as failed.
    Where full attention fails, the other methods' rows have no ratio. Its contexts lie on the
    devices. The mesh has no data axis. Where a case names no batch, `by_arithmetic` is the one that
    fits by arithmetic.

    Raises:
      InputError: a case names no batch, and the platform does not tell its free memory.
    """
    check_mesh(spec.devices())
    shape = Shape.make(asked.model, spec, say, asked.layers)
    bandwidth = copy_bandwidth()
    say(f"copy {bandwidth / 1e12:.2f} TB/s")
    timed, rows = Timed(shape, bandwidth, asked), []
    for batch, length in asked.sizes:
        full = None
        for name, settings in asked.beside_full():
            say(f"{name}, {'' if batch is None else f'{batch} x '}{length:,} ...")
            row: dict[str, Any] = {"method": name, "settings": settings, "context": length}
            row |= timed.case(make_method(name, settings), batch, length)
            if "seconds" in row:
                row["tokens_per_second"] = row["batch"] / row["seconds"] / shape.mesh.size
                full = row if (name, settings) == FULL else full
                if full is not None:
                    row["speedup"] = row["tokens_per_second"] / full["tokens_per_second"]
            say(f"  {row['failed'] if 'failed' in row else _said(row)}")
            rows.append(row)
    facts = {**shape.facts(), "devices": shape.mesh.size, "copy_bandwidth": bandwidth}
    return {"model": asked.model, **facts, "rows": rows}


def _said(row: dict[str, Any]) -> str:
    said = f"{row['batch']} rows, {row['seconds'] * 1e3:.2f} ms, {row['share']:.0%} of the limit"
    return said + (f", {row['speedup']:.2f}x full attention's" if "speedup" in row else "")


@dataclasses.dataclass(frozen=True)
class Timed:
    """How steps are timed; `bandwidth` is a copy's, in bytes a second."""

    shape: Shape
    bandwidth: float
    asked: Decode

    def case(self, method: Method, batch: int | None, length: int) -> dict[str, Any]:
        """The step of `batch` rows, or of the most that fit."""
        if batch is not None:
            return {"batch": batch, **self.row(method, batch, length)}
        reserve, free = 1 + answer_tokens(self.asked.blocks), available_bytes(self.shape.mesh)
        if free is None:
            raise InputError("this device does not tell its free memory; give BATCHxCONTEXT")
        try:
            method.check_model(self.shape.config)
            fits = largest_batch(self.shape.setup(method), length, reserve, int(USABLE * free))
        except ConfigError as error:
            return {"batch": 0, "failed": str(error).splitlines()[0]}
        batch, row = fits, {"failed": "no row fits the memory"}
        for left in reversed(range(TRIES if fits else 0)):
            row = self.row(method, batch, length)
            smaller = batch - max(batch // 16, 1)
            if "seconds" in row or not left or not smaller:
                break
            batch = smaller
        return {"by_arithmetic": fits, "batch": batch, **row}

    def row(self, method: Method, batch: int, length: int) -> dict[str, Any]:
        """Seconds, limit, kernels and bytes of a step of the whole model, or why it failed."""
        shape, asked, tokens = self.shape, self.asked, answer_tokens(self.asked.blocks)
        sizes: dict[str, Any] = dict(batch=batch, context=length, reserve=1 + tokens)

        def measure(engine: Engine) -> Step:
            held = footprint(engine.setup, **sizes, per_device=True).resident
            check_fits(length, held, 0.0, available_bytes(shape.mesh))
            context = one_row(engine, length, tokens, asked.random_cache)
            return step_of(engine, context, batch, asked.blocks, asked.kernels)

        try:
            measured = shape.times(method, measure)
            found = footprint(shape.setup(method), **sizes)
            row = _of_steps(measured, shape.config.num_layers)
        except (ConfigError, InputError, *TOO_MUCH) as error:
            return {"failed": str(error).splitlines()[0]}
        work = decode_work(shape.setup(method), batch=batch, context=length, read=found.read)
        limit = work.read / self.bandwidth
        row |= {"bytes": work.read, "limit_seconds": limit, "share": limit / row["seconds"]}
        return row | dataclasses.asdict(found)


def _of_steps(measured: dict[int, Step], layers: int) -> dict[str, Any]:
    """The figures of a model of `layers` layers, from steps by their number of layers."""
    row: dict[str, Any] = scaled("seconds", {n: one.seconds for n, one in measured.items()}, layers)
    counted = {n: one.kernels for n, one in measured.items() if one.kernels is not None}
    if counted:
        row |= scaled("kernels", {n: one.number for n, one in counted.items()}, layers)
        row.setdefault("kernels_layer", row["kernels"] / layers)
        row |= scaled("kernel_seconds", {n: one.seconds for n, one in counted.items()}, layers)
        row["gap_seconds"] = row["seconds"] - row["kernel_seconds"]
    fetched = measured[max(measured)].fetched
    if fetched is not None:
        row["fetched"] = fetched.record()
    return row


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
