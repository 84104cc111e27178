"""Time of a decode step by method, context and batch, beside full attention in the same run.

Random weights of a published shape. The limit beside each time is the bytes that a step must read
(every weight but the embedding table, and what the method says it reads of its caches) over the
copy bandwidth measured in the same run. See `steps` for how a step is timed.

With `random_cache` the methods that keep all keys need no prefill: keys and values are random, so
that long contexts are measured in seconds. The time is the same where the amount that a step reads
does not depend on the values.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jax.sharding import Mesh

from jax_longctx.bench.steps import Step, answer_tokens, check_mesh, one_row, step_of
from jax_longctx.bench.timing import TOO_MUCH, Shape, copy_bandwidth, scaled
from jax_longctx.contract import Method
from jax_longctx.engine import Engine
from jax_longctx.engine.capacity import available_bytes, check_fits, footprint
from jax_longctx.errors import ConfigError
from jax_longctx.methods import make_method
from jax_longctx.planning.work import decode_work
from jax_longctx.sharding import make_mesh

FULL: tuple[str, dict[str, str]] = ("full", {})
Methods = Sequence[tuple[str, dict[str, str]]]


def run(
    *,
    model: str,
    methods: Methods,
    cases: Sequence[tuple[int, int]],
    blocks: int,
    random_cache: bool,
    layers: int | None = None,
    chunk: int = 8192,
    kv: str | None = None,
    weights: str | None = None,
    offload: str | None = None,
    working_set: int | None = None,
    mesh: Mesh | None = None,
    kernels: bool = True,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Full attention and `methods` at every (batch, context) of `cases`; JSON-able.

    A case that does not fit the memory, or a method that refuses the model, is recorded as failed.
    Where full attention fails, the other methods' rows have no ratio.

    Args:
      layers: to time; all of the shape's unless given (see `timing`).
      offload, working_set: where the methods' contexts lie, as for `Engine`; full attention's lies
        on the devices. Rows then say what was fetched.
      mesh: without a data axis; one device unless given.
      kernels: whether the kernels of a step are counted, on GPUs.
    """
    mesh = make_mesh() if mesh is None else mesh
    check_mesh(mesh)
    shape = Shape.make(model, mesh, layers, chunk, say, kv, weights, offload, working_set)
    bandwidth = copy_bandwidth()
    say(f"copy {bandwidth / 1e12:.2f} TB/s")
    timed, rows = Timed(shape, blocks, bandwidth, random_cache, kernels), []
    for batch, length in cases:
        full = None
        for name, settings in beside_full(methods):
            say(f"{name}, {batch} x {length:,} ...")
            row: dict[str, Any] = {"method": name, "settings": settings}
            row |= {"batch": batch, "context": length}
            row |= timed.row(make_method(name, settings), batch, length)
            if "seconds" in row:
                full = row if (name, settings) == FULL else full
                if full is not None:
                    row["speedup"] = full["seconds"] / row["seconds"]
            say(f"  {row['failed'] if 'failed' in row else _said(row)}")
            rows.append(row)
    return {"model": model, **shape.facts(), "copy_bandwidth": bandwidth, "rows": rows}


def beside_full(methods: Methods) -> list[tuple[str, dict[str, str]]]:
    """Full attention, then the other methods."""
    return [FULL, *(each for each in methods if each != FULL)]


def _said(row: dict[str, Any]) -> str:
    said = f"{row['seconds'] * 1e3:.2f} ms, {row['share']:.0%} of the limit's speed"
    return said + (f", {row['speedup']:.2f}x full attention's" if "speedup" in row else "")


@dataclasses.dataclass(frozen=True)
class Timed:
    """How steps are timed: see `run`; `bandwidth` is that of a copy, in bytes a second."""

    shape: Shape
    blocks: int
    bandwidth: float
    random_cache: bool
    kernels: bool

    def row(
        self, method: Method, batch: int, length: int, available: int | None = None
    ) -> dict[str, Any]:
        """Seconds, limit, kernels and bytes of a step of the whole model, or why it failed.

        Args:
          available: bytes of each device for caches; what is free unless given.
        """
        shape, tokens = self.shape, answer_tokens(self.blocks)
        sizes: dict[str, Any] = dict(batch=batch, context=length, reserve=1 + tokens)

        def measure(engine: Engine) -> Step:
            held = footprint(engine.setup, **sizes, per_device=True).resident
            check_fits(length, held, 0.0, available or available_bytes(shape.mesh))
            context = one_row(engine, length, tokens, self.random_cache)
            return step_of(engine, context, batch, self.blocks, self.kernels)

        try:
            measured = shape.times(method, measure)
            found = footprint(shape.setup(method), **sizes)
        except (ConfigError, *TOO_MUCH) as error:
            return {"failed": str(error).splitlines()[0]}
        row = _of_steps(measured, shape.config.num_layers)
        moved = decode_work(shape.setup(method), batch=batch, read=found.read).read
        limit = moved / self.bandwidth
        row |= {"bytes": moved, "limit_seconds": limit, "share": limit / row["seconds"]}
        return row | dataclasses.asdict(found)


def _of_steps(measured: dict[int, Step], layers: int) -> dict[str, Any]:
    """The figures of a model of so many layers, from steps by their number of layers."""
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
