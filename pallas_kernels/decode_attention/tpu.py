"""Attention of one or a few queries to a cache on TPUs: a streaming Mosaic kernel.

Grid: (row, kv head, block of slots); the blocks are innermost and in order, rows and heads may be
split over a chip's cores. The group's queries, R = G T rows of one matrix, share every block, so
that keys and values are read once for the whole group. VMEM: two buffers of a key and a value block
each (a few thousand slots, about 2 MiB a step, so that a step's fixed cost is small beside its
copy), the scores [R, block] in float32, and the running maximum, sum and output of the softmax.

The rows' first and last blocks are prefetched scalars. Outside them the block index stays at the
last one's, so nothing more is fetched. Only in the block that the length cuts through are slots
masked and values beyond the length replaced by 0; so garbage there, NaN included, reaches no
matmul. With a window the grid has as many blocks as a window can touch, from the row's first.

Keys and values in int8 become q's dtype in VMEM, exactly. A token's scale multiplies its score or
its weight. A block of scales [K, block] is of all kv heads, as a tile in memory is; one head takes
its own row. So scales are read K times: 16 bytes a slot for 8 heads, beside the key's.

Bytes moved: keys and values of the visible blocks, once. Roofline: those bytes over the bandwidth.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Float

from pallas_kernels import tpu_common as tpu
from pallas_kernels.common import (
    AnyCache,
    Attended,
    PerRow,
    Queries,
    Scale,
    Window,
    capped,
    factor_of,
    group_heads,
    ungroup_heads,
)
from pallas_kernels.plane import rows_of
from pallas_kernels.quantised import Quantised

# Bytes of one buffer of a key block: the copy then takes a few times a grid step's fixed cost.
_BLOCK_BYTES = 2**20


def unsupported(q: Array, k: AnyCache, v: AnyCache) -> str | None:
    """Why this kernel cannot run these arguments, or None."""
    if isinstance(k, Quantised) != isinstance(v, Quantised):
        return "either keys or values are in 8 bits, and the kernel reads both alike"
    return tpu.unsupported_keys(q)


def decode_attention(
    q: Queries,
    k: AnyCache,
    v: AnyCache,
    lengths: PerRow,
    *,
    scale: Scale,
    window: Window | None = None,
    block: int | None = None,
    interpret: pltpu.InterpretParams | bool = False,
) -> Attended:
    """Every query of row b sees the slots below lengths[b], and within the window if there is one.

    Args:
      block: slots of a block, a multiple of 128; None takes the heuristic's.
      interpret: parameters of the interpreter that runs the kernel on other platforms.
    """
    (batch, queries, _, head_dim), (_, kv_heads, slots, _) = q.shape, k.shape
    q_BKRH = group_heads(q, kv_heads).reshape(batch, kv_heads, -1, head_dim)
    rows = q_BKRH.shape[2]
    values, scales, least = (k, v), (), head_dim * k.dtype.itemsize
    if isinstance(k, Quantised) and isinstance(v, Quantised):
        values, scales = (k.values, v.values), (k.scales, v.scales)
        least = head_dim + 2 * kv_heads
    block = block or _block(slots, rows, least, head_dim * (2 if scales else 0))
    steps = -(-slots // block)
    first_B = jnp.zeros_like(lengths)
    positions = ()
    if window is not None:
        # The slot that stands at the position p has the number p - slot_start.
        query_B = window.query_start - window.slot_start
        first_B = jnp.clip(query_B - window.size + 1, 0, lengths) // block
        steps = min(steps, -(-(window.size + queries) // block) + 1)
        query_BT = query_B[:, None] + jnp.arange(queries)
        positions = (jnp.tile(query_BT, (1, rows // queries)).astype(jnp.int32)[..., None],)

    def visited(b, h, j, lengths, first, stop):
        return b, h, jnp.minimum(first[b] + j, jnp.maximum(stop[b] - 1, 0))

    def by_head(b, h, j, *_):
        return b, h, 0, 0

    keys = tpu.key_spec(head_dim, block, visited)
    rows_spec = pl.BlockSpec((1, 1, rows, head_dim), by_head)
    scale_spec = tpu.scale_spec(kv_heads, block, visited)
    position_spec = pl.BlockSpec((1, rows, 1), lambda b, *_: (b, 0, 0))
    visits = batch * kv_heads * steps * block
    lse = jax.ShapeDtypeStruct((*q_BKRH.shape[:3], 1), jnp.float32)
    out_BKRH, lse_BKR1 = tpu.call(
        partial(_kernel, scale=scale, steps=steps, window=window and window.size),
        (lengths, first_B, -(-lengths // block), tpu.first_row(values[0])),
        [
            (q_BKRH, rows_spec),
            *((tpu.as_stored(x), keys) for x in values),
            *((rows_of(x)[0], scale_spec) for x in scales),
            *((x, position_spec) for x in positions),
        ],
        [
            (jax.ShapeDtypeStruct(q_BKRH.shape, q.dtype), rows_spec),
            (lse, pl.BlockSpec((1, 1, rows, 1), by_head)),
        ],
        tpu.Softmax.scratch(rows, head_dim),
        grid=((batch, kv_heads), (steps,)),
        cost=(4 * visits * rows * head_dim, visits * rows, 2 * visits * least),
        interpret=interpret,
        name="decode_attention",
    )
    grouped = batch, kv_heads, rows // queries, queries
    out_BKGTH = out_BKRH.reshape(*grouped, head_dim)
    return ungroup_heads(out_BKGTH), ungroup_heads(lse_BKR1.reshape(grouped))


def _block(slots: int, rows: int, key_bytes: int, converted: int) -> int:
    """Slots of a block: about 1 MiB of keys, less where the scores of many rows need the room.

    Args:
      key_bytes: of a slot, with scales.
      converted: bytes of a slot's key in q's dtype, where it is stored in another.
    """
    padded = -(-rows // 8) * 8
    # A slot's keys and values twice, what they are converted to, its scores, and the weights made
    # of them.
    slot_bytes = 4 * key_bytes + 2 * converted + 3 * padded * 4
    most = min(_BLOCK_BYTES // max(key_bytes, converted), tpu.VMEM_BYTES // slot_bytes)
    return tpu.key_block(slots, most)


def _kernel(
    scalars, inputs, outputs, scratch, *, scale: Scale, steps: int, window: int | None
) -> None:
    # [B] filled slots, the first visible block, the block after the last visible one.
    lengths, first, stop, _ = scalars
    # q [1, 1, R, H]; k and v [1, 1, Z, H], or [1, 1, H, Z] for narrow heads; scales [1, K, Z]
    # twice; with a window the rows' positions among the slots, [1, R, 1].
    q, k, v, *rest = inputs
    scales, positions = rest[: len(rest) // 2 * 2], rest[len(rest) // 2 * 2 :]
    softmax = tpu.Softmax(*scratch)
    b, j = pl.program_id(0), pl.program_id(2)
    at = first[b] + j
    minor = tpu.slots_minor(q.shape[3])
    block = k.shape[3 if minor else 2]

    pl.when(j == 0)(softmax.clear)

    def add_block(cut: bool):
        keys, values = k[0, 0].astype(q.dtype), v[0, 0].astype(q.dtype)
        scores_RZ = factor_of(scale) * tpu.matmul(q[0, 0], keys, (1, 0 if minor else 1))
        slots_1Z = at * block + lax.broadcasted_iota(jnp.int32, (1, block), 1)
        value_scales = None
        if scales:
            key_scales, value_scales = (_own(ref[0], pl.program_id(1)) for ref in scales)
            scores_RZ *= key_scales
        scores_RZ = capped(scores_RZ, scale)
        seen = slots_1Z < lengths[b]
        if positions:
            seen &= positions[0][0] - slots_1Z < window
        if cut:
            axis = 1 if minor else 0
            held = at * block + lax.broadcasted_iota(jnp.int32, values.shape, axis) < lengths[b]
            # In float32: the comparison's mask has the layout of 32-bit numbers.
            values = jnp.where(held, values.astype(jnp.float32), 0).astype(values.dtype)
            if value_scales is not None:
                value_scales = jnp.where(slots_1Z < lengths[b], value_scales, 0)
        visible = seen if cut or positions else None
        softmax.add(scores_RZ, visible, values, minor=minor, scales=value_scales)

    whole = (at + 1) * block <= lengths[b]
    pl.when((at < stop[b]) & whole)(lambda: add_block(cut=False))
    pl.when((at < stop[b]) & ~whole)(lambda: add_block(cut=True))

    pl.when(j == steps - 1)(lambda: softmax.write(*(ref.at[0, 0] for ref in outputs)))


def _own(scales: Array, head: Array) -> Float[Array, "1 Z"]:
    """The head's row of scales [K, Z]: by a mask, as no row of a packed tile is read alone."""
    mine = lax.broadcasted_iota(jnp.int32, scales.shape, 0) == head
    return jnp.sum(jnp.where(mine, scales.astype(jnp.float32), 0), axis=0, keepdims=True)
