"""The scope of ReAttention (Liu et al. 2024, section 2.2): [global | kept | local].

The kept slots are spans around the slots of most votes, or around the middles of such pages.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jax_longctx.caches.counted_votes import most_voted
from jax_longctx.contract import LayerContext, OwnSlots, SlotLayout
from pallas_kernels.voted_slots import Spans, spans_around, takes_votes, upto, voted_slots

_LAST = jnp.iinfo(jnp.int32).max
# Slots that the threads of a GPU write as one line.
_LANES = 128
# The sizes of a page that spans are fetched by: few tokens cost what more of them do.
_LEAST_PAGE, _MOST_PAGE = 16, 128


def page_of_spans(span: int) -> int:
    """Slots of a page, where spans of `span` slots are fetched: at most a span, but for 16."""
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

    def pages(self, page: int) -> Int[Array, "B 1 C"]:
        """The pages of `page` slots that the kept spans touch, -1 for none."""
        first, each = self.low // page, pages_of_run(self.span, page)
        pages = first[..., None] + jnp.arange(each)
        there = (self.low < self.high)[..., None] & (pages * page < self.high[..., None])
        return jnp.where(there, pages, -1).reshape(len(self.low), 1, -1)

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

    def own(
        self, shard: OwnSlots, but_last: Int[Array, " B"] | None = None
    ) -> tuple[Int[Array, "B C"], Int[Any, "1 C"], Int[Array, " B"]]:
        """As `Scope.own` of the whole scope."""
        assert shard.shards == 1 and but_last is None
        return self.slots, np.arange(self.slots.shape[1])[None], self.number


def pages_of_run(slots: int, page: int) -> int:
    """The most pages of `page` slots that a run of `slots` slots touches."""
    return (slots + page - 2) // page + 1


class Votes(NamedTuple):
    """What makes a scope.

    Attributes:
      named: global slots, or pages; -1 for none.
      stop: the local part's first slot.
      spans: around the most named slots, or pages' middles.
      local_size: most slots of the local part.
    """

    named: Int[Array, "B T N C"]
    stop: Int[Array, " B"]
    spans: Spans
    local_size: int

    def scope(self, length: Int[Array, " B"], slots: int, ctx: LayerContext) -> Scope:
        """The scope of rows of these lengths, in caches of `slots` slots on each shard."""
        kept, span, global_size, page = self.spans
        pages_BM = most_voted(self.named, slots * ctx.seq_size // page, kept, ctx)
        centres_BM = jnp.where(pages_BM < 0, -1, pages_BM * page + page // 2)
        around = spans_around(centres_BM, span, global_size, self.stop)
        return Scope(*around, self.stop, length, global_size, span, self.local_size, kept)

    def listed(self, length: Int[Array, " B"], slots: int, ctx: LayerContext) -> Scope | Listed:
        """The same, of a lone token as a list where one launch makes it."""
        if self.named.shape[1] > 1 or ctx.seq_size > 1:
            return self.scope(length, slots, ctx)
        votes_BE = ctx.gather_heads(self.named, axis=2).reshape(len(self.named), -1)
        kept, span, global_size, _ = self.spans
        most = global_size + min(votes_BE.shape[1], kept) * span + self.local_size
        # Whole lines of threads write it.
        size = -(-min(most, slots) // _LANES) * _LANES
        if not takes_votes(votes_BE.shape[1], size):
            return self.scope(length, slots, ctx)
        found = voted_slots(votes_BE, self.stop, length, self.spans, slots=slots, size=size)
        return Listed(*found, most)
