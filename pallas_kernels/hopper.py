"""What the Mosaic GPU kernels share: supported devices and arrays, products, copies, merges.

The kernels are written for NVIDIA's Hopper (compute capability 9.0): asynchronous bulk copies into
shared memory (TMA) and matrix products by warpgroups (wgmma). Operands have 16 bits, results are
float32.
"""

import functools
import logging
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mosaic
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm
from jaxlib.mosaic.python import mosaic_gpu as mosaic_dialect
from jaxtyping import Float

from pallas_kernels.common import MASKED, merge

_logger = logging.getLogger("pallas_kernels")

_dump_options: Any = getattr(mosaic_dialect, "get_or_set_dump_options", None)


def _dump_options_alone(module: Any) -> Any:
    """The options for dumps of a kernel, without their name in the kernel's text.

    The name has a number that counts the process's kernels. With it no kernel would equal another
    one: each would be compiled anew, and no program would be found in the persistent cache unless
    the process had lowered the same ones before it.
    """
    options = _dump_options(module)
    del module.operation.attributes["mosaic_gpu.dump_basename"]
    return options


if _dump_options is not None:
    mosaic_dialect.get_or_set_dump_options = _dump_options_alone

CAPABILITY = "9.0"
HEAD_DIMS = (64, 128)
DTYPES = (jnp.bfloat16, jnp.float16)
# Rows of one wgmma: a smaller product takes as long.
ROWS = 64
# Rows of a tile of shared memory under the 128-byte swizzle: copies take whole tiles.
TILE_ROWS = 8
LOG2_E = math.log2(math.e)
# Typed Any: JAX's stubs leave these classes abstract, and a type checker refuses to construct them.
_TRANSFORMS: tuple[Any, Any] = plgpu.TilingTransform, plgpu.SwizzleTransform
# Streaming multiprocessors of an H100 or H200 (SXM), for programs lowered where there is no GPU.
_PROCESSORS = 132
# GPUs of that capability by name, for programs lowered for a GPU that is not there.
_NAMES = ("H100", "H200", "H800", "H20", "GH200")
# Parts that are merged without a reduction.
_FEW_PARTS = 16


def unsupported(q: Array) -> str | None:
    """Why no Hopper kernel takes these queries on this device, or None."""
    reason = unsupported_numbers(q)
    if reason is None and q.shape[3] not in HEAD_DIMS:
        reason = f"head dim {q.shape[3]} is not one of {HEAD_DIMS}"
    return reason


def unsupported_numbers(x: Array | jax.ShapeDtypeStruct) -> str | None:
    """Why no Hopper kernel multiplies these numbers on this device, or None."""
    reason = unsupported_device()
    if reason is None and x.dtype not in DTYPES:
        reason = f"wgmma takes bfloat16 and float16, not {x.dtype}"
    return reason


def unsupported_device() -> str | None:
    """Why no Hopper kernel runs on the GPU traced for, or None; a warning says it once."""
    kind, capability = _device_kind(), compute_capability()
    if capability == CAPABILITY:
        return None
    _warn_once(kind, capability)
    return f"compute capability {capability}, the kernel is for {CAPABILITY} (Hopper)"


def compute_capability() -> str:
    """The compute capability of the GPU traced for, as "9.0".

    A GPU that is not on this host counts as Hopper by its name, or is "unknown".
    """
    kind, gpu = _device_kind(), _local()
    if gpu is not None and gpu.device_kind == kind:
        return str(gpu.compute_capability)
    return CAPABILITY if set(_NAMES) & set(kind.upper().split()) else "unknown"


def processors() -> int:
    """Streaming multiprocessors of the GPU, or of an H100 where the program is for another host."""
    return getattr(_local(), "core_count", None) or _PROCESSORS


def _local() -> Any:
    return next((d for d in jax.devices() if d.platform == "gpu"), None)


