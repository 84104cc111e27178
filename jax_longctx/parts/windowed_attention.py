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
stand, by query head (section 3.2). There are two amounts, both summed over queries:

- `mass` (the authors' code): attention probability in the softmax over all that the query sees,
  from queries 0 .. window - 1 behind the token;
- `logit` (the paper's formula): dot product, from queries 1 .. window behind the token. Queries
  are summed first, so each key is multiplied with one vector.

Every shard of the slots attends to its own part of each; keys are not sent.
"""

import dataclasses
import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jax_longctx.caches import (
    AppendCache,
    Offloaded,
    buffers,
    local_run,
    local_slots,
    read_lines,
    read_slots,
)
from jax_longctx.contract import QKV, Attended, LayerContext
from jax_longctx.parts.unit_memory import Layout
from pallas_kernels.attention_mass import attention_mass
from pallas_kernels.common import block_of, group_heads, merge
from pallas_kernels.decode_attention import attend_logits, decode_attention, decode_logits
from pallas_kernels.prefill_attention import cache_attention, causal_attention
from pallas_kernels.sparse_decode_attention import sparse_decode_attention

Score = Literal["mass", "logit"]

_LAST = jnp.iinfo(jnp.int32).max
# Keys that dense decode rotates at once.
_BLOCK = 2048


class Run(NamedTuple):
    """This shard's part of a monotone list of slots: keys and values [B, K, X, H].

    Entry i of row b is entry first[b] + i of the whole list; from number[b] on they are zeros.
    """

    k: Array
    v: Array
    first: Array
    number: Array


class UnitPages(NamedTuple):
    """Chosen units as pages of this shard's part of a store.

    A page's size divides a unit, the first tokens and this shard's slots.

    Attributes:
      pages: the pages, then -1.
      number: how many there are.
      page: tokens of a page.
    """

    pages: Int[Array, "B X E"]
    number: Int[Array, "B X"]
    page: int


def unit_pages(
    chosen: Int[Array, "B X C"], local: int, layout: Layout, ctx: LayerContext
) -> UnitPages:
    """The pages of the chosen units, -1 for none, on a shard of `local` slots."""
    page = math.gcd(layout.page, local)
    each = layout.block // page
    first = chosen * each + layout.sinks // page
    pages = jnp.where((chosen >= 0)[..., None], first[..., None] + jnp.arange(each), -1)
    pages = local_slots(pages, local // page, ctx)
    mine = pages >= 0
    pages = jnp.where(mine, pages, _LAST).reshape(*chosen.shape[:2], -1)  # [B, X, C * each]
    number = jnp.sum(mine, axis=(2, 3))
    if ctx.seq_size > 1:
        pages = jnp.sort(pages, axis=-1)
    return UnitPages(jnp.where(pages == _LAST, -1, pages), number, page)


@dataclasses.dataclass(frozen=True)
class WindowedAttention:
    """Attention of the tokens begin[b] .. begin[b] + valid[b] - 1, the newest in `store`."""

    store: AppendCache | Offloaded
    begin: Int[Array, " B"]
    valid: Int[Array, " B"]
    layout: Layout
    ctx: LayerContext

    def _read(
        self, slots: Int[Array, "B X"], number: Int[Array, " B"], *, descending: bool = False
    ) -> Run:
        """This shard's entries of each row's list, whose first number[b] entries count."""
        size = self.store.sizes[2]
        local_BX, first_B, number = local_run(slots, number, size, self.ctx, descending=descending)
        k, v = read_slots(self.store, local_BX[:, None])
        return Run(k, v, first_B, number)

    def rest(self, q: Float[Array, "B T N H"], *, masked: bool) -> Attended:
        """Attention to the tokens outside of units that are `window` or more back.

        Args:
          q: at the constant distance.
          masked: without it every query sees the keys of the last query.
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
        run = self._read(slots_BX, number_B, descending=True)
        if queries == 1:
            return decode_attention(q, run.k, run.v, run.number, scale=scale)
        if not masked:
            return cache_attention(q, run.k, run.v, run.number, scale=scale)
        # Query t sees entry i where t >= valid - 1 - i; r = T - 1 - t counts them from the last.
        start_B = self.valid - queries - run.first
        how = {"scale": scale, "window": 1, "query_start": start_B}
        out, lse = cache_attention(jnp.flip(q, axis=1), run.k, run.v, run.number, **how)
        return jnp.flip(out, axis=1), jnp.flip(lse, axis=1)

    def units(self, q: Float[Array, "B T N H"], chosen: UnitPages) -> Attended:
        """Attention to the chosen units' pages; X = 1 list for all heads, or N lists."""
        batch, queries, heads, _ = q.shape
        (k, v), scale = buffers(self.store), self.ctx.scale
        kv_heads, local = k.shape[1:3]
        pages, number, page = chosen
        if queries == 1:
            lists = heads if pages.shape[1] > 1 else kv_heads
            pages = jnp.broadcast_to(pages, (batch, lists, pages.shape[2]))
            start_B, stop_B = jnp.zeros((batch,), jnp.int32), jnp.full((batch,), local, jnp.int32)
            how = {"page_size": page, "scale": scale}
            out, lse = sparse_decode_attention(q, k, v, pages, start_B, stop_B, **how)
            return out, lse
        slots = jnp.where(pages[..., None] < 0, -1, pages[..., None] * page + jnp.arange(page))
        shared = pages.shape[1] == 1
        slots_BXE = slots.reshape(batch, 1 if shared else kv_heads, -1)  # [B, 1, E], [B, K, G * E]
        k, v = read_lines(k, slots_BXE), read_lines(v, slots_BXE)
        if shared:
            return cache_attention(q, k, v, number[:, 0] * page, scale=scale)
        # Heads that see different keys are rows of their own.
        k, v = (x.reshape(batch * heads, 1, -1, x.shape[3]) for x in (k, v))
        rows = jnp.swapaxes(q, 1, 2).reshape(batch * heads, queries, 1, -1)
        out, lse = cache_attention(rows, k, v, number.reshape(-1) * page, scale=scale)
        out = jnp.swapaxes(out.reshape(batch, heads, queries, -1), 1, 2)
        return out, jnp.swapaxes(lse.reshape(batch, heads, queries), 1, 2)

    def near(
        self, new: QKV, others: list[Attended], score: Score, ring: Float[Array, "B N M"]
    ) -> tuple[Attended, Float[Array, "B N M"]]:
        """Attention to the window, merged with this shard's `others`, and the updated ring.

        Args:
          new: the new tokens', before rotary embedding.
        """
        q, k, v = new
        alone, window = q.shape[1] == 1, self.layout.window
        start_B = jnp.maximum(self.begin - window, 0)
        end_B = self.begin + self.valid if alone else self.begin
        slots_BX = start_B[:, None] + jnp.arange(window + alone)
        run = self._read(slots_BX, end_B - start_B)
        first_B = start_B + run.first
        back_BX = (self.begin - first_B)[:, None] - jnp.arange(run.k.shape[2])
        near = self.ctx.rotate(jnp.swapaxes(run.k, 1, 2), window - back_BX)
        run = run._replace(k=jnp.swapaxes(near, 1, 2))
        at_BT = jnp.broadcast_to(window + jnp.arange(q.shape[1]), q.shape[:2])
        q = self.ctx.rotate(q, at_BT)
        if alone:
            part, seen, own = *self._token(q, run, back_BX, others, score), None
        else:
            new = q, self.ctx.rotate(k, at_BT), v
            part, seen, own = self._chunk(new, run, back_BX, others, score)
        return part, self._kept(ring, (seen, first_B, run.number), own)

    def _token(
        self, q: Array, run: Run, back: Array, others: list[Attended], score: Score
    ) -> tuple[Attended, Float[Array, "B N X"]]:
        """A lone token, the run's entry with back 0."""
        window = self.layout.window
        logits = decode_logits(q, run.k, run.number, scale=self.ctx.scale)
        near = attend_logits(jnp.where((back < window)[:, None], logits, -jnp.inf), run.v)
        part = self.ctx.seq_merge(*merge([*others, near]))
        some = logits > -jnp.inf
        if score == "logit":
            return part, jnp.where(some & (back > 0)[:, None], logits, 0.0)
        counts, lse = some & (back < window)[:, None], part[1]
        return part, jnp.exp(jnp.where(counts, logits - jnp.swapaxes(lse, 1, 2), -jnp.inf))

    def _chunk(
        self, new: QKV, run: Run, back: Array, others: list[Attended], score: Score
    ) -> tuple[Attended, Float[Array, "B N X"], Float[Array, "B N T"]]:
        """A chunk behind the run; amounts of entries that are no keys are garbage."""
        q, k, v = new
        queries, scale = q.shape[1], self.ctx.scale
        leaving = {"window": self.layout.window, "query_start": back[:, 0]}
        k_edge, v_edge = (x[:, :, :queries] for x in (run.k, run.v))
        parts = [*others, cache_attention(q, k_edge, v_edge, run.number, scale=scale, **leaving)]
        if run.k.shape[2] > queries:
            k_stay, v_stay = (x[:, :, queries:] for x in (run.k, run.v))
            number_B = run.number - queries
            parts.append(cache_attention(q, k_stay, v_stay, number_B, scale=scale))
        earlier = self.ctx.seq_merge(*merge(parts))
        part = merge([earlier, causal_attention(q, k, v, scale=scale)])
        own, counted_BT = jnp.swapaxes(k, 1, 2), jnp.arange(queries) < self.valid[:, None]
        if score == "logit":
            return part, *self._logits(q, run.k, back, own, counted_BT)
        return part, *self._mass(q, part[1], run.k, back, own, counted_BT)

    def _mass(
        self, q: Array, lse: Array, near: Array, back: Array, own: Array, counted: Array
    ) -> tuple[Float[Array, "B N X"], Float[Array, "B N T"]]:
        """Probabilities that the run's tokens and the chunk's own received."""
        size, scale = near.shape[2], self.ctx.scale
        # In reversed order the window's edge is a causal mask, and padding comes first.
        lse = jnp.where(counted[..., None], lse, -jnp.inf)
        edge_B = self.layout.window - 1 - q.shape[1] + size - back[:, 0]
        turned = (jnp.flip(q, axis=1), jnp.flip(near, axis=2), jnp.flip(lse, axis=1))
        seen = _mass_by_head(*turned, jnp.full_like(self.valid, size), edge_B, scale)
        new = _mass_by_head(q, own, lse, self.valid, jnp.zeros_like(self.valid), scale)
        return jnp.flip(seen, axis=2), new

    def _logits(
        self, q: Array, near: Array, back: Array, own: Array, counted: Array
    ) -> tuple[Float[Array, "B N X"], Float[Array, "B N T"]]:
        """`_mass` for dot products."""
        queries, scale = q.shape[1], self.ctx.scale
        counted_BT11 = counted[..., None, None]
        sums_BTNH = jnp.cumsum(jnp.where(counted_BT11, q.astype(jnp.float32), 0.0), axis=1)
        total_B1NH = sums_BTNH[:, -1:]
        # Only the window's oldest tokens leave it meanwhile, as many as there are queries.
        edge = min(queries, near.shape[2])
        last_BE = jnp.clip(self.layout.window - back[:, :edge], 0, queries - 1)
        edge_BENH = jnp.take_along_axis(sums_BTNH, last_BE[..., None, None], axis=1)
        seen = [_dots(edge_BENH, near[:, :, :edge]), _dots(total_B1NH, near[:, :, edge:])]
        new = _dots(total_B1NH - sums_BTNH, own)
        return scale * jnp.concatenate(seen, axis=2), scale * new

    def _kept(
        self,
        ring: Float[Array, "B N M"],
        seen: tuple[Float[Array, "B N X"], Int[Array, " B"], Int[Array, " B"]],
        new: Float[Array, "B N T"] | None,
    ) -> Float[Array, "B N M"]:
        """The ring after the new tokens have joined.

        Args:
          seen: (amounts, first, number): this shard's amounts of tokens first[b], first[b] + 1, ...
            of which number[b] count; they may include the new ones.
          new: amounts of the new tokens, the same on every shard, unless `seen` has them.
        """
        slot_M = jnp.arange(ring.shape[2])

        def by_slot(amounts: Array, first: Array, number: Array) -> Array:
            index_BM = (slot_M - first[:, None]) % ring.shape[2]
            at_BM = jnp.minimum(index_BM, amounts.shape[2] - 1)
            picked = jnp.take_along_axis(amounts, at_BM[:, None], axis=2)
            return jnp.where((index_BM < number[:, None])[:, None], picked, 0.0)

        joins_BM = (slot_M - self.begin[:, None]) % ring.shape[2] < self.valid[:, None]
        added = self.ctx.psum_seq(by_slot(*seen))
        if new is not None:
            added = added + by_slot(new, self.begin, self.valid)
        # A new token's slot holds the amount of a packed one.
        return jnp.where(joins_BM[:, None], 0.0, ring) + added


def _mass_by_head(
    q: Array, k: Array, lse: Array, lengths: Array, causal_start: Array, scale: float
) -> Float[Array, "B N S"]:
    """`attention_mass` of every query head alone."""
    grouped = group_heads(q, k.shape[1]), group_heads(lse[..., None], k.shape[1])
    heads_G = tuple(jnp.moveaxis(x, 2, 0) for x in grouped)  # [G, B, K, T, H], [G, B, K, T, 1]

    def one(head: tuple[Array, Array]) -> Array:
        q_BTKH, lse_BTK1 = (jnp.swapaxes(x, 1, 2) for x in head)
        how = {"scale": scale, "causal_start": causal_start}
        return attention_mass(q_BTKH, k, lse_BTK1[..., 0], lengths, **how)

    mass_BKGS = jnp.moveaxis(jax.lax.map(one, heads_G), 0, 2)
    return mass_BKGS.reshape(k.shape[0], -1, k.shape[2])


def _dots(q: Float[Array, "B X N H"], k: Float[Array, "B K E H"]) -> Float[Array, "B N E"]:
    """Dot products of entry e with query e, or with the only query."""
    grouped = group_heads(q, k.shape[1])  # [B, K, G, X, H]
    dots = jnp.sum(grouped * k.astype(jnp.float32)[:, :, None], axis=-1)
    return dots.reshape(k.shape[0], -1, k.shape[2])


def attend_everything(
    q: Float[Array, "B 1 N H"], store: AppendCache, ctx: LayerContext
) -> tuple[Float[Array, "B 1 N H"], Float[Array, "B 1 N"]]:
    """Attention of the newest token, cached already, to all tokens at their true positions.

    Keys are rotated as they are read, a block at a time: no second cache is needed.
    """
    slots = store.k.shape[2]
    block, offset, held_B = math.gcd(slots, _BLOCK), ctx.seq_offset(slots), store.held(ctx)
    q = ctx.rotate(q, store.position[:, None] - 1)

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
