"""A text's tokens where each kv head keeps a number of its own, and what came after them.

The kept tokens of all heads lie in one pool of pages. A page holds up to `PAGE` tokens of one head,
and says whose they are and how many. So the pool takes the memory of the heads' sum, in whole
pages, however it is divided among them, and its pages may lie in any order and on any shard: they
are dealt to all shards of slots and heads. After the text nothing is written to it. Question and
answer, which all heads keep, follow in an `AppendCache`.

A decode step takes the pages as rows of `decode_attention`, each with its head's queries, and reads
every page once. The pages' parts, the shards' and that of the tokens after them merge by
log-sum-exp. Where heads are on several shards, all of them need all queries, and exchange parts.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jax_longctx.caches.append_only import AppendCache, Rewinding, cache_of
from jax_longctx.caches.reading import local_slots, on_all_shards, stored_lines
from jax_longctx.contract import QKV, Attended, LayerContext
from jax_longctx.sharding import axes_field
from pallas_kernels.common import AnyCache, merge
from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.plane import Plane, each_array, part_of
from pallas_kernels.prefill_attention import cache_attention
from pallas_kernels.quantised import AnyStored

# Tokens of a page: a block of the attention kernels.
PAGE = 128
# Queries of all pages that a question attends at once.
_QUERIES = 2048


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class UnevenCache(Rewinding):
    """Keys (rotated) and values of the tokens that each kv head keeps, and of those after them.

    Attributes:
      own: the tokens after the text.
      k, v: P pages of Z tokens; slot z of page p is valid when `z < count[b, p]`.
      head: the kv head whose tokens a page holds, counted over all shards.
      count: its tokens; 0 of an empty page.
    """

    own: AppendCache
    k: AnyCache = axes_field("batch", "pool", None, None, in_place=True)
    v: AnyCache = axes_field("batch", "pool", None, None, in_place=True)
    head: Int[Array, "B P"] = axes_field("batch", "pool")
    count: Int[Array, "B P"] = axes_field("batch", "pool")

    @property
    def store(self) -> "UnevenCache":
        """Itself, as `Store` has it."""
        return self

    @property
    def position(self) -> Int[Array, " B"]:
        """Position of each row's next token."""
        return self.own.position

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values."""
        return self.k.nbytes + self.v.nbytes + self.own.nbytes

    def attend(self, new: QKV, valid: Int[Array, " B"], ctx: LayerContext) -> tuple[Attended, Any]:
        """Appends tokens; each attends to all kept tokens and to those after them up to itself.

        Args:
          new: queries and keys are rotated to their positions.
        """
        part, own = self.own.attend(new, valid, ctx)
        return merge([self._earlier(new[0], ctx), part]), dataclasses.replace(self, own=own)

    def _earlier(self, q: Float[Array, "B T N H"], ctx: LayerContext) -> Attended:
        """Attention to the pool, over all shards."""
        heads, shards = q.shape[2], ctx.head_shards
        if shards == 1:
            return ctx.seq_merge(*self._of_pool(q, self.own.k.shape[1], ctx))
        found = self._of_pool(ctx.gather_heads(q, axis=2), self.own.k.shape[1] * shards, ctx)
        every = [ctx.gather_heads(x[None], axis=0) for x in ctx.seq_merge(*found)]
        merged = merge([(every[0][i], every[1][i]) for i in range(shards)])
        first = ctx.head_offset(heads)
        out, lse = (jax.lax.dynamic_slice_in_dim(x, first, heads, axis=2) for x in merged)
        return out, lse

    def _of_pool(self, q: Float[Array, "B T N H"], heads: int, ctx: LayerContext) -> Attended:
        """Attention of all heads' queries to this shard's pages."""
        pages, queries = self.head.shape[1], q.shape[1]
        if queries == 1:
            return _of_pages(q, self.k, self.v, self.head, self.count, heads, ctx)
        size, (k, v) = max(1, min(pages, _QUERIES // queries)), part_of((self.k, self.v))

        def more(number: Array, found: Attended) -> Attended:
            # The last run is moved back to end with the pages: what the one before had is left out.
            start = jnp.minimum(number * size, pages - size)
            k_run, v_run, head, count = jax.tree.map(
                lambda x: jax.lax.dynamic_slice_in_dim(x, start, size, 1),
                (k, v, self.head, self.count),
            )
            new_P = start + jnp.arange(size) >= number * size
            count = jnp.where(new_P, count, 0)
            return merge([found, _of_pages(q, k_run, v_run, head, count, heads, ctx)])

        none = jnp.zeros_like(q), jnp.full(q.shape[:3], -jnp.inf, jnp.float32)
        return jax.lax.fori_loop(0, -(-pages // size), more, none)


def _of_pages(
    q: Float[Array, "B T N H"],
    k: AnyCache,
    v: AnyCache,
    head: Int[Array, "B P"],
    count: Int[Array, "B P"],
    heads: int,
    ctx: LayerContext,
) -> Attended:
    """Each query's attention to the pages of its kv head, one of `heads`."""
    (batch, queries, _, width), pages = q.shape, head.shape[1]

    def rows(x: Any) -> Any:
        if isinstance(x, Plane):
            return Plane(x.whole.reshape(len(x.whole), -1, 1, *x.whole.shape[3:]), x.layer)
        return x.reshape(-1, 1, *x.shape[2:])

    k, v = each_array(rows, (k, v))  # [B * P, 1, Z, H]
    q_BKTGH = jnp.swapaxes(q.reshape(batch, queries, heads, -1, width), 1, 2)
    q_BPTGH = jnp.take_along_axis(q_BKTGH, head[..., None, None, None], axis=1)
    q_ETGH = q_BPTGH.reshape(batch * pages, *q_BPTGH.shape[2:])
    attend = decode_attention if queries == 1 else cache_attention
    found = attend(q_ETGH, k, v, count.reshape(-1), scale=ctx.scale)
    out_BPTGH, lse_BPTG = (x.reshape(batch, pages, *x.shape[1:]) for x in found)
    # The parts of each head's pages, merged as `merge` does.
    mine_BPKTG = (head[..., None] == jnp.arange(heads))[..., None, None]
    lse_BPKTG = jnp.where(mine_BPKTG, lse_BPTG[:, :, None], -jnp.inf)
    top_BKTG = jnp.max(lse_BPKTG, axis=1)
    top_BKTG = jnp.where(top_BKTG > -jnp.inf, top_BKTG, 0.0)
    weight_BPKTG = jnp.exp(lse_BPKTG - top_BKTG[:, None])
    total_BKTG = jnp.sum(weight_BPKTG, axis=1)
    out_BKTGH = jnp.einsum(
        "BPKTG,BPTGH->BKTGH",
        weight_BPKTG,
        out_BPTGH.astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
    )
    out_BKTGH = out_BKTGH / jnp.where(total_BKTG > 0, total_BKTG, 1.0)[..., None]
    lse_BKTG = jnp.where(total_BKTG > 0, top_BKTG + jnp.log(total_BKTG), -jnp.inf)
    out, lse = (jnp.swapaxes(x, 1, 2) for x in (out_BKTGH.astype(q.dtype), lse_BKTG))
    return out.reshape(q.shape), lse.reshape(q.shape[:3])