def _device_kind() -> str:
    """The GPU traced for, as JAX names it: the mesh's, else this host's."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return (jax.devices()[0] if device is None else device).device_kind


@functools.cache
def _warn_once(kind: str, capability: str) -> None:
    _logger.warning(
        "attention_mass, attend_with_logits, block_masses, decode_attention, expert_matmul, "
        "row_matmul, select_large_k, select_pages, sparse_decode_attention, "
        "sparse_prefill_attention, topk_scores and voted_slots have "
        "no kernel for %s (compute capability %s), only for %s (Hopper): their XLA forms run, "
        "which are slower",
        *(kind, capability, CAPABILITY),
    )


def _fence(_: Any) -> None:
    """This block's stores before what follows, for all blocks of the cluster.

    Mosaic's arrival at a cluster's barrier orders stores only for its own block, and some threads
    arrive for others. Without the fence a block may read another's old counts, take another number
    of passes, and exit while the rest still signal it, which is a launch failure. Mosaic has no
    public fence for a cluster (as of JAX 0.12.0), and its own way to write PTX begins with 0.11.2.
    """
    nothing = ir.Type.parse("!llvm.void")
    llvm.inline_asm(nothing, [], "fence.acq_rel.cluster;", "", has_side_effects=True)
    mosaic.warpgroup_barrier()


# Orders this block's stores before what follows, for all blocks of the cluster.
fence_cluster: Any = plgpu.inline_mgpu()(_fence)


def tiled(*shape: int, dtype: Any) -> Any:
    """A buffer in shared memory as TMA writes it and wgmma reads it: swizzled tiles.

    Of 128 bytes in width, or of the rows' where these are narrower.
    """
    return plgpu.SMEM(shape, dtype, transforms=transforms(shape[-1], dtype))


def transforms(columns: int, dtype: Any) -> tuple[Any, Any]:
    """The transforms of `tiled` buffers with `columns` columns."""
    itemsize = jnp.dtype(dtype).itemsize
    width = min(128, columns * itemsize)
    return _TRANSFORMS[0]((TILE_ROWS, width // itemsize)), _TRANSFORMS[1](width)


def product(x: Any, y: Any) -> Float[Array, "M N"]:
    """x @ y of two matrices in shared memory, in float32."""

    def multiply(acc_ref):
        plgpu.wgmma(acc_ref, x, y)
        return acc_ref[...]

    acc = plgpu.WGMMAAccumulatorRef((x.shape[0], y.shape[1]), jnp.float32)
    return pl.run_scoped(multiply, acc)


def add_product(acc: Array, x: Any, y: Any, interpreted: bool) -> Array:
    """acc + x @ y, with x in registers or shared memory and y in shared memory."""
    if interpreted:  # JAX's interpreter has wgmma only of shared memory
        return acc + jnp.dot(x[...], y[...], preferred_element_type=jnp.float32)

    def multiply(acc_ref):
        plgpu.wgmma(acc_ref, x, y)

    start: Any = plgpu.WGMMAAccumulatorRef.init(acc)
    return pl.run_state(multiply)(start)


def full(
    shape: tuple[int, ...], value: float, dtype: Any = jnp.float32, layout: Any = plgpu.Layout.WGMMA
) -> Array:
    """A constant in registers, laid out as a wgmma's result, or with one axis as its reduction."""
    return plgpu.layout_cast(jnp.full(shape, value, dtype), layout)


def iota(shape: tuple[int, ...], axis: int) -> Array:
    """The indices along an axis, laid out as a wgmma's result."""
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)


