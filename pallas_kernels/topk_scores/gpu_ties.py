"""The best of short rows of scores, ties included, on Hopper: one launch, a block of threads a row.

The scores lie in the block's registers. Each of `count` passes takes one entry. Of the largest
score m that is left it finds the best score T that is at most the tolerance above m: m itself, or
that of an entry that has been taken. Of the entries left that are at most the tolerance below T it
takes the first. That is the order of `merge.tied_top_k`: an entry that has been taken keeps its
score as a rank for others. A pass takes four reductions over the block. XLA's form has five
launches, two of them sorts.

`ranked_lists` does the same with lists of a row's best that several blocks of threads have found.
Of entries that tie it takes the lowest slot. XLA's form has three launches.

Roofline: the latency of 4 `count` reductions. On an H200 a step of InfLLM over 131,072 tokens, 8B
shape, takes 5.69 ms, with XLA's form 9.04. Rejected: to add up the heads' scores in the same
launch, for 5.69 ms in place of 5.75.
"""

import functools
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Float, Int

from pallas_kernels import hopper, hopper_warps

# Scores of one load of a thread and of a block of threads, and of a row at most: what registers
# hold. 131,072 tokens and an answer are more than 16,384 pages of 8.
_VECTOR, _THREADS = 4, 128
_LINE, _MOST = _THREADS * _VECTOR, 17408
# More rows are several blocks of threads a processor, and more entries many passes.
_ROWS, _COUNT = 264, 32
_LAST = np.int32(2**31 - 1)


def takes(rows: int, scores: int, count: int) -> bool:
    """Whether the kernel takes `rows` rows of `scores` scores."""
    return rows <= _ROWS and scores <= _MOST and 0 < count <= _COUNT


def tied_best(
    scores: Float[Array, "R S"], count: int, tolerance: Float[Array, " R"], interpret: Any = None
) -> tuple[Float[Array, "R C"], Int[Array, "R C"]]:
    """The first `count` entries in the order of `merge.tied_top_k`: their scores and places.

    -inf and -1 where fewer scores are above -inf.
    """
    rows, entries = scores.shape
    spare = (0, 0), (0, -entries % _LINE)
    scores = jnp.pad(scores.astype(jnp.float32), spare, constant_values=-jnp.inf)
    kernel = plgpu.kernel(
        functools.partial(_kernel, interpreted=interpret is not None),
        out_type=hopper.outputs((rows, count), jnp.float32, jnp.int32),
        scratch_types=hopper_warps.across(),
        grid=(rows,),
        grid_names=("row",),
        interpret=interpret,
        kernel_name="tied_best",
    )
    found = kernel(tolerance.astype(jnp.float32), scores)
    return found[0], found[1]


def room(entries: int, rows: int) -> int:
    """E of `ranked_lists` for `entries` entries in each of `rows` rows."""
    whole = _THREADS // math.gcd(_THREADS, rows)
    return entries + -entries % whole


def ranked_lists(
    values: Float[Array, "X E M"],
    slots: Int[Array, "X E M"],
    entries: int,
    count: int,
    tolerance: Float[Array, "X R"],
    interpret: Any = None,
) -> tuple[Float[Array, "X R C"], Int[Array, "X R C"]]:
    """The first `count` listed slots by the best score that each ties with, then by slot.

    -inf and -1 where fewer are listed.

    Args:
      values, slots: of M rows; the first R are ranked. E is `room(entries, M)`. A slot is
        listed once. An entry of -inf is none, and those from `entries` on may hold anything.
    """
    together = values.shape[2]
    values, slots = (x.reshape(len(x), -1) for x in (values, slots))
    kernel = plgpu.kernel(
        functools.partial(
            _lists_kernel,
            **dict(entries=entries, together=together, interpreted=interpret is not None),
        ),
        out_type=hopper.outputs((*tolerance.shape, count), jnp.float32, jnp.int32),
        scratch_types=hopper_warps.across(),
        grid=tolerance.shape,
        grid_names=("head", "row"),
        interpret=interpret,
        kernel_name="ranked_lists",
    )
    found = kernel(tolerance.astype(jnp.float32), values, slots)
    return found[0], found[1]


def _kernel(tolerance_ref, scores_ref, *out_refs, across: Any, interpreted: bool) -> None:
    row, size = lax.axis_index("row"), scores_ref.shape[1]
    layout = plgpu.Layout.WG_STRIDED((size,), vec_size=_VECTOR)
    scores = plgpu.load(scores_ref.at[row], layout=layout)
    place = plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=layout)
    refs = [ref.at[row] for ref in out_refs]
    how: Any = dict(across=across, interpreted=interpreted, layout=layout)
    _take(scores, place, tolerance_ref[row], refs, **how)


def _lists_kernel(*refs, entries: int, together: int, across: Any, interpreted: bool) -> None:
    tolerance_ref, values_ref, slots_ref, *out_refs = refs
    head, row = lax.axis_index("head"), lax.axis_index("row")
    size = values_ref.shape[1]
    layout = plgpu.Layout.WG_STRIDED((size,), vec_size=1)
    values, slots = (plgpu.load(ref.at[head], layout=layout) for ref in (values_ref, slots_ref))
    place = plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=layout)
    # Every block of threads reads the entries of all rows, which lie side by side.
    mine = (lax.rem(place, together) == row) & (place < entries * together)
    values, tolerance = jnp.where(mine, values, -jnp.inf), tolerance_ref[head, row]
    refs = [ref.at[head, row] for ref in out_refs]
    how: Any = dict(across=across, interpreted=interpreted, layout=layout)
    _take(values, slots, tolerance, refs, **how)


def _take(
    scores: Array,
    numbers: Array,
    tolerance: Array,
    out_refs: list[Any],
    *,
    across: Any,
    interpreted: bool,
    layout: Any,
) -> None:
    """Fill `out_refs` with scores and numbers, best first, the lowest number first in a tie."""
    values_ref, numbers_ref = out_refs
    few = hopper_warps.PACKED
    pass_of = plgpu.broadcasted_iota(jnp.int32, (_THREADS,), 0, layout=few)
    largest = functools.partial(hopper_warps.largest, across=across, interpreted=interpreted)

    def take(i: Array, carried: tuple[Array, Array]) -> tuple[Array, Array]:
        # One array for the scores, and none for masks, must fit the registers of long rows.
        left, gone = carried
        most = largest(left, layout=layout)
        ranks = jnp.where(gone <= most + tolerance, gone, -jnp.inf)
        best = largest(jnp.maximum(ranks, most), layout=few)
        # The first, by a maximum; -1 where none is left.
        tied = (left > -jnp.inf) & (left + tolerance >= best)
        behind = jnp.where(tied, _LAST - numbers, jnp.int32(-1))
        last = hopper_warps.over_block(behind, across, "max", interpreted, layout)
        first = jnp.where(last >= 0, _LAST - last, jnp.int32(-1))
        value = largest(jnp.where(numbers == first, left, -jnp.inf), layout=layout)
        values_ref[i], numbers_ref[i] = value, first
        left = jnp.where(numbers == first, -jnp.inf, left)
        return left, jnp.where(pass_of == i, value, gone)

    none = hopper.full((_THREADS,), -jnp.inf, layout=few)
    lax.fori_loop(0, values_ref.shape[0], take, (scores, none))
