"""Attention to a window at true distances, and to everything before it at one constant distance.

The attention of InfLLM (section 3.3); the scheme of positions is ReRoPE's. Three parts make one
softmax, merged by log-sum-exp:

- `near`, the window: keys are rotated as usual. Positions are counted from the window's first
  token, so angles stay small in a text of any length.
- `rest`: the first tokens, and those that have left the window and belong to no unit yet.
- `units`: the chosen units of the past. Rest and units stand at one distance: the query is rotated
  to it, and keys are used as cached, before rotary embedding.

While a chunk is read, keys at the window's edge are inside for its first queries and outside for
its last. So `near` attends the tokens that leave the window under a mask, then the other tokens of
the window, then the chunk itself. `rest` masks by a sliding window of one token over queries and
keys in reversed order, where "at least so far back" becomes "not ahead".

InfLLM ranks the tokens of a unit by what they receive from the queries within whose window they
stood, by query head (section 3.2): as in the authors' code, attention probability in the softmax
over all that the query sees, from queries 0 .. window - 1 behind the token, summed over queries.

Every shard of the slots attends to its own part of each; keys are not sent.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jax_longctx.caches import AppendCache, Store, Turned, local_run, local_slots
from jax_longctx.contract import QKV, Attended, LayerContext
from jax_longctx.parts.unit_memory import Layout, Packed
from pallas_kernels.attention_mass import Reduction, attention_mass
from pallas_kernels.common import Scale, Window, block_of, group_heads, merge
from pallas_kernels.decode_attention import attend_with_logits, decode_attention
from pallas_kernels.prefill_attention import cache_attention, causal_attention
from pallas_kernels.sparse_decode_attention import Around, Pages

_LAST = jnp.iinfo(jnp.int32).max
# Keys that dense decode rotates at once.
_BLOCK = 2048
# The window's keys of a lone token are read in whole tiles of the kernels.
_TILE = 128


class Entries(NamedTuple):
    """This shard's part of a monotone list of slots: keys and values [B, K, X, H].

    Entry i of row b is entry first[b] + i of the whole list; from number[b] on they are zeros.
    """

    k: Array
    v: Array
    first: Array
    number: Array


# This shard's amounts [B, N, X] of tokens first[b], first[b] + 1, ..., of which number[b] count.
Seen = tuple[Float[Array, "B N X"], Int[Array, " B"], Int[Array, " B"]]


def unit_pages(
    chosen: Int[Array, "B 1 C"], local: int, layout: Layout, ctx: LayerContext
) -> Int[Array, "B 1 E"]:
    """The pages of the chosen units on a shard of `local` slots, -1 for none or other shards'."""
    page = _page(layout, local)
    each = layout.block // page
    first = chosen * each + layout.sinks // page
    pages = jnp.where((chosen >= 0)[..., None], first[..., None] + jnp.arange(each), -1)
    return local_slots(pages.reshape(*chosen.shape[:2], -1), local // page, ctx)


def _page(layout: Layout, local: int) -> int:
    """Tokens of a page: it divides a unit, the first tokens and this shard's slots."""
    return math.gcd(layout.page, local)


@dataclasses.dataclass(frozen=True)
class WindowedAttention:
    """Attention of the tokens begin[b] .. begin[b] + valid[b] - 1, the newest in `store`.

    Attributes:
      new_tokens: the most of them.
    """

    store: Store
    begin: Int[Array, " B"]
    valid: Int[Array, " B"]
    new_tokens: int
    layout: Layout
    ctx: LayerContext

    def _read(
        self, slots: Int[Array, "B X"], number: Int[Array, " B"], *, descending: bool = False
    ) -> Entries:
        """This shard's entries of each row's list, whose first number[b] entries count."""
        size = self.store.sizes[2]
        local_BX, first_B, number = local_run(slots, number, size, self.ctx, descending=descending)
        k, v = self.store.read(local_BX[:, None], near=True)
        return Entries(k, v, first_B, number)

    def rest(self, q: Float[Array, "B T N H"]) -> Attended:
        """Attention to the tokens outside of units that are `window` or more back.

        `q` stands at the constant distance.
        """
        queries, layout, scale = q.shape[1], self.layout, self.ctx.scale
        in_units_B = layout.units(self.begin) * layout.block
        newest_B = self.begin + self.valid - 1 - layout.window
        index_X = jnp.arange(layout.sinks + layout.block - 1 + queries)
        # From the newest down, over the units to the first tokens.
        before_B = newest_B - layout.sinks - in_units_B + 1
        over_BX = jnp.where(index_X < before_B[:, None], 0, in_units_B[:, None])
        slots_BX = newest_B[:, None] - index_X - over_BX
        number_B = jnp.maximum(newest_B + 1 - in_units_B, 0)
        entries = self._read(slots_BX, number_B, descending=True)
        # Query t sees entry i where t >= valid - 1 - i; r = T - 1 - t counts them from the last.
        window = Window(1, self.valid - queries - entries.first)
        q = jnp.flip(q, axis=1)
        out, lse = cache_attention(
            q, entries.k, entries.v, entries.number, scale=scale, window=window
        )
        return jnp.flip(out, axis=1), jnp.flip(lse, axis=1)

    def beyond(
        self, q: Float[Array, "B 1 N H"], chosen: Int[Array, "B 1 C"], pages: Int[Array, "B 1 E"]
    ) -> Attended:
        """`rest` and `units` of a lone token as one; `pages` are those of the chosen units."""
        ways = [functools.partial(self._up_to_window, pages)]
        if self.ctx.seq_size == 1 and chosen.shape[2] and self._page == self.layout.block:
            ways.insert(0, functools.partial(self._around_units, chosen))
        out, lse = self.store.attend_pages(q, ways, self.ctx)
        return out, lse

    def _around_units(self, chosen: Int[Array, "B 1 C"]) -> list[Pages]:
        """Units that are pages, and what lies around the units."""
        layout = self.layout
        end_B = jnp.maximum(self.begin + 1 - layout.window, 0)
        start_B = jnp.minimum(end_B, layout.sinks)
        # Behind the last unit less than another one is left, or just one.
        stop_B = jnp.minimum(layout.sinks + layout.units(self.begin) * layout.block, end_B)
        around = Around(end_B, layout.sinks, layout.block)
        first = layout.sinks // self._page
        return [Pages(chosen, start_B, stop_B, self._page, around=around, first=first)]

    def _up_to_window(self, chosen: Int[Array, "B 1 E"]) -> list[Pages]:
        """All pages up to the window."""
        batch, (kv_heads, local) = len(chosen), self.store.sizes[1:3]
        layout, page = self.layout, self._page
        sinks, each = layout.sinks // page, layout.block // page
        # Behind the last unit less than another one is left.
        last_B1 = sinks + layout.units(self.begin)[:, None] * each
        rest = jnp.broadcast_to(jnp.arange(sinks), (batch, sinks)), last_B1 + jnp.arange(each)
        rest_B1E = local_slots(jnp.concatenate(rest, axis=1)[:, None], local // page, self.ctx)
        pages = self._some_first(jnp.concatenate([rest_B1E, chosen], axis=2))
        pages = jnp.broadcast_to(pages, (batch, kv_heads, pages.shape[2]))
        stop_B = self.begin + 1 - layout.window
        if self.ctx.seq_size > 1:
            stop_B = self.ctx.slots(local).below(stop_B)
        return [Pages(pages, jnp.zeros_like(stop_B), stop_B, page)]

    def units(self, q: Float[Array, "B T N H"], chosen: Int[Array, "B 1 E"]) -> Attended:
        """Attention to the chosen units' pages."""
        page, pages, number_B1 = self._page, self._some_first(chosen), jnp.sum(chosen >= 0, axis=-1)
        slots = jnp.where(pages[..., None] < 0, -1, pages[..., None] * page + jnp.arange(page))
        k, v = self.store.read(slots.reshape(len(q), 1, -1))
        return cache_attention(q, k, v, number_B1[:, 0] * page, scale=self.ctx.scale)

    @property
    def _page(self) -> int:
        return _page(self.layout, self.store.sizes[2])

    def _some_first(self, pages: Int[Array, "B 1 E"]) -> Int[Array, "B 1 E"]:
        """The listed pages, then -1 for those that other shards hold."""
        if self.ctx.seq_size == 1:
            return pages
        pages = jnp.sort(jnp.where(pages >= 0, pages, _LAST), axis=-1)
        return jnp.where(pages == _LAST, -1, pages)

    def near(
        self, new: QKV, others: list[Attended], ring: Float[Array, "B N M"]
    ) -> tuple[Attended, Float[Array, "B N M"], Packed]:
        """Attention to the window, merged with this shard's `others`, the updated ring, and what
        the units that the new tokens may complete are packed from.

        Args:
          new: the new tokens', before rotary embedding; queries that have grown.
        """
        q, k, v = new
        if q.shape[1] == 1:
            part, keys, seen = self._token(q, others)
            return part, *self._kept(ring, keys, seen, None)
        window = self.layout.window
        start_B = jnp.maximum(self.begin - window, 0)
        entries = self._read(start_B[:, None] + jnp.arange(window), self.begin - start_B)
        first_B = start_B + entries.first
        back_BX = (self.begin - first_B)[:, None] - jnp.arange(entries.k.shape[2])
        near = self.ctx.rotate(jnp.swapaxes(entries.k, 1, 2), window - back_BX)
        entries = entries._replace(k=jnp.swapaxes(near, 1, 2))
        at_BT = jnp.broadcast_to(window + jnp.arange(q.shape[1]), q.shape[:2])
        new = self.ctx.rotate(q, at_BT), self.ctx.rotate(k, at_BT), v
        part, seen, own = self._chunk(new, entries, back_BX, others)
        keys, _ = self.store.read(self._leaving()[:, None], near=True, values=False)
        return part, *self._kept(ring, keys, (seen, first_B, entries.number), own)

    def _leaving(self) -> Int[Array, "B E"]:
        """This shard's slots of the tokens of the units that the new tokens may complete."""
        slots = self.layout.completed(self.begin, self.new_tokens).reshape(len(self.begin), -1)
        return local_slots(slots, self.store.sizes[2], self.ctx)

    def _token(self, q: Array, others: list[Attended]) -> tuple[Attended, Array, Seen]:
        """A lone token: its attention, the keys of `_leaving`, and amounts for `_kept`."""
        window, store, scale = self.layout.window, self.store, self.ctx.scale
        leaving_BE = self._leaving()
        start_B, more = jnp.maximum(self.begin + 1 - window, 0), leaving_BE.shape[1]
        slots_BX = start_B[:, None] + jnp.arange(-(-(window + more) // _TILE) * _TILE - more)
        number_B, size = self.begin + 1 - start_B, store.sizes[2]
        slots_BX, first_B, number_B = local_run(slots_BX, number_B, size, self.ctx)
        inside = slots_BX.shape[1]
        index_X = np.arange(inside + more)
        at: Any = (index_X + 1)[None]
        if self.ctx.seq_size > 1:
            at = first_B[:, None] + at
        slots_BX = jnp.concatenate([slots_BX, leaving_BE], axis=1)
        k, v = store.read(slots_BX[:, None], Turned(at, self.ctx, more), near=True)
        q = self.ctx.rotate(q, (self.begin - start_B + 1)[:, None])
        there_BX, first_B = index_X < number_B[:, None], start_B + first_B
        out, lse, logits = attend_with_logits(q, k, v, number_B, scale=scale)
        part = self.ctx.seq_merge(*merge([*others, (out, lse)]))
        log_total_BN1 = jnp.swapaxes(self.ctx.with_sinks(part[1]), 1, 2)
        shares = jnp.where(there_BX[:, None], logits - log_total_BN1, -jnp.inf)
        return part, k[:, :, inside:], (jnp.exp(shares), first_B, number_B)

    def _chunk(
        self, new: QKV, entries: Entries, back: Array, others: list[Attended]
    ) -> tuple[Attended, Float[Array, "B N X"], Float[Array, "B N T"]]:
        """A chunk behind the entries; amounts of entries that are no keys are garbage."""
        q, k, v = new
        queries, scale = q.shape[1], self.ctx.scale
        window = Window(self.layout.window, back[:, 0])
        k_edge, v_edge = (x[:, :, :queries] for x in (entries.k, entries.v))
        parts = [
            *others,
            cache_attention(q, k_edge, v_edge, entries.number, scale=scale, window=window),
        ]
        if entries.k.shape[2] > queries:
            k_stay, v_stay = (x[:, :, queries:] for x in (entries.k, entries.v))
            number_B = entries.number - queries
            parts.append(cache_attention(q, k_stay, v_stay, number_B, scale=scale))
        earlier = self.ctx.seq_merge(*merge(parts))
        part = merge([earlier, causal_attention(q, k, v, scale=scale)])
        own, counted_BT = jnp.swapaxes(k, 1, 2), jnp.arange(queries) < self.valid[:, None]
        return part, *self._mass(q, part[1], entries.k, back, own, counted_BT)

    def _mass(
        self, q: Array, lse: Array, near: Array, back: Array, own: Array, counted: Array
    ) -> tuple[Float[Array, "B N X"], Float[Array, "B N T"]]:
        """Probabilities that the entries' tokens and the chunk's own received."""
        size, scale = near.shape[2], self.ctx.scale
        # In reversed order the window's edge is a causal mask, and padding comes first.
        lse = jnp.where(counted[..., None], self.ctx.with_sinks(lse), -jnp.inf)
        edge_B = self.layout.window - 1 - q.shape[1] + size - back[:, 0]
        turned = (jnp.flip(q, axis=1), jnp.flip(near, axis=2), jnp.flip(lse, axis=1))
        seen = _mass_by_head(*turned, jnp.full_like(self.valid, size), edge_B, scale)
        new = _mass_by_head(q, own, lse, self.valid, jnp.zeros_like(self.valid), scale)
        return jnp.flip(seen, axis=2), new

    def _kept(
        self,
        ring: Float[Array, "B N M"],
        keys: Float[Array, "B K E H"],
        seen: Seen,
        new: Float[Array, "B N T"] | None,
    ) -> tuple[Float[Array, "B N M"], Packed]:
        """The ring after the new tokens have joined, and what units are packed from.

        Args:
          keys: those of `_leaving`.
          seen: of which the tokens may include the new ones.
          new: amounts of the new tokens, the same on every shard, unless `seen` has them.
        """
        size, slot_M = ring.shape[2], jnp.arange(ring.shape[2])

        def by_slot(amounts: Array, first: Array, number: Array) -> Array:
            index_BM = (slot_M - first[:, None]) % size
            at_BM = jnp.minimum(index_BM, amounts.shape[2] - 1)
            picked = jnp.take_along_axis(amounts, at_BM[:, None], axis=2)
            return jnp.where((index_BM < number[:, None])[:, None], picked, 0.0)

        joins_BM = (slot_M - self.begin[:, None]) % size < self.valid[:, None]
        added = self.ctx.psum_seq(by_slot(*seen))
        if new is not None:
            added = added + by_slot(new, self.begin, self.valid)
        # A new token's slot holds the amount of a packed one.
        ring = jnp.where(joins_BM[:, None], 0.0, ring) + added
        packed = self.layout.completed(self.begin, self.new_tokens)
        slot_B1E = packed.reshape(len(packed), 1, -1) % size
        return ring, Packed(jnp.take_along_axis(ring, slot_B1E, axis=2), keys)


def _mass_by_head(
    q: Array, k: Array, lse: Array, lengths: Array, causal_start: Array, scale: Scale
) -> Float[Array, "B N S"]:
    """`attention_mass` of every query head alone."""
    grouped = group_heads(q, k.shape[1]), group_heads(lse[..., None], k.shape[1])
    heads_G = tuple(jnp.moveaxis(x, 2, 0) for x in grouped)  # [G, B, K, T, H], [G, B, K, T, 1]

    def one(head: tuple[Array, Array]) -> Array:
        q_BTKH, lse_BTK1 = (jnp.swapaxes(x, 1, 2) for x in head)
        how = Reduction(scale, causal_start=causal_start)
        return attention_mass(q_BTKH, k, lse_BTK1[..., 0], lengths, how)

    mass_BKGS = jnp.moveaxis(jax.lax.map(one, heads_G), 0, 2)
    return mass_BKGS.reshape(k.shape[0], -1, k.shape[2])


def attend_everything(
    q: Float[Array, "B 1 N H"], store: AppendCache, ctx: LayerContext
) -> tuple[Float[Array, "B 1 N H"], Float[Array, "B 1 N"]]:
    """Attention of the newest token, cached already, to all tokens at their true positions.

    Keys are rotated as they are read, a block at a time: no second cache is needed.
    """
    slots = store.k.shape[2]
    block, offset, held_B = math.gcd(slots, _BLOCK), ctx.seq_offset(slots), store.held(ctx)
    q = ctx.rotate_queries(q, store.position[:, None] - 1)

    def part(index: Int[Array, ""]) -> tuple[Array, Array]:
        begin = index * block
        k, v = (block_of(x, begin, block) for x in (store.k, store.v))
        at_BZ = jnp.broadcast_to(offset + begin + jnp.arange(block), (q.shape[0], block))
        k = jnp.swapaxes(ctx.rotate(jnp.swapaxes(k, 1, 2), at_BZ), 1, 2)
        return decode_attention(q, k, v, jnp.clip(held_B - begin, 0, block), scale=ctx.scale)

    def add(index: Int[Array, ""], so_far: tuple[Array, Array]) -> tuple[Array, Array]:
        return merge([so_far, part(index)])

    blocks = -(-jnp.max(held_B) // block)
    return ctx.seq_merge(*jax.lax.fori_loop(1, blocks, add, part(jnp.int32(0))))
