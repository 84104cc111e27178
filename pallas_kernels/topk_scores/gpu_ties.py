"""The best of short rows of scores, ties included, on Hopper: one launch, a block of threads a row.

The scores lie in the block's registers. Each of `count` passes takes one entry. Of the largest
score m that is left it finds the best score T that is at most the tolerance above m. Of the entries
left that are at most the tolerance below T it takes the first. That is the order of
`merge.tied_top_k`: an entry that has been taken keeps its score as a rank for others. A pass takes
four reductions over the block. XLA's form has five launches, two of them sorts.

Roofline: the latency of 4 `count` reductions. Not measured yet.
"""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Float, Int

from pallas_kernels import hopper

# Scores of one load of a thread and of a block of threads, and of a row at most: what registers
# hold.
_VECTOR = 4
_LINE, _MOST = 128 * _VECTOR, 8192
# More rows are several blocks of threads a processor, and more entries many passes.
_ROWS, _COUNT = 264, 32
_LAST = np.int32(2**31 - 1)


def takes(rows: int, scores: int, count: int) -> bool:
    """Whether the kernel is for so many rows of so many scores."""
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
        functools.partial(_kernel, count=count),
        out_type=hopper.outputs((rows, count), jnp.float32, jnp.int32),
        grid=(rows,),
        grid_names=("row",),
        interpret=interpret,
        kernel_name="tied_best",
    )
    found = kernel(tolerance.astype(jnp.float32), scores)
    return found[0], found[1]


def _kernel(tolerance_ref, scores_ref, values_ref, places_ref, *, count: int) -> None:
    row, size = lax.axis_index("row"), scores_ref.shape[1]
    layout = plgpu.Layout.WG_STRIDED((size,), vec_size=_VECTOR)
    scores = plgpu.load(scores_ref.at[row], layout=layout)
    place = plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=layout)
    tolerance = tolerance_ref[row]
    above = scores + tolerance

    def take(i: Array, left: Array) -> Array:
        limit = jnp.max(left) + tolerance
        best = jnp.max(jnp.where(scores <= limit, scores, -jnp.inf))
        tied = (left > -jnp.inf) & (above >= best)
        # The first, by a maximum; -1 where none is left.
        last = jnp.max(jnp.where(tied, _LAST - place, jnp.int32(-1)))
        first = jnp.where(last >= 0, _LAST - last, jnp.int32(-1))
        taken = place == first
        values_ref[row, i] = jnp.max(jnp.where(taken, scores, -jnp.inf))
        places_ref[row, i] = first
        return jnp.where(taken, -jnp.inf, left)

    lax.fori_loop(0, count, take, scores)