def outputs(shape: tuple[int, ...], *dtypes: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Results of a kernel: one array of this shape for each dtype."""
    return tuple(jax.ShapeDtypeStruct(shape, dtype) for dtype in dtypes)


def copy_ahead(steps: Array, free: Any, stages: int, copy: Callable[[Array, Array], None]) -> None:
    """Call copy(step, slot) for each step once its slot is free; wait until all are used."""

    @pl.loop(0, steps)
    def _step(i):
        slot = lax.rem(i, stages)

        @pl.when(i >= stages)
        def _():
            plgpu.barrier_wait(free.at[slot])

        copy(i, slot)

    drain(free, steps, stages)


def drain(free: Any, steps: Array, stages: int) -> None:
    """Wait until the last of `steps` copies into a ring of `stages` have been used."""

    @pl.loop(jnp.maximum(steps - stages, 0), steps)
    def _step(step):
        plgpu.barrier_wait(free.at[lax.rem(step, stages)])


def registers(warpgroups: int) -> tuple[int, int]:
    """Registers of a thread of each of `warpgroups` that compute, and of the one that copies.

    All threads' registers must fit a multiprocessor's 65,536; otherwise the kernel hangs.
    """
    return {1: (232, 40), 2: (232, 40), 3: (160, 32)}[warpgroups]


def pad_rows(q: Float[Array, "*B R H"]) -> Float[Array, "X R8 H"]:
    """Query rows in whole tiles, leading axes as one."""
    q = q.reshape(-1, *q.shape[-2:])
    return jnp.pad(q, ((0, 0), (0, -q.shape[1] % TILE_ROWS), (0, 0)))


def whole_rows(q: Float[Array, "*B R H"], interpret: Any) -> Float[Array, "X R2 H"]:
    """Query rows, leading axes as one; a kernel copies whole tiles of them.

    A copy of the rows that there are comes out wrong: without a tiling of ours JAX 0.11.2 infers
    tiles of as many rows as are copied, under a swizzle that needs 8. Of less than a tile the rows
    beyond come as zeros; of more Mosaic takes whole tiles alone. And JAX's interpreter knows no
    copies beyond an array's end.
    """
    if interpret is not None or q.shape[-2] > TILE_ROWS:
        return pad_rows(q)
    return q.reshape(-1, *q.shape[-2:])


def first_rows(ref: Any, rows: int, worker: Any) -> Any:
    """The slice of the first `rows` rows of `ref` [..., R, H], which `whole_rows` gave: a tile.

    Args:
      worker: any index of the grid. JAX 0.12 refuses a slice beyond an array's end where it knows
        the first row, though Mosaic copies it; so that is made of a number that it does not know.
    """
    return pl.ds(0 if rows <= ref.shape[-2] else worker * 0, rows)


def store_little(x: Array, ref: Any) -> None:
    """Write x from registers to `ref` in global memory, also where x is less than a cache line.

    JAX 0.12 refuses an assignment of less than a line, and has a function that does not. Earlier
    versions have the assignment alone.
    """
    store = getattr(plgpu, "store", None)
    if store is None:
        ref[...] = x
    else:
        store(ref, x, optimized=False)


def store_transposed(x: Float[Array, "M N"], ref: Any) -> None:
    """Write a product from registers to `ref` [N,M] in global memory.

    Two numbers of a row of `ref` lie in a thread, so that the transpose is stored as they lie.
    """
    x = plgpu.layout_cast(x, plgpu.Layout.WGMMA_TRANSPOSED)
    store_little(x, ref.transpose((1, 0)))


def merge_parts(
    out: Float[Array, "*B R H"], lse: Float[Array, "*B R"], axis: int
) -> tuple[Float[Array, "*C R H"], Float[Array, "*C R"]]:
    """Merge the attentions along `axis`; an absent one has log-sum-exp -inf and a finite output.

    Few are merged one after another, elementwise, which XLA fuses with the operations that follow.
    Many are merged in one reduction.
    """
    parts = out.shape[axis]
    if parts <= _FEW_PARTS:
        each = [[lax.index_in_dim(x, i, axis, False) for x in (out, lse)] for i in range(parts)]
        return merge([(one, its_lse) for one, its_lse in each])
    out, top, total = lax.reduce(
        (out, jnp.broadcast_to(lse[..., None], out.shape), jnp.ones_like(out)),
        (jnp.float32(0), jnp.float32(MASKED), jnp.float32(0)),
        _merge_two,
        (axis,),
    )
    lse = jnp.where(top > MASKED, top + jnp.log(total), -jnp.inf)
    return out, lse[..., 0]


def _merge_two(one: tuple[Array, ...], other: tuple[Array, ...]) -> tuple[Array, ...]:
    """Two attentions as one: mean, largest log-sum-exp and sum in units of it."""
    out, top, total = zip(one, other, strict=True)
    new_top = jnp.maximum(*top)
    weights = [n * jnp.exp(x - new_top) for n, x in zip(total, top, strict=True)]
    new_total = weights[0] + weights[1]
    mean = (out[0] * weights[0] + out[1] * weights[1]) / jnp.maximum(new_total, 1.0)
    return mean, new_top, new_total
