"""The k best of a row of scores by one block of threads on Hopper, as an ascending list.

What `select_large_k` and `select_pages` share; it runs inside their kernels, in one warpgroup.

The scores lie in the block's registers as signed integers of the same order. A bisection finds the
border: the number that exactly k of them reach, or the score at which ties are cut. It begins at
the best score and steps down in strides that grow, for the border mostly lies within a factor of
two of it, and it ends as soon as exactly k scores reach the middle. Most rows take 10 to 15 counts.
Where scores tie at the border a second bisection finds the slot before which just enough of them
lie.

Each thread then has the chosen ones among its slots as bits, and `hopper_warps` counts those that
come before them.

Work: 2 operations a score and count, one reduction over the block a count. Rows of more than
16,384 scores do not fit the registers; they are read again from the L2 cache for each count.
On an H200 a step of Quest over 131,072 tokens, 8B shape, takes 5.36 ms, with XLA's search 6.98;
under RESA 5.64 and 7.10. Rejected: the list by matrix products of counts, which took 21 us for 64
of 8,192.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Float, Int

from pallas_kernels import hopper, hopper_warps

# The key of what is never chosen, and the least one that may be: -inf's, which no score has.
_NEVER, _LEAST = -(1 << 31), -0x7F800000
_INFINITY = 0x7F800000
# How far below the best score the first count looks, and the most that this grows to.
_STRIDE, _LONGEST = 1 << 22, 1 << 28
# Tiles of 64 lines of 64 slots: as many as registers hold, at most a row's.
_KEPT, _MOST = 4, 8
# Longer lists are found quicker by all processors.
_LONGEST_LIST = 512
# Slots of a line, and of a tile: of one array of `hopper_warps`.
_SHAPE = hopper_warps.SHAPE
_LINE, _TILE = _SHAPE[1], _SHAPE[0] * _SHAPE[1]


def tiled_shape(slots: int) -> tuple[int, int, int]:
    """The shape [T,64,64] of a row's scores: lines of slots in order, in whole tiles."""
    return pl.cdiv(slots, _TILE), *_SHAPE


def load(ref: Any) -> Array:
    """A tile from global memory, strided over the threads."""
    return plgpu.load(ref, layout=hopper_warps.LAYOUT)


def unsupported(slots: int, size: int) -> str | None:
    """Why another form must choose `size` of `slots` scores; None where this one can."""
    most = _MOST * _TILE
    if slots > most:
        return f"rows of {slots} scores, at most {most}"
    if size > _LONGEST_LIST:
        return f"lists of {size}, at most {_LONGEST_LIST}"
    return None


def choose(
    scores: Float[Array, "B X A T M M"],
    bounds: Sequence[Int[Array, " B"]],
    slots: int,
    size: int,
    interpret: Any,
    of: tuple[int, int] = (1, 1),
    least: float = -math.inf,
) -> Int[Array, "B L C"]:
    """The lists of rows of scores, each the sum of A: one launch, a block of threads a list.

    Args:
      bounds: of each row of the batch the first slot, the one after the last, and k.
      slots: of a row.
      of: (n, m): of every m neighbours of X the first n have a list. All have one unless given.
      least: no score but -inf is below it. The search then begins there.
    """
    batch, lists = scores.shape[0], scores.shape[1] // of[1] * of[0]
    kernel = plgpu.kernel(
        functools.partial(
            _choose_kernel,
            **dict(slots=slots, size=size, of=of, least=least, interpreted=interpret is not None),
        ),
        out_type=jax.ShapeDtypeStruct((batch, lists, size), jnp.int32),
        scratch_types=hopper_warps.scratch(scores.shape[3]),
        grid=(batch, lists),
        grid_names=("row", "list"),
        interpret=interpret,
        kernel_name="choose_best",
    )
    return kernel(*bounds, scores)


def bounds_of(refs: Sequence[Any], row: Any, slots: int, size: int) -> tuple[Array, Array, Array]:
    """A row's first slot, the one after the last, and k, which may be given as any numbers."""
    first = jnp.clip(refs[0][row], 0, slots)
    return first, jnp.clip(refs[1][row], first, slots), jnp.clip(refs[2][row], 0, size)


def _choose_kernel(
    *refs,
    slots: int,
    size: int,
    of: tuple[int, int],
    least: float,
    interpreted: bool,
    **scratch,
) -> None:
    *bound_refs, scores_ref, lists_ref = refs
    row, each = lax.axis_index("row"), lax.axis_index("list")
    at = row, lax.div(each, of[0]) * of[1] + lax.rem(each, of[0])
    parts, tiles = scores_ref.shape[2:4]

    def sums(tile: Any) -> Array:
        each_part = [load(scores_ref.at[(*at, part, tile)]) for part in range(parts)]
        return functools.reduce(jnp.add, each_part)

    bounds = bounds_of(bound_refs, row, slots, size)
    its = Row(tiles, sums, bounds, least=least)
    best(its, lists_ref.at[row, each], scratch, interpreted)


def _within(x: Array, first: Any, last: Any) -> Array:
    """Whether first <= x < last, for integers with first <= last."""
    # As one comparison: what is below `first` becomes large.
    return (x - first).astype(jnp.uint32) < (last - first).astype(jnp.uint32)


class Row(NamedTuple):
    """A row of scores, and which of them are to be listed.

    Attributes:
      tiles: of the scores.
      scores: gives tile i of them, float32 [64,64], as `load` does.
      bounds: the first slot, the one after the last, and k.
      gap: where it begins and ends. Its slots are none, and the later ones are listed without them.
      least: as `choose` has it.
    """

    tiles: int
    scores: Callable[[Any], Array]
    bounds: tuple[Array, Array, Array]
    gap: tuple[Any, Any] | None = None
    least: float = -math.inf


