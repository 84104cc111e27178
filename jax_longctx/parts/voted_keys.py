"""The keys that a layer votes for, and attention to them at positions 0, 1, 2, ...

ReAttention, section 2.2:

1. `best_keys`: every query head of every token names the keys of largest dot product;
2. `most_voted` (see `counted_votes`): each naming is one vote; the keys of most votes stay, ties to
   the lower slot;
3. `spans_around`: the union of the spans of slots around these keys, ascending;
4. `Scope`: these spans between the first slots and the newest tokens; each shard lists its part;
   `voted_scope` does steps 2 to 4; of a lone token a GPU lists the slots in one launch (`Listed`);
5. `attend_scope`: keys are cached before rotary embedding and rotated to their places in the scope.
   Every shard attends to its part of the scope, and the parts are merged by log-sum-exp.

All heads of a row share one selection; every row and layer has its own.

Ties. A key before rotary embedding does not depend on its position. In the first layer it depends
on its token alone, so equal tokens have equal keys. Their computed keys differ by rounding: a
matmul adds in another order for another chunk length, batch or shard. If the higher of two such
scores came first, rounding would decide what a query attends to. Therefore methods that rank keys
before rotary embedding take close scores for equal, and the lower slot comes first.

The tolerance is relative to the usual score of unrelated vectors, |q| |k| / sqrt(H), because the
rounding errors of a key's H numbers are independent. There are two kinds of errors:

- The key's float32 sums. On a CPU, scores of equal tokens differed by up to 2^-18.6 of a usual
  score for models of 2048 dimensions, and by 2^-17.4 where two numbers of the key dominate.
- Storing the key in 16 bits. A sum near the middle of two numbers is rounded to either of them.
  Where this happens to one of H numbers, the score changes by up to eps / sqrt(H).

The tolerance is several times larger. The 4 best of 100,000 random scores are that close by chance
for one of 100 queries in float32 and one of 7 in bfloat16; they tie, too. Rounding still decides in
two cases: an unrelated score differs by just the tolerance, or scores form a chain (see
`pallas_kernels.topk_scores.merge`). The 4 best of 100,000 random scores form one for less than one
of 1,000 queries in float32 and one of 100 in bfloat16.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jax_longctx.caches import AppendCache, Offloaded, lines_of, read_lines
from jax_longctx.contract import QKV, Attended, LayerContext, OwnSlots, SlotLayout, rope_angles
from jax_longctx.parts.counted_votes import most_voted
from pallas_kernels.common import AnyCache, block_of, merge
from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.dispatch import platform
from pallas_kernels.prefill_attention import cache_attention, causal_attention
from pallas_kernels.quantised import Quantised
from pallas_kernels.topk_scores import merge_topk, topk_scores
from pallas_kernels.voted_slots import Spans, spans_around, takes_votes, upto, voted_slots

# The text's first slots, by whose keys the size of a key is estimated.
_SAMPLE = 128
_LAST = jnp.iinfo(jnp.int32).max
# Slots that the threads of a GPU write as one line.
_LANES = 128
# The sizes of a page that spans are fetched by: few tokens cost what more of them do.
_LEAST_PAGE, _MOST_PAGE = 16, 128


def tie_tolerance(dtype: jnp.dtype) -> float:
    """The largest difference that is a tie, for keys of that dtype, in usual scores."""
    return max(2.0**-12, float(jnp.finfo(dtype).eps) / 2)


class KeySpan(NamedTuple):
    """The slots start <= s < stop[b] whose keys tokens rank.

    Attributes:
      valid: tokens of each row; those beyond name none.
      page: keys stand for pages of so many slots, and so do `start`, `stop` and what is named.
    """

    start: int
    stop: Int[Array, " B"]
    valid: Int[Array, " B"]
    page: int = 1


def best_keys(
    q: Float[Array, "B T N H"],
    k: AnyCache,
    span: KeySpan,
    ctx: LayerContext,
    *,
    count: int,
    sizes: Float[Array, "B K"] | None = None,
) -> Int[Array, "B T N C"]:
    """Global slots of each query's `count` best keys of the span; then -1.

    Scores that differ by at most `score_tolerance` tie.

    Args:
      sizes: what `key_sizes` gives, where the caller has it.
    """
    start, stop, valid, page = span
    own, alone = ctx.slots(k.shape[2], page), q.shape[1] == 1
    if sizes is None:
        sizes = key_sizes(k, stop, ctx, page)
    allowed = score_tolerance(q, sizes, k.dtype)
    if alone:
        # Nothing is masked behind the kernel, which would be a launch.
        stop = jnp.where(valid > 0, stop, 0)
    rank = functools.partial(topk_scores, tolerance=allowed, valid=None if alone else valid)
    first_B, end_B = jnp.broadcast_to(own.below(jnp.int32(start)), stop.shape), own.below(stop)
    values, slots = rank(q, k, (first_B, end_B), count=count)
    if ctx.seq_size == 1:
        return slots
    slots = jnp.where(slots < 0, -1, own.at(slots))
    values, slots = ctx.gather_seq(values, -1), ctx.gather_seq(slots, -1)
    return merge_topk(values, slots, count, allowed)[1]


def key_sizes(
    k: AnyCache, stop: Int[Array, " B"], ctx: LayerContext, page: int = 1
) -> Float[Array, "B K"]:
    """The root mean square of the text's first keys before `stop`: all would cost a second read."""
    slots = ctx.slots(k.shape[2], page).at(jnp.arange(min(_SAMPLE, k.shape[2])))
    number_B = jnp.clip(stop, 1, _SAMPLE)
    held_BS = slots < number_B[:, None]
    keys = jnp.where(held_BS[:, None, :, None], block_of(k, 0, len(slots)).astype(jnp.float32), 0.0)
    squares_BK = ctx.psum_seq(jnp.sum(keys**2, axis=(2, 3)))
    return jnp.sqrt(squares_BK / (number_B[:, None] * k.shape[3]))