def uneven(
    store: AppendCache, kept: Bool[Array, "B K S"], most: int, reserve: int, ctx: LayerContext
) -> UnevenCache:
    """A cache of each kv head's kept tokens, with room for `reserve` tokens after them.

    Args:
      kept: of the heads and slots of all shards, in the text's order.
      most: the largest sum of a row's kept tokens over the heads.
    """
    (batch, heads, slots), shards = kept.shape, ctx.seq_size * ctx.head_shards
    pages = -(-((most + heads * (PAGE - 1)) // PAGE) // shards) * shards
    count_BK = jnp.sum(kept, axis=-1, dtype=jnp.int32)
    used_BK = -(-count_BK // PAGE)
    end_BK = jnp.cumsum(used_BK, axis=1)
    first_BK, page_P = end_BK - used_BK, jnp.arange(pages)
    head_BP = jnp.sum(page_P[:, None] >= end_BK[:, None], axis=-1)
    head_BP = jnp.minimum(head_BP, heads - 1)
    first_BP, count_BP = (jnp.take_along_axis(x, head_BP, axis=1) for x in (first_BK, count_BK))
    count_BP = jnp.clip(count_BP - (page_P - first_BP) * PAGE, 0, PAGE)
    # Where each kept token goes; the others beyond the pool, which is dropped.
    to_BKS = first_BK[..., None] * PAGE + jnp.cumsum(kept, axis=-1, dtype=jnp.int32) - 1
    to_BKS = jnp.where(kept, to_BKS, pages * PAGE)
    slots_BE = jnp.full((batch, pages * PAGE), -1, jnp.int32)
    slot_BKS = jnp.broadcast_to(jnp.arange(slots), kept.shape)
    slots_BE = slots_BE.at[jnp.arange(batch)[:, None, None], to_BKS].set(slot_BKS, mode="drop")
    slots_BPZ = slots_BE.reshape(batch, pages, PAGE)

    def own(x: Array) -> Array:
        """This shard's pages."""
        size = pages // shards
        shard = ctx.seq_index * ctx.head_shards + ctx.head_offset(1)
        return jax.lax.dynamic_slice_in_dim(x, shard * size, size, axis=1)

    k, v = (jax.tree.map(own, _gathered(x, slots_BPZ, head_BP, ctx)) for x in (store.k, store.v))
    none = jax.tree.map(lambda x: x[:, :, :0], part_of((store.k, store.v)))
    length_B = jnp.zeros_like(store.length)
    after = cache_of(none[0], none[1], length_B, store.position, reserve, ctx)
    return UnevenCache(after, k, v, own(head_BP), own(count_BP))


def _gathered(
    buffer: AnyStored, slots: Int[Array, "B P Z"], head: Int[Array, "B P"], ctx: LayerContext
) -> AnyStored:
    """Each page's keys or values, as they are stored, on all shards; zeros for slot -1."""
    batch, heads, size, _ = buffer.shape
    own_BP1 = (head - ctx.head_offset(heads))[..., None]
    slots = local_slots(slots, size, ctx)
    mine_BPZ = (slots >= 0) & (own_BP1 >= 0) & (own_BP1 < heads)
    at_BPZ = jnp.where(mine_BPZ, own_BP1 * size + slots, -1)
    # All heads of a row as one.
    joined = jax.tree.map(lambda x: x.reshape(batch, 1, -1, *x.shape[3:]), part_of(buffer))
    lines = stored_lines(joined, at_BPZ.reshape(batch, 1, -1))

    def total(x: Array) -> Array:
        return ctx.psum_heads(ctx.psum_seq(x)) if ctx.head_shards > 1 else ctx.psum_seq(x)

    lines = on_all_shards(lines, total)
    return jax.tree.map(lambda x: x.reshape(*slots.shape, *x.shape[3:]), lines)
