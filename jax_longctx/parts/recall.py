"""Which slots of the context a layer attends to: votes for keys, and the spans around them.

The selection of ReAttention (section 2.2), as pure functions of arrays:

1. `best_keys`: every query head of every token names the keys of largest dot product;
2. `centres_of_chunk`, `centres_of_token`: each naming is one vote; of the keys that have votes the
   most voted stay, ties to the lower slot;
3. `spread`: each stands for the span of slots around it; the union of the spans, ascending.

All heads of a row share one selection, and every row and layer has its own. A chunk's votes are
counted in an array of the length of the cache; a single token's few are compared with each other,
which costs the same at any length. From the centres on nothing has the cache's length. For 32
heads, k = 4 and 131,072 slots, 2 and 3 take 80 us a chunk of 512 and 16 us a token on an H200.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jax_longctx.contract import LayerContext
from jax_longctx.parts import ties
from pallas_kernels.dispatch import platform
from pallas_kernels.select_large_k import select_large_k
from pallas_kernels.topk_scores import merge_topk, topk_scores

__all__ = [
    "best_keys",
    "centres_of_chunk",
    "centres_of_token",
    "elect",
    "scramble_heads",
    "spread",
]

# The text's first slots, by whose keys the size of a key is estimated.
_SAMPLE = 128
_LAST = jnp.iinfo(jnp.int32).max
# Slots of a page and entries of a block, where votes are counted by matmul.
_LANES, _VOTES = 128, 4096
# From so many slots on the pages are ranked first.
_MANY = 2**18


def elect(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B K S H"],
    start: int,
    stop: Int[Array, " B"],
    valid: Int[Array, " B"],
    ctx: LayerContext,
    count: int,
    kept: int,
    *,
    tile: int | None = None,
    scrambled: bool = False,
) -> Int[Array, "B M"]:
    """The slots in start <= s < stop[b] that stay after the vote, ascending, then -1.

    `tile` is for chunks (see `best_keys`) and `scrambled` for lone tokens (see `scramble_heads`).
    """
    if q.shape[1] == 1:
        q = scramble_heads(q, k.shape[1], ctx) if scrambled else q
        named = best_keys(q, k, start, stop, valid, ctx, count=count)
        return centres_of_token(named, kept, ctx)
    named = best_keys(q, k, start, stop, valid, ctx, count=count, tile=tile)
    return centres_of_chunk(named, k.shape[2] * ctx.seq_size, kept, ctx)


def best_keys(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B K S H"],
    start: int,
    stop: Int[Array, " B"],
    valid: Int[Array, " B"],
    ctx: LayerContext,
    *,
    count: int,
    tile: int | None = None,
) -> Int[Array, "B T N C"]:
    """Global slots of each query's `count` best keys in start <= s < stop[b], -1 where fewer are.

    With `tile` only the best key of each tile of slots, counted from `start`, takes part. Tokens
    beyond valid[b] name nothing. Scores that differ by no more than `tolerance` tie.
    """
    offset = ctx.seq_offset(k.shape[2])
    allowed = tolerance(q, k, stop, ctx)
    rank = functools.partial(topk_scores, tolerance=allowed, valid=valid)
    first_B, end_B = jnp.broadcast_to(start - offset, stop.shape), stop - offset
    if ctx.seq_size == 1:
        return rank(q, k, first_B, end_B, count=count, tile_best=tile)[1]
    if tile is None:
        lists = [rank(q, k, first_B, end_B, count=count)]
    else:
        # This shard's first slots may be the rest of a tile that began on the shard before.
        whole_B = jnp.where(first_B < 0, first_B % tile, first_B)
        rest = rank(q, k, first_B, jnp.minimum(whole_B, end_B), count=1)
        lists = [rest, rank(q, k, whole_B, end_B, count=count, tile_best=tile)]
    values = jnp.concatenate([values for values, _ in lists], axis=-1)
    slots = jnp.concatenate([slots for _, slots in lists], axis=-1)
    slots = jnp.where(slots < 0, -1, slots + offset)
    values, slots = ctx.gather_seq(values, -1), ctx.gather_seq(slots, -1)
    if tile is not None:
        slots = _best_of_tiles(values, slots, start, tile, allowed)
    return merge_topk(values, slots, count, allowed)[1]


def tolerance(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B K S H"],
    stop: Int[Array, " B"],
    ctx: LayerContext,
) -> Float[Array, "B T N"]:
    """The largest difference of two scores that is a tie (see `ties`), for each query.

    |k| is the root mean square of the text's first keys: all keys would have to be read twice.
    """
    slots = ctx.seq_offset(k.shape[2]) + jnp.arange(min(_SAMPLE, k.shape[2]))
    number_B = jnp.clip(stop, 1, _SAMPLE)
    held_BS = slots < number_B[:, None]
    keys = jnp.where(held_BS[:, None, :, None], k[:, :, : len(slots)].astype(jnp.float32), 0.0)
    squares_BK = jnp.sum(keys**2, axis=(2, 3))
    squares_BK = ctx.psum_seq(squares_BK) if ctx.seq_size > 1 else squares_BK
    size_BK = jnp.sqrt(squares_BK / (number_B[:, None] * k.shape[3]))
    size_BN = jnp.repeat(size_BK, q.shape[2] // k.shape[1], axis=1)
    length_BTN = jnp.linalg.norm(q.astype(jnp.float32), axis=-1)
    return ties.tolerance(k.dtype) * size_BN[:, None] * length_BTN


def _best_of_tiles(
    values: Float[Array, "B T N E"],
    slots: Int[Array, "B T N E"],
    start: int,
    tile: int,
    allowed: Float[Array, "B T N"],
) -> Int[Array, "B T N E"]:
    """The listed slots with -1 for those that another one of their tile beats or precedes."""
    s, r = slots[..., :, None], slots[..., None, :]
    value, rival = values[..., :, None], values[..., None, :]
    together = (r >= 0) & ((s - start) // tile == (r - start) // tile)
    allowed = allowed[..., None, None]
    beaten = together & ((rival - allowed > value) | ((rival >= value - allowed) & (r < s)))
    return jnp.where(jnp.any(beaten, axis=-1), -1, slots)


def scramble_heads(
    q: Float[Array, "B T N H"], kv_heads: int, ctx: LayerContext
) -> Float[Array, "B T N H"]:
    """Queries in an order in which head h meets kv head h mod K, instead of h // G.

    What the authors' released decode does (by reshaping without a transpose). `kv_heads` are this
    shard's.
    """
    group = q.shape[2] // kv_heads
    every = ctx.gather_heads(q, axis=2)
    every_BTGKH = every.reshape(*q.shape[:2], group, -1, q.shape[3])
    mine_BTGKH = jax.lax.dynamic_slice_in_dim(
        every_BTGKH, ctx.head_offset(kv_heads), kv_heads, axis=3
    )
    return jnp.swapaxes(mine_BTGKH, 2, 3).reshape(q.shape)  # [B, T, K * G, H]


def centres_of_chunk(
    named: Int[Array, "B T N C"], slots: int, kept: int, ctx: LayerContext
) -> Int[Array, "B M"]:
    """The `kept` slots of most votes, ascending, then -1; `slots` is the length of the cache."""
    votes_BS = ctx.psum_heads(_tally(named.reshape(named.shape[0], -1), slots))
    if platform() == "tpu":
        ranked_BS = jnp.where(votes_BS > 0, votes_BS.astype(jnp.float32), -jnp.inf)
        return select_large_k(ranked_BS, kept, size=kept)
    # A launch for each of its counting passes makes that 0.41 ms on an H200; this takes 0.06.
    most_BM, slots_BM = _most(votes_BS, min(kept, slots))
    ascending_BM = jnp.sort(jnp.where(most_BM > 0, slots_BM, _LAST), axis=-1)
    return jnp.where(ascending_BM == _LAST, -1, ascending_BM)


def _most(votes: Int[Array, "B S"], count: int) -> tuple[Int[Array, "B M"], Int[Array, "B M"]]:
    """`lax.top_k`; of many slots by way of the pages that can hold them, for it sorts them all.

    Every page that ranks before a slot's own, by its most votes and then by its number, holds a
    slot that ranks before it: the `count` best slots lie in the `count` best pages.
    """
    batch, slots = votes.shape
    if slots < _MANY or slots % _LANES or count > slots // _LANES:
        most_BM, at_BM = jax.lax.top_k(votes, count)
        return most_BM, at_BM
    pages_BPZ = votes.reshape(batch, -1, _LANES)
    best_BM = jnp.sort(jax.lax.top_k(jnp.max(pages_BPZ, axis=-1), count)[1], axis=-1)
    # Ascending pages: what ties goes to the lower slot here too.
    listed_BMZ = jnp.take_along_axis(pages_BPZ, best_BM[..., None], axis=1)
    most_BM, at_BM = jax.lax.top_k(listed_BMZ.reshape(batch, -1), count)
    page_BM = jnp.take_along_axis(best_BM, at_BM // _LANES, axis=1)
    return most_BM, page_BM * _LANES + at_BM % _LANES


def _tally(named: Int[Array, "B E"], slots: int) -> Int[Array, "B S"]:
    """How often each slot is named."""
    batch, entries = named.shape
    if platform() != "tpu":
        # A negative index would wrap around; one past the end is what `drop` drops.
        at_BE = jnp.where(named < 0, slots, named)
        rows_B1 = jnp.arange(batch)[:, None]
        return jnp.zeros((batch, slots), jnp.int32).at[rows_B1, at_BE].add(1, mode="drop")
    # A TPU scatters single elements slowly: there the page and the place of every entry are one-hot
    # rows, whose product counts the pairs exactly (float32 sums of less than 2^24).
    pages_P, places_Z = jnp.arange(-(-slots // _LANES)), jnp.arange(_LANES)
    spare = -entries % min(_VOTES, entries)
    blocks_BXE = jnp.pad(named, ((0, 0), (0, spare)), constant_values=-1).reshape(
        batch, -1, min(_VOTES, entries)
    )

    def add(votes_BPZ: Array, block_BE: Array) -> tuple[Array, None]:
        page_BEP = (block_BE[..., None] // _LANES == pages_P).astype(jnp.bfloat16)
        place_BEZ = (block_BE[..., None] % _LANES == places_Z).astype(jnp.bfloat16)
        pairs_BPZ = jnp.einsum(
            "BEP,BEZ->BPZ", page_BEP, place_BEZ, preferred_element_type=jnp.float32
        )
        return votes_BPZ + pairs_BPZ, None

    empty_BPZ = jnp.zeros((batch, len(pages_P), _LANES), jnp.float32)
    votes_BPZ, _ = jax.lax.scan(add, empty_BPZ, jnp.swapaxes(blocks_BXE, 0, 1))
    return votes_BPZ.reshape(batch, -1)[:, :slots].astype(jnp.int32)


def centres_of_token(
    named: Int[Array, "B T N C"], kept: int, ctx: LayerContext
) -> Int[Array, "B M"]:
    """`centres_of_chunk` for a few votes, by comparing each with each; at most E = T N C slots."""
    every = ctx.gather_heads(named, axis=2)
    slot_BE = every.reshape(every.shape[0], -1)
    slot, rival = slot_BE[:, :, None], slot_BE[:, None, :]
    entry_E = jnp.arange(slot_BE.shape[1])
    votes_BE = jnp.sum(slot == rival, axis=-1)
    repeats_BE = jnp.any((slot == rival) & (entry_E < entry_E[:, None]), axis=-1)
    some_BE = (slot_BE >= 0) & ~repeats_BE
    more = votes_BE[:, None, :] > votes_BE[:, :, None]
    same = votes_BE[:, None, :] == votes_BE[:, :, None]
    ahead = some_BE[:, None, :] & (more | (same & (rival < slot)))
    stays_BE = some_BE & (jnp.sum(ahead, axis=-1) < kept)
    ascending_BM = jnp.sort(jnp.where(stays_BE, slot_BE, _LAST), axis=-1)[:, :kept]
    return jnp.where(ascending_BM == _LAST, -1, ascending_BM)


def spread(
    centres: Int[Array, "B M"], span: int, start: int, stop: Int[Array, " B"]
) -> tuple[Int[Array, "B C"], Int[Array, " B"]]:
    """The union of the spans around ascending centres, within start <= s < stop[b].

    A span is the `span // 2` slots before its centre, the centre, and those after it.

    Returns:
      (slots, number): C = M span slots of which the first number[b] count, ascending.
    """
    low_BM = jnp.maximum(centres - span // 2, start)
    high_BM = jnp.minimum(centres - span // 2 + span, stop[:, None])
    # Equal spans in ascending order: what one shares with others, it shares with the one before.
    taken_BM = jnp.pad(high_BM[:, :-1], ((0, 0), (1, 0)), constant_values=start)
    low_BM = jnp.maximum(low_BM, taken_BM)
    ends_BM = jnp.cumsum(jnp.where(centres < 0, 0, high_BM - low_BM), axis=-1)
    begins_BM = jnp.pad(ends_BM[:, :-1], ((0, 0), (1, 0)))
    index_C = jnp.arange(centres.shape[1] * span)
    span_BC = jnp.sum(ends_BM[:, :, None] <= index_C, axis=1)
    span_BC = jnp.minimum(span_BC, centres.shape[1] - 1)
    slots_BC = index_C + jnp.take_along_axis(low_BM - begins_BM, span_BC, axis=1)
    return slots_BC, ends_BM[:, -1]
