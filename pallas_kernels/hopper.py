"""What the Mosaic GPU kernels share: which devices and arrays they take, and their work's split.

The kernels are written for NVIDIA's Hopper (compute capability 9.0): asynchronous bulk copies into
shared memory (TMA) and matrix products by warpgroups (wgmma). 16-bit operands, float32 results.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Float, Shaped

CAPABILITY = "9.0"
HEAD_DIMS = (64, 128)
DTYPES = (jnp.bfloat16, jnp.float16)
# Rows of one wgmma: a smaller product takes as long.
ROWS = 64
# Rows of a tile of shared memory under the 128-byte swizzle: copies take whole tiles.
TILE_ROWS = 8
LOG2_E = math.log2(math.e)
# Their stubs leave methods abstract, so that a type checker would not let them be made.
_TRANSFORMS: tuple[Any, Any] = plgpu.TilingTransform, plgpu.SwizzleTransform
# Streaming multiprocessors of an H100 or H200 (SXM), for programs lowered where there is no GPU.
_PROCESSORS = 132


def unsupported(q: Array) -> str | None:
    """Why no Hopper kernel takes these queries on this device, or None."""
    reason = unsupported_device()
    if reason is not None:
        return reason
    if q.dtype not in DTYPES:
        return f"wgmma takes bfloat16 and float16, not {q.dtype}"
    if q.shape[3] not in HEAD_DIMS:
        return f"head dim {q.shape[3]} is not one of {HEAD_DIMS}"
    return None


def unsupported_device() -> str | None:
    """Why no Hopper kernel runs on this device, or None."""
    capability = getattr(_device(), "compute_capability", CAPABILITY)
    if capability != CAPABILITY:
        return f"compute capability {capability}, the kernel is for {CAPABILITY} (Hopper)"
    return None


def processors() -> int:
    """Streaming multiprocessors of the GPU, or of an H100 where the program is for another host."""
    return getattr(_device(), "core_count", None) or _PROCESSORS


def _device() -> Any:
    return next((d for d in jax.devices() if d.platform == "gpu"), None)


def tiled(*shape: int, dtype: Any) -> Any:
    """A buffer in shared memory as TMA writes it and wgmma reads it: 128-byte swizzled tiles."""
    tile = TILE_ROWS, 128 // jnp.dtype(dtype).itemsize
    transforms = _TRANSFORMS[0](tile), _TRANSFORMS[1](128)
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def product(x: Any, y: Any) -> Float[Array, "M N"]:
    """x @ y of two matrices in shared memory, in float32."""

    def multiply(acc_ref):
        plgpu.wgmma(acc_ref, x, y)
        return acc_ref[...]

    acc = plgpu.WGMMAAccumulatorRef((x.shape[0], y.shape[1]), jnp.float32)
    return pl.run_scoped(multiply, acc)


def add_product(acc: Array, x: Array, y: Any) -> Array:
    """acc + x @ y, with x in registers and y in shared memory."""

    def multiply(acc_ref):
        plgpu.wgmma(acc_ref, x, y)

    start: Any = plgpu.WGMMAAccumulatorRef.init(acc)
    return pl.run_state(multiply)(start)


def pack_rows(q: Float[Array, "B T N H"], kv_heads: int) -> Float[Array, "B K R H"]:
    """The queries of every kv head as rows t * G + g; with one query this moves nothing."""
    b, t, n, h = q.shape
    q_BTKGH = q.reshape(b, t, kv_heads, n // kv_heads, h)
    return jnp.swapaxes(q_BTKGH, 1, 2).reshape(b, kv_heads, t * n // kv_heads, h)


def unpack_rows(x: Shaped[Array, "B K R *H"], queries: int) -> Shaped[Array, "B T N *H"]:
    """Undo `pack_rows`, for outputs [B,K,R,H] and for log-sum-exps [B,K,R]."""
    b, k, r, *rest = x.shape
    x_BTKG = jnp.swapaxes(x.reshape(b, k, queries, r // queries, *rest), 1, 2)
    return x_BTKG.reshape(b, queries, k * r // queries, *rest)


def full(
    shape: tuple[int, ...],
    value: float,
    dtype: Any = jnp.float32,
    layout: Any = plgpu.Layout.WGMMA,
) -> Array:
    """A constant in registers, laid out as a wgmma's result or, of one axis, as its reduction."""
    return plgpu.layout_cast(jnp.full(shape, value, dtype), layout)


def drain(free: Any, steps: Array, stages: int) -> None:
    """Wait until the last of `steps` copies into a ring of `stages` have been used."""

    @pl.loop(jnp.maximum(steps - stages, 0), steps)
    def _step(step):
        plgpu.barrier_wait(free.at[lax.rem(step, stages)])


def registers(warpgroups: int) -> tuple[int, int]:
    """Registers of a thread of each of `warpgroups` that compute, and of the one that copies.

    Together they may take the 65,536 of a multiprocessor; a wrong sum waits for ever.
    """
    return {1: (232, 40), 2: (232, 40), 3: (160, 32)}[warpgroups]
