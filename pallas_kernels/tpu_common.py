"""What the Mosaic TPU kernels share: key blocks, cache layouts, matmuls, the running softmax.

A TPU array is tiled over its two minor axes, and the last one fills vectors of 128 lanes. A cache
[B,K,S,H] with H a multiple of 128 lies row-major, and a block of keys is [Z,H]. With a smaller H
the lanes would be padded, so XLA stores such a cache with the slots minor; another layout would
copy the cache. Kernels then take it as [B,K,H,S], which is the same bytes, in blocks of [H,Z].

Of a `Plane` a kernel takes all layers' rows, and the row at which the layer's begin as a prefetched
scalar: no slice is made.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Float

from pallas_kernels.common import MASKED
from pallas_kernels.plane import rows_of

LANES = 128
# Rows of a tile by the size of a number: packed numbers share a vector's rows.
SUBLANES = {4: 8, 2: 16}
HEAD_DIMS = (64, 128, 256)
# A kernel has 16 MiB of vector memory by default (v5e, v5p and v6e). It plans with these; the rest
# is for what the compiler cannot hold in registers.
VMEM_BYTES = 10 * 2**20
# Scalars that a kernel may prefetch: half of the 1 MiB of scalar memory.
SCALARS = 2**17


def unsupported_keys(q: Array) -> str | None:
    """Why blocks of keys of this dtype and head dim do not fit the matrix unit, or None."""
    if q.shape[-1] not in HEAD_DIMS:
        return f"head dim {q.shape[-1]} is not one of {HEAD_DIMS}"
    if q.dtype not in (jnp.bfloat16, jnp.float32):
        return f"the matrix unit takes bfloat16 and float32, not {q.dtype}"
    return None


def slots_minor(head_dim: int) -> bool:
    """Whether XLA lays a cache of this head dim out with its slots minor."""
    return head_dim < LANES


def as_stored(x: Any) -> Array:
    """The cache with its axes as they lie in memory: [B,K,S,H], or [B,K,H,S] for narrow heads.

    Of a `Plane` those are the rows of all layers (see `first_row`).
    """
    rows, _ = rows_of(x)
    return jnp.swapaxes(rows, 2, 3) if slots_minor(x.shape[3]) else rows


def first_row(x: Any) -> Array:
    """The first row of the cache in `as_stored`, [1]."""
    return jnp.int32(rows_of(x)[1])[None]


def key_spec(head_dim: int, block: int, index: Callable[..., tuple]) -> pl.BlockSpec:
    """Blocks of `block` slots of an `as_stored` cache, for a `call` that is told its `first_row`.

    Args:
      index: a function of the grid's indices and the prefetched scalars giving (row, kv head,
        block of slots).
    """
    minor = slots_minor(head_dim)

    def place(*at):
        *given, first = at
        b, k, j = index(*given)
        return (first[0] + b, k, 0, j) if minor else (first[0] + b, k, j, 0)

    return pl.BlockSpec((1, 1, head_dim, block) if minor else (1, 1, block, head_dim), place)


def scale_spec(kv_heads: int, block: int, index: Callable[..., tuple]) -> pl.BlockSpec:
    """`key_spec` for the scales [B, K, S] of keys in 8 bits, of all kv heads."""

    def place(*at):
        *given, first = at
        b, _, j = index(*given)
        return first[0] + b, 0, j

    return pl.BlockSpec((1, kv_heads, block), place)


def key_block(slots: int, most: int) -> int:
    """A multiple of the lanes, at most about `most`, that cuts `slots` into even blocks.

    The last block may reach beyond the cache. Nothing is read there; the kernel finds garbage,
    which lies beyond every length.
    """
    most = max(LANES, most // LANES * LANES)
    blocks = -(-slots // most)
    return -(-slots // (blocks * LANES)) * LANES


def call(
    kernel: Callable[..., None],
    scalars: Sequence[Array],
    inputs: Sequence[tuple[Array, pl.BlockSpec]],
    outputs: Sequence[tuple[jax.ShapeDtypeStruct, pl.BlockSpec]],
    scratch: Sequence[Any],
    *,
    grid: tuple[Sequence[int], Sequence[int]],
    cost: tuple[int, int, int],
    interpret: pltpu.InterpretParams | bool,
    name: str,
    **params: Any,
) -> Sequence[Array]:
    """Run kernel(scalars, inputs, outputs, scratch), of references.

    Args:
      scalars: integers that are prefetched; the caches' `first_row` last, where there is a
        `key_spec`.
      grid: the axes that may be split over a chip's cores, then those whose steps run in order.
      cost: operations, transcendentals and bytes, for the compiler's schedule.
    """
    ends = list(itertools.accumulate(map(len, (scalars, inputs, outputs)), initial=0))

    def body(*refs: Any) -> None:
        kernel(*(refs[i:j] for i, j in itertools.zip_longest(ends, ends[1:])))

    arrays, in_specs = zip(*inputs, strict=True)
    out_shape, out_specs = zip(*outputs, strict=True)
    return pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(*grid[0], *grid[1]),
            in_specs=in_specs,
            out_specs=out_specs,
            scratch_shapes=scratch,
        ),
        out_shape=out_shape,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",) * len(grid[0]) + ("arbitrary",) * len(grid[1]),
            **params,
        ),
        cost_estimate=pl.CostEstimate(
            flops=cost[0], transcendentals=cost[1], bytes_accessed=cost[2]
        ),
        interpret=interpret,
        name=name,
    )(*(x.astype(jnp.int32) for x in scalars), *arrays)


def matmul(x: Array, y: Array, contract: tuple[int, int]) -> Array:
    """x and y contracted over one axis each, in float32; float32 inputs are not rounded."""
    exact = x.dtype == jnp.float32
    return lax.dot_general(
        x,
        y,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=lax.Precision.HIGHEST if exact else lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )


class Softmax(NamedTuple):
    """References to a softmax that runs over blocks of keys, in vector memory, of R rows."""

    top: Any  # [R, 1] the largest score or MASKED
    total: Any  # [R, 1] the sum of exp(score - top)
    acc: Any  # [R, H] the values weighted by the same

    @staticmethod
    def scratch(rows: int, head_dim: int) -> list[Any]:
        column = pltpu.VMEM((rows, 1), jnp.float32)
        return [column, column, pltpu.VMEM((rows, head_dim), jnp.float32)]

    def clear(self) -> None:
        self.top[...] = jnp.full_like(self.top, MASKED)
        self.total[...] = jnp.zeros_like(self.total)
        self.acc[...] = jnp.zeros_like(self.acc)

    def add(
        self,
        scores: Float[Array, "R Z"],
        seen: Array | None,
        values: Array,
        *,
        minor: bool,
        scales: Float[Array, "1 Z"] | None = None,
    ) -> None:
        """Add a block: its scores, which of them count (None: all), and its values.

        Args:
          seen: broadcasts to the scores.
          values: [Z,H], or [H,Z] if `minor`; finite, also where nothing is seen.
          scales: the factors of the values; finite too.
        """
        if seen is not None:
            scores = jnp.where(seen, scores, MASKED)
        old = self.top[...]
        new = jnp.maximum(old, jnp.max(scores, axis=1, keepdims=True))
        weights = jnp.exp(scores - new)
        if seen is not None:  # where none is, MASKED - MASKED is 0
            weights = jnp.where(seen, weights, 0)
        shrink = jnp.exp(old - new)
        self.total[...] = shrink * self.total[...] + jnp.sum(weights, axis=1, keepdims=True)
        if scales is not None:
            weights = weights * scales
        weighted = matmul(weights.astype(values.dtype), values, (1, 1 if minor else 0))
        self.acc[...] = shrink * self.acc[...] + weighted
        self.top[...] = new

    def write(self, out: Any, lse: Any) -> None:
        """Out [R,H] and log-sum-exp [R,1]; 0 and -inf for rows that saw nothing."""
        some = self.total[...] > 0
        total = jnp.where(some, self.total[...], 1)
        out[...] = (self.acc[...] / total).astype(out.dtype)
        lse[...] = jnp.where(some, self.top[...] + jnp.log(total), -jnp.inf)
