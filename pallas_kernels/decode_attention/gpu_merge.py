"""The pieces of every head's attention as one, on Hopper: the second launch of a decode step.

A block of threads takes one query row of a head and reads its pieces' log-sum-exps and means, which
are few and lie in the L2 cache; their weights never leave registers. XLA's form of the same is four
launches: 9 us for 8 heads of 4 queries on an H200.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Float, Int

# Threads of a block, each with one channel of a row.
_THREADS = 128
# Pieces that are read at once, all in registers.
_MOST = 40
_LAYOUT = plgpu.Layout.WG_STRIDED((_THREADS,), vec_size=1)


def unsupported(head_dim: int, parts: int) -> str | None:
    """Why this kernel cannot merge so many pieces of so many channels, or None."""
    if head_dim != _THREADS:
        return f"{head_dim} channels are not {_THREADS}, one a thread"
    if parts > _MOST:
        return f"{parts} pieces, at most {_MOST} find place in registers"
    return None


def merge_pieces(
    out: Float[Array, "P R8 H"],
    lse: Float[Array, "P M"],
    plan: Int[Array, "Q L"],
    pieces: Callable[[Any, Array, int], tuple[Array, Array]],
    shape: tuple[int, int, int],
    dtype: Any,
    interpret: Any = None,
) -> tuple[Float[Array, "X R H"], Float[Array, "X R"]]:
    """The mean in `dtype` and the natural log-sum-exp; 0 and -inf where there is no piece.

    Args:
      pieces: of (plan, head, i), all scalars or read so: the head's i-th piece, and whether it is
        one. Others may hold anything.
      shape: X heads, the R rows that count, the most pieces of a head.
    """
    heads, rows, parts = shape
    kernel = plgpu.kernel(
        functools.partial(_kernel, pieces=pieces, parts=parts),
        out_type=(
            jax.ShapeDtypeStruct((heads, rows, out.shape[2]), dtype),
            jax.ShapeDtypeStruct((heads, rows), jnp.float32),
        ),
        grid=(heads, rows),
        grid_names=("head", "row"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    return kernel(plan, out, lse)


def _kernel(plan_ref, out_ref, lse_ref, merged_ref, total_ref, *, pieces, parts: int) -> None:
    head, row = lax.axis_index("head"), lax.axis_index("row")
    last = out_ref.shape[0] - 1
    means, lses = [], []
    for i in range(parts):
        piece, there = pieces(plan_ref, head, i)
        at = jnp.minimum(piece, last)
        there = jnp.broadcast_to(there, (_THREADS,))
        mean = plgpu.load(out_ref.at[at, row], layout=_LAYOUT)
        means.append(jnp.where(there, mean, 0.0))
        its_lse = jnp.broadcast_to(lse_ref[at, row], (_THREADS,))
        lses.append(jnp.where(there, its_lse, -jnp.inf))
    top = functools.reduce(jnp.maximum, lses)
    some = top > -jnp.inf
    top = jnp.where(some, top, 0.0)
    weights = [jnp.exp(x - top) for x in lses]
    total = jnp.where(some, functools.reduce(jnp.add, weights), 1.0)
    weighted = [mean * weight for mean, weight in zip(means, weights, strict=True)]
    merged = functools.reduce(jnp.add, weighted) / total
    merged_ref[head, row] = merged.astype(merged_ref.dtype)
    total_ref[head, row] = jnp.where(some, top + jnp.log(total), -jnp.inf).max()
