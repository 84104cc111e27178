"""Attention of one query to chosen pages in plain XLA: gather the pages, attend, merge.

The list entries go by in blocks. The pages of a block are gathered and attended with a softmax of
their own; blocks merge by running maximum and sum, as in streaming attention. There is one block
unless its copies pass `_GATHERED_BYTES`. A prior's query is one more query over the same keys and
values, which are read once for both.

The entries of a flat list are attended one by one by their kv head's group. Their partial results
are summed per head by a matmul with the 0-1 matrix of entries and heads, since a scatter would be
serial on a TPU.

Roofline: the bytes of k and v of the listed pages. Gathering writes these and reads them again, so
it moves three times as many.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from pallas_kernels.common import MASKED, AnyCache, Scale, capped, factor_of
from pallas_kernels.dispatch import platform
from pallas_kernels.plane import Plane, each_array, part_of
from pallas_kernels.plane import rows_of as plane_rows
from pallas_kernels.quantised import Quantised, dequantised
from pallas_kernels.sparse_decode_attention.lists import Pages, rows_of

# Bytes of gathered keys and values of one block of entries.
_GATHERED_BYTES = 32 * 2**20

# Sums of float32 partial results must not pass through a matmul that rounds them to bfloat16.
_einsum = partial(jnp.einsum, precision=lax.Precision.HIGHEST)


class Partial(NamedTuple):
    """Softmaxes over some slots, [B,Y,L,R] and acc [B,Y,L,R,H]; L is logits and prior, if any.

    `top` is the largest logit or MASKED, `total` the sum of exp(logit - top), `acc` the values
    weighted by the same.
    """

    top: Array
    total: Array
    acc: Array


def sparse_decode_attention(
    q: Float[Array, "B 1 N H"],
    k: AnyCache,
    v: AnyCache,
    pages: Pages,
    *,
    scale: Scale,
    prior: Float[Array, "B 1 N H"] | None = None,
    block: int | None = None,
) -> tuple[Array, ...]:
    """The listed slots' attention, as in `reference`.

    Args:
      block: list entries gathered at once; None picks by size.
    """
    b, _, n, h = q.shape
    kv_heads = k.shape[1]
    # A list serves the query heads that follow each other; it reads kv head x K / X.
    lists = pages.listed.shape[1] if pages.heads is None else kv_heads
    group = n // lists
    listed, slot_bytes = pages.listed.shape[-1], pages.size * 2 * jnp.dtype(k.dtype).itemsize
    entry_bytes = lists * slot_bytes
    if pages.heads is not None:
        entry_bytes = slot_bytes + 4 * group * (1 if prior is None else 2)
    block = block or _block(listed, b * h * entry_bytes)
    # XLA for GPUs copies a layer's part before a loop. All layers' cache it may copy without one.
    in_place = block < listed if platform() == "gpu" else isinstance(k, Quantised)
    if not in_place:
        k, v = part_of(k), part_of(v)
    q_BXMH = rows_of(q, prior, lists)
    heads_1X1 = (np.arange(lists, dtype=np.int32) * kv_heads // lists)[None, :, None]

    def part_of_lists(pages_BXC: Array) -> Partial:
        slots_BXCZ, held_BXCZ = _slots_of(pages_BXC, pages, k.shape[2])
        slots_BXM, held_BXM = (x.reshape(b, lists, -1) for x in (slots_BXCZ, held_BXCZ))
        k_BXMH, v_BXMH = (_gather(x, heads_1X1, slots_BXM) for x in (k, v))
        return _softmaxes(q_BXMH, group, k_BXMH, v_BXMH, held_BXM, scale)

    def part_of_entries(heads_BE: Array, pages_BE: Array) -> Partial:
        named_BEK = heads_BE[..., None] == jnp.arange(kv_heads)
        slots_BEZ, held_BEZ = _slots_of(pages_BE, pages, k.shape[2])
        held_BEZ &= jnp.any(named_BEK, axis=-1, keepdims=True)
        heads_BE1 = jnp.clip(heads_BE, 0, kv_heads - 1)[..., None]
        k_BEZH, v_BEZH = (_gather(x, heads_BE1, slots_BEZ) for x in (k, v))
        q_BEMH = jnp.take_along_axis(q_BXMH, heads_BE1[..., None], axis=1)
        entries = _softmaxes(q_BEMH, group, k_BEZH, v_BEZH, held_BEZ, scale)
        return _sum_by_head(entries, heads_BE1, named_BEK)

    if pages.heads is None:
        return _finish(_over_blocks(part_of_lists, (pages.listed,), block), q)
    return _finish(_over_blocks(part_of_entries, (pages.heads, pages.listed), block), q)


def _block(entries: int, entry_bytes: int) -> int:
    """Entries of a block: as few blocks as the bytes allow, about equal."""
    most = max(1, _GATHERED_BYTES // entry_bytes)
    return -(-entries // -(-entries // most))


def _over_blocks(part: Callable[..., Partial], lists: tuple[Array, ...], block: int) -> Partial:
    """`part` of every block of the lists' last axis, merged; -1 fills the last block."""
    entries = lists[0].shape[-1]
    blocks = -(-entries // block)
    spare = blocks * block - entries
    lists = tuple(
        jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, spare)], constant_values=-1) for x in lists
    )

    def of(j: Array | int) -> Partial:
        return part(*(lax.dynamic_slice_in_dim(x, j * block, block, axis=-1) for x in lists))

    if blocks == 1:
        return of(0)
    shapes = jax.eval_shape(of, 0)
    top, total, acc = (jnp.zeros(x.shape, x.dtype) for x in shapes)
    empty = Partial(top + MASKED, total, acc)
    return lax.fori_loop(0, blocks, lambda j, sofar: _merge(sofar, of(j)), empty)


