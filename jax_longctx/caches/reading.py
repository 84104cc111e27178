"""Reads of keys and values where they lie and as they are stored."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from jax_longctx.contract import LayerContext, rope_angles
from pallas_kernels.common import AnyCache
from pallas_kernels.dispatch import platform
from pallas_kernels.plane import each_array, laid_as, part_of, rows_of
from pallas_kernels.quantised import AnyStored, coded, dequantised


class Turned(NamedTuple):
    """How keys are rotated as they are read.

    Attributes:
      positions: of each entry.
      but_last: how many last keys are not rotated. They are read with the others, as one array, so
        that the next layer waits for them before it writes its own. A read that nothing waits for
        would be of a copy of all layers' keys.
    """

    positions: Int[Any, "#B X"]
    ctx: LayerContext
    but_last: int = 0


def numbers(buffer: Any) -> Shaped[Array, "..."]:
    """All of a buffer as an array of numbers."""
    return dequantised(part_of(buffer))


def read_pair(
    buffers: tuple[AnyCache, AnyCache],
    where: tuple[Int[Array, "B X C"], Int[Array, "B X C"]],
    turned: Turned | None,
    *,
    blank: bool,
    values: bool,
) -> tuple[Shaped[Array, "B K C H"], Any]:
    """`Store.read` of these buffers, where its slots lie in each."""
    (k_buffer, v_buffer), (at_keys, at_values) = buffers, where
    if turned is None:
        k = read_lines(k_buffer, at_keys, blank=blank)
    else:
        k = rotated_lines(k_buffer, at_keys[:, 0], *turned, blank=blank)
        k = jax.lax.optimization_barrier(k) if turned.but_last else k
    return k, read_lines(v_buffer, at_values, blank=blank) if values else None


def local_slots(
    index: Int[Array, "*shape"], size: int, ctx: LayerContext, page: int = 1
) -> Int[Array, "*shape"]:
    """Global slots, or pages of `page` slots, as indices on this shard, which has `size` of them.

    -1 for other shards' slots, and for negative ones.
    """
    return ctx.slots(size, page).find(index)


def local_run(
    slots: Int[Array, "B X"],
    number: Int[Array, " B"],
    size: int,
    ctx: LayerContext,
    *,
    descending: bool = False,
) -> tuple[Int[Array, "B Y"], Int[Array, " B"], Int[Array, " B"]]:
    """The run of each row's monotone list of global slots that this shard's block holds.

    Args:
      slots: ascending, or descending, in the first number[b] entries; the others do not count.
      size: this shard's slots.

    Returns:
      (local, first, count): Y = min(X, size) local slots, -1 from entry count[b] on; entry i is
      entry first[b] + i of the list.
    """
    first_B, count_B, most = jnp.zeros_like(number), number, min(slots.shape[1], size)
    if ctx.seq_size > 1:
        offset = ctx.seq_offset(size)
        listed_BX = jnp.arange(slots.shape[1]) < number[:, None]
        below, above = slots < offset, slots >= offset + size
        first_B = jnp.sum(listed_BX & (above if descending else below), axis=-1)
        count_B = jnp.sum(listed_BX & ~below & ~above, axis=-1)
        at_BY = jnp.minimum(first_B[:, None] + jnp.arange(most), slots.shape[1] - 1)
        slots = jnp.take_along_axis(slots, at_BY, axis=1) - offset
    local_BY = jnp.where(jnp.arange(most) < count_B[:, None], slots[:, :most], -1)
    return local_BY, first_B, count_B


def lines_of(
    buffer: AnyStored, slots: Int[Array, "B X C"]
) -> tuple[Shaped[Array, "R ..."], Int[Array, "B K C"]]:
    """The flattened buffer, R = B * K * S lines (of a plane those of all layers), and where `slots`
    lie in it, X = 1 list for all heads or K."""
    batch, heads, size, *width = buffer.shape
    rows, first = rows_of(buffer)
    return rows.reshape(-1, *width), line_numbers(batch, heads, size, slots, first)


def line_numbers(
    batch: int, heads: int, size: int, slots: Array, first: Any
) -> Int[Array, "B K C"]:
    """Lines of the flattened buffer, whose row `first` is the first of these."""
    row_B11 = (jnp.arange(batch) + first)[:, None, None]
    return (row_B11 * heads + jnp.arange(heads)[:, None]) * size + slots


def read_lines(
    buffer: AnyStored,
    slots: Int[Array, "B X C"],
    *,
    blank: bool = True,
) -> Shaped[Array, "B K C H"]:
    """The lines in this shard's `slots`, X = 1 list for all heads or K; zeros for -1.

    Without `blank` any line for -1.
    """
    return dequantised(stored_lines(buffer, slots, blank=blank))


def stored_lines(
    buffer: AnyStored,
    slots: Int[Array, "B X C"],
    *,
    blank: bool = True,
) -> AnyStored:
    """`read_lines`, as they are stored.

    They are read from the flattened buffer, whose layout stays as it is: a gather along the slots
    makes the TPU compiler copy the cache with its axes moved.
    """

    def of(part: Any) -> Array:
        index = jnp.maximum(slots, 0)
        if part.ndim == 3 and platform() == "tpu":
            # Flat, the numbers of all layers would have another layout: a copy of them.
            lines = jnp.take_along_axis(part_of(part), index, axis=2)
        else:
            flat, lines_BKC = lines_of(part, index)
            lines = laid_as(part, jnp.take(flat, lines_BKC, axis=0, mode="clip"))
        if not blank:
            return lines
        some = (slots >= 0).reshape(*slots.shape, *(1,) * (lines.ndim - 3))
        return jnp.where(some, lines, jnp.zeros((), lines.dtype))

    return each_array(of, buffer)


def gather_slots(
    buffer: AnyCache, slots: Int[Array, "B K C"], ctx: LayerContext
) -> Float[Array, "B K C H"]:
    """The keys or values in global `slots` of each row and kv head, on every shard of the slots.

    Negative slots come back as zeros.
    """
    return dequantised(gather_stored(buffer, slots, ctx))


def gather_stored(buffer: AnyCache, slots: Int[Array, "B K C"], ctx: LayerContext) -> AnyStored:
    """`gather_slots`, as they are stored."""
    lines = stored_lines(buffer, local_slots(slots, buffer.shape[2], ctx))
    return on_all_shards(lines, ctx.psum_seq)


def on_all_shards(lines: AnyStored, total: Callable[[Array], Array]) -> AnyStored:
    """Lines that one shard each holds, the others zeros; `total` is a sum over the shards."""

    # One shard holds each slot; a sum with zeros is exact.
    def everywhere(part: Array) -> Array:
        if part.dtype.itemsize > 1:
            return total(part)
        bits = jax.lax.bitcast_convert_type(part, jnp.int8)
        return jax.lax.bitcast_convert_type(total(bits), part.dtype)

    return jax.tree.map(everywhere, lines)


def rotated_lines(
    buffer: AnyCache,
    slots: Int[Array, "B X"],
    positions: Int[Any, "#B X"],
    ctx: LayerContext,
    but_last: int = 0,
    *,
    blank: bool = True,
) -> Float[Array, "B K X H"]:
    """The keys in this shard's `slots` for all heads, rotated as `Turned` says; zeros for -1.

    Args:
      blank: without it any key for -1.
    """
    turned_X1 = (np.arange(slots.shape[1]) < slots.shape[1] - but_last)[:, None]
    if platform() == "tpu" or coded(buffer):
        # Half lines have another layout there: the cache would be copied. And few bits are turned
        # into numbers first.
        lines = read_lines(buffer, slots[:, None], blank=blank)
        turned = jnp.swapaxes(ctx.rotate(jnp.swapaxes(lines, 1, 2), positions), 1, 2)
        return jnp.where(turned_X1, turned, lines) if but_last else turned
    # A channel's partner is in the line's other half: two reads of half lines, then elementwise
    # operations. On a GPU joining two halves took 32 us for 8 heads and 8192 slots, reading 12.
    head_dim = buffer.shape[3]
    flat, line_BKX = lines_of(buffer, jnp.maximum(slots, 0)[:, None])
    halves, line_BKX1 = flat.reshape(-1, head_dim // 2), 2 * line_BKX[..., None]
    own, partner = (
        jnp.take(halves, line_BKX1 + np.array(order), axis=0, mode="clip").astype(jnp.float32)
        for order in ([0, 1], [1, 0])
    )  # [B, K, X, 2, F]
    cos, sin = rope_angles(ctx.rope, head_dim, positions, ctx.total)
    if but_last:
        cos, sin = jnp.where(turned_X1, cos, 1.0), jnp.where(turned_X1, sin, 0.0)
    cos, sin = (x[:, None, :, None] for x in (cos, sin))
    turned = own * cos + partner * (sin * np.array([[-1.0], [1.0]], np.float32))
    if blank:
        turned = jnp.where((slots >= 0)[:, None, :, None, None], turned, 0)
    return turned.astype(buffer.dtype).reshape(*turned.shape[:3], head_dim)  # [B, K, X, H]
