"""Parts of an attention merged by their log-sum-exp on Hopper: one launch.

A block of threads takes the query rows of one line of 128 numbers: one row, or two of head dim 64.
It reads their means and log-sum-exps of all parts, which are few and lie in the L2 cache, and keeps
their weights in registers. XLA makes one kernel of three parts and two of more, the second of which
waits for the first.

Roofline: the latency of reading the parts. Not measured.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Float

# Threads of a block, each with one channel of one row or two, and the most parts that registers
# hold. So many parts XLA merges in one kernel of its own.
THREADS, MOST, FUSED = 128, 40, 3
LAYOUT = plgpu.Layout.WG_STRIDED((THREADS,), vec_size=1)


def weighed(means: Sequence[Array], lses: Sequence[Array]) -> tuple[Array, Array]:
    """Of every thread's channel the merged mean and its log-sum-exp; 0 and -inf without any.

    A part that is absent has log-sum-exp -inf and a finite mean.
    """
    top = functools.reduce(jnp.maximum, lses)
    some = top > -jnp.inf
    top = jnp.where(some, top, 0.0)
    weights = [jnp.exp(x - top) for x in lses]
    total = jnp.where(some, functools.reduce(jnp.add, weights), 1.0)
    weighted = [mean * weight for mean, weight in zip(means, weights, strict=True)]
    merged = functools.reduce(jnp.add, weighted) / total
    return merged, jnp.where(some, top + jnp.log(total), -jnp.inf)


def takes(parts: int, rows: int, head_dim: int) -> bool:
    """Whether `merged` is for so many parts of so many rows, where it saves a launch."""
    return FUSED < parts <= MOST and not rows * head_dim % THREADS


def merged(
    out: Float[Array, "X P M H"],
    lse: Float[Array, "X P L"],
    rows: int,
    dtype: Any,
    beside: tuple[Float[Array, "X R H"], Float[Array, "X R"]] | None = None,
    interpret: Any = None,
) -> tuple[Float[Array, "X R H"], Float[Array, "X R"]]:
    """Of every list the parts of its first `rows` rows, and what lies `beside` them, as one.

    Args:
      out: M H is a multiple of 128, and R H of R = `rows`.
      dtype: of the merged mean.
    """
    lists, parts, _, head_dim = out.shape
    groups = rows * head_dim // THREADS
    given = [out.reshape(lists, parts, -1, THREADS), lse]
    if beside is not None:
        given += [beside[0].reshape(lists, groups, THREADS), beside[1]]
    kernel = plgpu.kernel(
        functools.partial(_kernel, head_dim=head_dim),
        out_type=(
            jax.ShapeDtypeStruct((lists, groups, THREADS), dtype),
            jax.ShapeDtypeStruct((lists, rows), jnp.float32),
        ),
        grid=(lists, groups),
        grid_names=("list", "group"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name="merge_parts",
    )
    mean, total = kernel(*given)
    return mean.reshape(lists, rows, head_dim), total


def _kernel(out_ref, lse_ref, *refs, head_dim: int) -> None:
    *beside_refs, merged_ref, total_ref = refs
    each, group = lax.axis_index("list"), lax.axis_index("group")
    together = THREADS // head_dim
    thread = plgpu.broadcasted_iota(jnp.int32, (THREADS,), 0, layout=LAYOUT)
    mine = [lax.div(thread, head_dim) == i for i in range(together)]

    def of_rows(ref: Any, *at: Any) -> Array:
        """Every thread's row's number."""
        found = jnp.broadcast_to(ref[*at, group * together], (THREADS,))
        for row in range(1, together):
            other = jnp.broadcast_to(ref[*at, group * together + row], (THREADS,))
            found = jnp.where(mine[row], other, found)
        return found

    parts = range(out_ref.shape[1])
    means = [plgpu.load(out_ref.at[each, i, group], layout=LAYOUT) for i in parts]
    lses = [of_rows(lse_ref, each, i) for i in parts]
    if beside_refs:
        mean = plgpu.load(beside_refs[0].at[each, group], layout=LAYOUT)
        means.append(mean.astype(jnp.float32))
        lses.append(of_rows(beside_refs[1], each))
    mean, lse = weighed(means, lses)
    merged_ref[each, group] = mean.astype(merged_ref.dtype)
    for row in range(together):
        total_ref[each, group * together + row] = jnp.where(mine[row], lse, -jnp.inf).max()
