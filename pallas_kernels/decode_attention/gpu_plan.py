"""The slots that each worker of dense decode attends to, and where its results lie (see `gpu`).

The plan has a line for each row: its first step among those of all rows and heads, its first slot
and the one after its last, and the steps of a head. Its last line holds the number of all steps.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jaxtyping import Int

from pallas_kernels import hopper, hopper_rows, hopper_slots
from pallas_kernels.common import PerRow
from pallas_kernels.hopper_stream import BLOCK, Stream

_BASE, _LOW, _HIGH, _STEPS = range(4)  # columns of the plan
MAX_BATCH = 240  # lines of the plan that fit shared memory
_FEW = 8  # rows whose plan every block of threads makes in its registers
_BEGIN = 1  # steps that it takes to begin a head; a block of slots is one


@dataclass(frozen=True, kw_only=True)
class Args:
    """The kernel's static arguments."""

    batch: int
    kv_heads: int
    blocks: int
    group: int
    workers: int
    windowed: bool
    logits: bool
    stream: Stream

    @property
    def form(self) -> Any:
        return hopper_slots if self.stream.by_slots else hopper_rows

    @property
    def few(self) -> bool:
        """Whether the kernels are given the rows' bounds in place of the plan."""
        return self.batch <= _FEW

    @property
    def parts(self) -> int:
        """The most workers that visit one head."""
        # All heads of a row are as long: with K of them none is in more than 1/K of the workers.
        # Each worker has at least one step of it.
        return min(self.workers // self.kv_heads + 2, _BEGIN + self.blocks)

    @property
    def q_tiles(self) -> int:
        """Heads whose queries are in shared memory: the next one's too where there is room."""
        return 2 if self.stream.tile_rows == hopper.TILE_ROWS else 1


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A run of one head's blocks, all scalars of the kernel.

    Blocks `first` to `last` of row `row`, head `head`; slots low <= s < high count; block j is
    the worker's step ahead + j; it is the worker's piece `number`; its results are part `part`.
    """

    row: Any
    head: Any
    part: Any
    low: Any
    high: Any
    first: Any
    last: Any
    ahead: Any
    number: Any


def _steps(low: Any, high: Any, args: Args) -> Any:
    """Steps of a head of a row: one to begin it and one a block."""
    # A later query's window begins later: with low below 0 as well.
    blocks = lax.div(high + (BLOCK - 1), BLOCK) - lax.div(jnp.maximum(low, 0), BLOCK)
    return jnp.where((high > low) & (blocks > 0), _BEGIN + blocks, 0)


@dataclass(frozen=True)
class FewLines:
    """The plan of few rows as scalars of a kernel."""

    columns: tuple[list[Any], ...]

    @staticmethod
    def of(refs: Sequence[Any], args: Args) -> "FewLines":
        """From the rows' last slots or, with a window, their first and last ones."""
        *low_ref, high_ref = refs
        high = [high_ref[b] for b in range(args.batch)]
        low = [low_ref[0][b] if low_ref else jnp.int32(0) for b in range(args.batch)]
        steps, base = [_steps(*each, args) for each in zip(low, high, strict=True)], [jnp.int32(0)]
        for each in steps:
            base.append(base[-1] + args.kv_heads * each)
        return FewLines((base, low, high, steps))

    def __getitem__(self, at: tuple[Any, int]) -> Any:
        row, values = at[0], self.columns[at[1]]
        if isinstance(row, int):
            return values[row]
        found = values[-1]
        for i, value in enumerate(values[:-1]):
            found = jnp.where(row == i, value, found)
        return found


def plan_of(low: PerRow, high: PerRow, args: Args) -> Int[Array, "Q 4"]:
    """The plan as an array."""
    steps = _steps(low, high, args)
    before = jnp.arange(args.batch + 1)[:, None] > jnp.arange(args.batch)
    base = args.kv_heads * jnp.sum(jnp.where(before, steps, 0), axis=1)
    columns = [jnp.pad(x, (0, 1)) for x in (low, high, steps)]
    return jnp.stack([base, *columns], axis=1).astype(jnp.int32)


def each_piece(plan, args: Args, work: Callable) -> tuple[Array, Array]:
    """Call work(piece) for every head with a block in this worker's run of steps, in order.

    Returns the number of its pieces and of their blocks.
    """
    worker = lax.axis_index("worker")
    share = lax.div(plan[args.batch, _BASE] + (args.workers - 1), args.workers)
    begin = worker * share

    def row(b: Array, done: tuple[Array, Array]) -> tuple[Array, Array]:
        base, steps = plan[b, _BASE], plan[b, _STEPS]
        first = jnp.maximum(begin, base)
        last = jnp.minimum(begin + share, plan[b + 1, _BASE])

        def head(h: Array, done: tuple[Array, Array]) -> tuple[Array, Array]:
            start = base + h * steps
            block = lax.div(jnp.maximum(plan[b, _LOW], 0), BLOCK)
            # A head's first steps are those to begin it.
            runs = [
                jnp.maximum(x - start - _BEGIN, 0)
                for x in (jnp.maximum(first, start), jnp.minimum(last, start + steps))
            ]
            pieces, blocks = done
            piece = Piece(
                row=b,
                head=h,
                part=worker + b * args.kv_heads + h,
                low=plan[b, _LOW],
                high=plan[b, _HIGH],
                first=runs[0] + block,
                last=runs[1] + block,
                ahead=blocks - runs[0] - block,
                number=pieces,
            )
            pl.when(runs[1] > runs[0])(lambda: work(piece))
            return pieces + (runs[1] > runs[0]).astype(jnp.int32), blocks + runs[1] - runs[0]

        # A row without steps in this run has no head to visit.
        each = jnp.maximum(steps, 1)
        heads = lax.div(first - base, each), lax.div(last - 1 - base, each) + 1
        return lax.fori_loop(jnp.where(last > first, heads[0], heads[1]), heads[1], head, done)

    return lax.fori_loop(0, args.batch, row, (jnp.int32(0), jnp.int32(0)))


def part_of(plan: Any, head: Any, i: Any, args: Args) -> tuple[Array, Array]:
    """The i-th part that a head may have, heads counted over all rows; and whether it exists."""
    row = lax.div(head, args.kv_heads)
    share = jnp.maximum(lax.div(plan[args.batch, _BASE] + (args.workers - 1), args.workers), 1)
    steps = plan[row, _STEPS]
    start = plan[row, _BASE] + steps * lax.rem(head, args.kv_heads)
    worker = lax.div(start, share) + i
    begin = worker * share
    # Where a worker's run ends before the head's first block nothing is written.
    mine = (begin < start + steps) & (steps > 0) & (begin + share > start + _BEGIN)
    return worker + head, mine