def score_tolerance(
    q: Float[Array, "B T N H"], sizes: Float[Array, "B K"], dtype: jnp.dtype
) -> Float[Array, "B T N"]:
    """The largest difference of two scores that is a tie (see the module), for each query.

    Args:
      sizes: the size of a usual number of a key, as `key_sizes` has it.
      dtype: of the keys.
    """
    size_BN = tie_tolerance(dtype) * jnp.repeat(sizes, q.shape[2] // sizes.shape[1], axis=1)
    # Multiplied before the sum: XLA for GPUs makes a kernel of its own of what follows a sum.
    return jnp.linalg.norm(q.astype(jnp.float32) * size_BN[:, None, :, None], axis=-1)


def page_of_spans(span: int) -> int:
    """The size of a page by which spans of `span` slots are fetched: at most a span, but for 16."""
    return max(_LEAST_PAGE, min(2 ** (span.bit_length() - 1), _MOST_PAGE))


@dataclasses.dataclass(frozen=True)
class Scope:
    """[global | kept | local]: the slots that a row's newest tokens attend, ascending.

    Attributes:
      low, high: the kept spans, as `spans_around` returns them.
      stop: the local part's first slot.
      length: tokens of the row.
      global_size, span, local_size: most slots of the first part, of a span, of the last part.
      kept: the most spans that are not empty; None for all.
    """

    low: Int[Array, "B M"]
    high: Int[Array, "B M"]
    stop: Int[Array, " B"]
    length: Int[Array, " B"]
    global_size: int
    span: int
    local_size: int
    kept: int | None = None

    @property
    def most(self) -> int:
        """Slots at most."""
        spans = self.low.shape[1]
        spans = spans if self.kept is None else min(spans, self.kept)
        return self.global_size + spans * self.span + self.local_size

    @property
    def number(self) -> Int[Array, " B"]:
        """How many slots each row's scope has."""
        kept_B = jnp.sum(self.high - self.low, axis=-1)
        return jnp.minimum(self.length, self.global_size) + kept_B + self.length - self.stop

    def listed(self) -> tuple[Int[Array, "B C"], Int[Array, " B"]]:
        """(slots, number): the number[b] slots of each row, then -1; C = `most`."""
        every = SlotLayout().of_shard(_LAST, 1, 0)
        slots_BC, _, number_B = self.own(every)
        return slots_BC, number_B

    def brought_to(
        self,
        store: AppendCache | Offloaded,
        valid: Int[Array, " B"],
        ctx: LayerContext,
        *,
        step: bool,
    ) -> Any:
        """The store with the kept spans on the device (`AppendCache.brought_runs`)."""
        if not self.low.shape[1]:
            return store
        return store.brought_runs(self.low, self.high, self.span, valid, ctx, step=step)

    def own(
        self, shard: OwnSlots, but_last: Int[Array, " B"] | None = None
    ) -> tuple[Int[Array, "B Y"], Int[Any, "#B Y"], Int[Array, " B"]]:
        """The part that a shard holds, each row's newest `but_last[b]` tokens left out.

        Each part of the scope is a run of the shard's slots, and so is each span: they are listed
        without the list of the whole scope.

        Returns:
          (local, place, count): Y slots of the shard, ascending, -1 from entry count[b] on; entry i
          is entry place[b, i] of the scope. On one shard places are numpy's.
        """
        index_Y = np.arange(min(self.most, shard.size))
        end_B = self.length if but_last is None else self.length - but_last
        first_B = jnp.minimum(end_B, self.global_size)
        ends = shard.below(first_B), shard.below(self.stop), shard.below(end_B)
        own_first_B1, own_stop_B1, own_end_B1 = (x[:, None] for x in ends)
        low_BM, high_BM = shard.below(self.low), shard.below(self.high)
        inner_BY = index_Y - own_first_B1
        own_kept_B1, shift_BY, moved_BY = 0, 0, 0
        if self.low.shape[1]:
            ends_BM = upto(low_BM, high_BM)
            own_kept_B1 = jnp.sum(high_BM - low_BM, axis=-1, keepdims=True)
            # What takes an entry to its slot: that of the first span that ends behind it, and they
            # ascend with the spans.
            behind_BYM = ends_BM[:, None] > inner_BY[:, :, None]
            behind_BYM &= (high_BM > low_BM)[:, None]
            shift_BY = jnp.min((high_BM - ends_BM)[:, None], 2, where=behind_BYM, initial=_LAST)
            if shard.shards > 1:
                # And what takes a slot to its place among the kept ones; these descend.
                gone_BM = upto(self.low, self.high) - self.high
                moved_BY = jnp.max(gone_BM[:, None], 2, where=behind_BYM, initial=-_LAST)
        kept_BY = inner_BY < own_kept_B1
        last_BY = inner_BY - own_kept_B1 + own_stop_B1
        local_BY = jnp.where(kept_BY, inner_BY + shift_BY, last_BY)
        local_BY = jnp.where(inner_BY < 0, index_Y, local_BY)
        own_last_B1 = jnp.maximum(own_end_B1 - own_stop_B1, 0)
        count_B1 = own_first_B1 + own_kept_B1 + own_last_B1
        place: Any = index_Y[None]
        if shard.shards > 1:
            slot_BY = shard.at(local_BY)
            kept_place = slot_BY + moved_BY + self.global_size
            last_place = slot_BY + (self.number - self.length)[:, None]
            place = jnp.where(kept_BY, kept_place, last_place)
            place = jnp.where(inner_BY < 0, slot_BY, place)
        return jnp.where(index_Y < count_B1, local_BY, -1), place, count_B1[:, 0]


@dataclasses.dataclass(frozen=True)
class Listed:
    """The scope of a lone token as a list, on one shard.

    Attributes:
      slots: number[b] slots of each row, ascending, then -1.
      most: slots at most.
    """

    slots: Int[Array, "B C"]
    number: Int[Array, " B"]
    most: int

    def listed(self) -> tuple[Int[Array, "B C"], Int[Array, " B"]]:
        """(slots, number), as `Scope.listed`."""
        return self.slots, self.number

    def brought_to(
        self,
        store: AppendCache | Offloaded,
        valid: Int[Array, " B"],
        ctx: LayerContext,
        *,
        step: bool,
    ) -> Any:
        """As `Scope.brought_to`; `voted_scope` lists only where all slots are on the device."""
        return store

    def own(
        self, shard: OwnSlots, but_last: Int[Array, " B"] | None = None
    ) -> tuple[Int[Array, "B C"], Int[Any, "1 C"], Int[Array, " B"]]:
        """As `Scope.own` of the whole scope."""
        assert shard.shards == 1 and but_last is None
        return self.slots, np.arange(self.slots.shape[1])[None], self.number


def voted_scope(
    named: Int[Array, "B T N C"],
    stop: Int[Array, " B"],
    store: AppendCache | Offloaded,
    ctx: LayerContext,
    spans: Spans,
    *,
    local_size: int,
) -> "Scope | Listed":
    """The scope whose spans lie around the most named slots, or pages' middles.

    Args:
      named: global slots, or pages; -1 for none.
      local_size: the most slots of the last part, which begins at `stop`.
    """
    length, slots = store.length, store.sizes[2]
    kept, span, global_size, page = spans
    # What is fetched is fetched by spans.
    listed = not isinstance(store, Offloaded)
    if named.shape[1] == 1 and ctx.seq_size == 1 and listed:
        votes_BE = ctx.gather_heads(named, axis=2).reshape(len(named), -1)
        most = global_size + min(votes_BE.shape[1], kept) * span + local_size
        # Whole lines of threads write it.
        size = -(-min(most, slots) // _LANES) * _LANES
        if takes_votes(votes_BE.shape[1], size):
            found = voted_slots(votes_BE, stop, length, spans, slots=slots, size=size)
            return Listed(*found, most)
    pages_BM = most_voted(named, slots * ctx.seq_size // page, kept, ctx)
    centres_BM = jnp.where(pages_BM < 0, -1, pages_BM * page + page // 2)
    around = spans_around(centres_BM, span, global_size, stop)
    return Scope(*around, stop, length, global_size, span, local_size, kept)


def attend_scope(
    new: QKV,
    store: AppendCache | Offloaded,
    valid: Int[Array, " B"],
    scope: Scope | Listed,
    ctx: LayerContext,
) -> Attended:
    """Attention of the store's newest `valid[b]` tokens, the scope's last, causal among them.

    Args:
      new: the newest tokens', before rotary embedding.
      store: the scope's spans have been brought to it.
    """
    q, k, v = new
    alone, own = q.shape[1] == 1, ctx.slots(store.sizes[2])
    # A chunk attends to itself separately; a lone token is read from the cache with the others.
    slots_BX, key_BX, read_B = scope.own(own) if alone else scope.own(own, valid)
    begin_B = scope.number - valid
    # A rotary base that follows the length must follow the scope's, which bounds positions.
    ctx = dataclasses.replace(ctx, total=jnp.minimum(ctx.total, scope.most))
    (keys, values), (keys_B1X, values_B1X) = store.buffers, store.located(slots_BX[:, None])
    # Decode attention reads no further than the number; zeros there would take a launch.
    keys = rotated_lines(keys, keys_B1X[:, 0], key_BX, ctx, blank=not alone)
    values = read_lines(values, values_B1X, blank=not alone)
    at_BT = begin_B[:, None] + jnp.arange(q.shape[1])
    q = ctx.rotate(q, at_BT)
    if alone:
        return ctx.seq_merge(*decode_attention(q, keys, values, read_B, scale=ctx.scale))
    earlier = ctx.seq_merge(*cache_attention(q, keys, values, read_B, scale=ctx.scale))
    within = causal_attention(q, ctx.rotate(k, at_BT), v, scale=ctx.scale)
    return merge([earlier, within])


def rotated_lines(
    buffer: AnyCache,
    slots: Int[Array, "B X"],
    positions: Int[Any, "#B X"],
    ctx: LayerContext,
    *,
    but_last: int = 0,
    blank: bool = True,
) -> Float[Array, "B K X H"]:
    """The keys in this shard's `slots` for all heads, rotated to `positions`; zeros for -1.

    Args:
      but_last: the last so many are not rotated.
      blank: without it any key for -1.
    """
    turned_X1 = (np.arange(slots.shape[1]) < slots.shape[1] - but_last)[:, None]
    if platform() == "tpu" or isinstance(buffer, Quantised):
        # Half lines have another layout there: the cache would be copied. And 8 bits are turned
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