def _slots_of(
    listed: Int[Array, "B ..."], pages: Pages, slots: int
) -> tuple[Int[Array, "B ... Z"], Bool[Array, "B ... Z"]]:
    """The slots of some of the pages, within [0, S), and which of them count."""
    slots_BAZ = listed[..., None] * pages.size + jnp.arange(pages.size)
    start, stop = (x.reshape(-1, *[1] * listed.ndim) for x in (pages.start, pages.stop))
    held = (listed[..., None] >= 0) & (slots_BAZ >= start) & (slots_BAZ < stop)
    return jnp.clip(slots_BAZ, 0, slots - 1), held & (slots_BAZ < slots)


def _gather(x: Any, heads: Int[Any, "..."], slots: Array) -> Array:
    """x[b, heads[b], slots[b]] for heads and slots that broadcast together.

    Slot by slot also where a page's lie together: for slices of several slots, or after the first
    axes are flattened into one, XLA turns all of x into another layout on TPU. What lies in 8 bits
    is gathered so, and becomes numbers then.
    """
    heads, slots = jnp.broadcast_arrays(heads, slots)

    def of(row: Array, heads: Array, slots: Array) -> Array:
        return row.at[heads, slots].get(mode="promise_in_bounds")

    def lines(part: Any) -> Array:
        if not isinstance(part, Plane):
            return jax.vmap(of)(part, heads, slots)
        rows, first = plane_rows(part)
        row_B = first + jnp.arange(len(heads)).reshape(-1, *[1] * (heads.ndim - 1))
        return rows.at[row_B, heads, slots].get(mode="promise_in_bounds")

    return dequantised(each_array(lines, x))


def _softmaxes(
    q: Float[Array, "B Y LR H"],
    heads: int,
    k: Float[Array, "B Y M H"],
    v: Float[Array, "B Y M H"],
    held: Bool[Array, "B Y M"],
    scale: Scale,
) -> Partial:
    """Attend to the held ones of M gathered slots, with logits scale q.k.

    Args:
      q: for each of R = heads query heads one or, the prior's after the others, two queries.
    """
    scores = jnp.einsum("BYRH,BYMH->BYRM", q, k, preferred_element_type=jnp.float32)
    logits = capped(factor_of(scale) * scores, scale)
    logits_BYLRM = logits.reshape(*q.shape[:2], -1, heads, k.shape[2])
    held_BY11M = held[:, :, None, None]
    top = jnp.max(jnp.where(held_BY11M, logits_BYLRM, MASKED), axis=-1)
    # A logit that overflowed to -inf is a weight of 0, also where nothing else is held.
    top = jnp.maximum(top, MASKED)
    weights = jnp.where(held_BY11M, jnp.exp(logits_BYLRM - top[..., None]), 0.0)
    v = jnp.where(held[..., None], v, 0)  # 0 x NaN is NaN
    acc = jnp.einsum(
        "BYLRM,BYMH->BYLRH", weights.astype(v.dtype), v, preferred_element_type=jnp.float32
    )
    return Partial(top, jnp.sum(weights, axis=-1), acc)


def _merge(a: Partial, b: Partial) -> Partial:
    top = jnp.maximum(a.top, b.top)
    decays = [jnp.exp(x.top - top) for x in (a, b)]
    total = sum(x.total * decay for x, decay in zip((a, b), decays, strict=True))
    acc = sum(x.acc * decay[..., None] for x, decay in zip((a, b), decays, strict=True))
    return Partial(top, jnp.asarray(total), jnp.asarray(acc))


def _sum_by_head(
    entries: Partial, heads: Int[Array, "B E 1"], named: Bool[Array, "B E K"]
) -> Partial:
    """Merge the entries [B,E,L,G] of each kv head into [B,K,L,G]."""
    named_BEK11 = named[..., None, None]
    top_BKLG = jnp.max(jnp.where(named_BEK11, entries.top[:, :, None], MASKED), axis=1)
    top_BELG = jnp.take_along_axis(top_BKLG, heads[..., None], axis=1)
    decay_BELG = jnp.exp(entries.top - top_BELG)
    ones_BEK = named.astype(jnp.float32)
    total = _einsum("BEK,BELG->BKLG", ones_BEK, entries.total * decay_BELG)
    acc = _einsum("BEK,BELGH->BKLGH", ones_BEK, entries.acc * decay_BELG[..., None])
    return Partial(top_BKLG, total, acc)


def _finish(whole: Partial, q: Float[Array, "B 1 N H"]) -> tuple[Array, ...]:
    """(out, lse) of every softmax in turn; a prior's out stays in float32."""
    some = whole.total > 0
    total = jnp.where(some, whole.total, 1.0)
    out = whole.acc / total[..., None]
    lse = jnp.where(some, whole.top + jnp.log(total), -jnp.inf)
    results = []
    for i in range(out.shape[2]):
        dtype = jnp.float32 if results else q.dtype
        results += [out[:, :, i].reshape(q.shape).astype(dtype), lse[:, :, i].reshape(q.shape[:3])]
    return tuple(results)