def best(row: Row, list_ref: Any, scratch: dict, interpreted: bool) -> None:
    """Write the k best slots of the row to `list_ref` [C]: ascending, then -1.

    Args:
      list_ref: in global memory; k is at most C.
      scratch: `hopper_warps.scratch` of the tiles.
    """
    tiles, scores, (first, last, k), gap, least = row
    every = range(tiles)

    def keys(i: Any) -> Array:
        slot = _slots(i)
        inside = _within(slot, first, last)
        if gap is not None:
            inside = inside & ((slot < gap[0]) | (slot >= gap[1]))
        key = hopper_warps.ordered(scores(i))
        # Neither NaN nor -inf.
        inside = inside & _within(key, jnp.int32(_LEAST + 1), jnp.int32(_INFINITY + 1))
        return jnp.where(inside, key, jnp.int32(_NEVER))

    kept = [keys(i) for i in every] if tiles <= _KEPT else None

    def over_tiles(of: Callable[[Any, Array], Array], add: Callable, start: int) -> Array:
        """Of every tile an array, added up: then one reduction over the block serves all."""
        if kept is not None:
            return functools.reduce(add, [of(i, kept[i]) for i in every])
        none = hopper.full(_SHAPE, start, jnp.int32, hopper_warps.LAYOUT)
        return lax.fori_loop(0, tiles, lambda i, x: add(x, of(i, keys(i))), none)

    def over_block(x: Array, op: str) -> Array:
        return hopper_warps.over_block(x, scratch["across"], op, interpreted)

    def count(of: Callable[[Any, Array], Array]) -> Array:
        return over_block(
            over_tiles(lambda i, key: of(i, key).astype(jnp.int32), jnp.add, 0), "add"
        )

    def reach(border: Array) -> Array:
        if kept is None:
            return count(lambda _, key: key >= border)
        return hopper_warps.at_least(kept, border, scratch["across"], interpreted)

    def tied_before(border: Array, stop: Array) -> Array:
        return count(lambda i, key: (key == border) & (_slots(i) < stop))

    top = over_block(over_tiles(lambda _, key: key, jnp.maximum, _NEVER), "max")
    total = reach(jnp.int32(_LEAST))
    k = jnp.clip(k, 0, total)
    size = int(np.float32(abs(least)).view(np.int32))
    border, strict, above = border_of(reach, k, total, (-size if least < 0 else size, top))
    stop = _cut(functools.partial(tied_before, border), k - above, tiles * _TILE)

    bits = []
    for i in every:
        its_keys = keys(i) if kept is None else kept[i]
        limits = strict, border, stop - i * _TILE
        bits.append(hopper_warps.chosen(its_keys, *limits, interpreted))
    after = None if gap is None else (gap[1], gap[1] - gap[0])
    hopper_warps.write_list(bits, list_ref, scratch["runs"], after, interpreted)


def _slots(i: Any) -> Array:
    """The slots of tile i."""
    line, column = (
        plgpu.broadcasted_iota(jnp.int32, _SHAPE, axis, layout=hopper_warps.LAYOUT)
        for axis in (0, 1)
    )
    return line * _LINE + column + i * _TILE


def border_of(
    reach: Callable[[Array], Array], k: Array, total: Array, ends: tuple[int, Array]
) -> tuple[Array, Array, Array]:
    """The border, the least key that is always chosen, and how many keys reach it.

    Args:
      reach: counts the keys that are at least so large.
      k: at most `total`, the number of keys but _NEVER.
      ends: a key that all but _NEVER reach, and the largest one.
    """
    least, top = ends

    def going(state: tuple[Array, ...]) -> Array:
        low, high, reach_low, _, _ = state
        return (reach_low != k) & (high > low + 1)

    def step(state: tuple[Array, ...]) -> tuple[Array, ...]:
        low, high, reach_low, reach_high, stride = state
        # The mean without overflow, rounded down.
        middle = (low & high) + ((low ^ high) >> 1)
        border = high - jnp.minimum(high - middle, stride)
        found = reach(border)
        enough = found >= k
        return (
            jnp.where(enough, border, low),
            jnp.where(enough, high, border),
            jnp.where(enough, found, reach_low),
            jnp.where(enough, reach_high, found),
            jnp.minimum(stride * 4, _LONGEST),
        )

    none = k == 0
    above_all = top + 1
    low, high, reach_low, reach_high, _ = lax.while_loop(
        going,
        step,
        (
            jnp.where(none, above_all, jnp.int32(least)),
            above_all,
            jnp.where(none, 0, total),
            jnp.int32(0),
            jnp.int32(_STRIDE),
        ),
    )
    exact = reach_low == k
    return low, jnp.where(exact, low, high), jnp.where(exact, k, reach_high)


def _cut(before: Callable[[Array], Array], quota: Array, slots: int) -> Array:
    """A slot with exactly `quota` ties before it; there are more ties."""

    def step(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        low, high, _ = state
        middle = (low + high) >> 1
        found = before(middle)
        fits = found <= quota
        return jnp.where(fits, middle, low), jnp.where(fits, high, middle), found

    start = jnp.int32(0), jnp.int32(slots), jnp.int32(0)
    # The last middle is `low` where it fits, as one with exactly `quota` before it does.
    return lax.while_loop(lambda state: state[2] != quota, step, start)[0]
