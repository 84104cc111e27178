"""A store in the host's memory; the device keeps a part of it.

The host holds the keys and values of the context, in pages. The device holds one buffer for each
row, the pool:

    [ head | frames | tail ]

- the head: the first tokens, which every step reads;
- the frames: the working set, pages that steps have chosen. A table says which page lies in which
  frame. A chosen page that has no frame is fetched into the one that was not used for longest;
- the tail: the newest tokens, from slot `base` on.

During prefill every chunk is written to the tail and, in whole pages, to the host. The tail
moves on with the text. `end_context` ends that: from there on the tail has room for question and
answer, which stay on the device, so decode steps write nothing to the host. The host's pages do not
change either, so the working set stays valid from question to question.

Attention reads the pool where it lies: `attend_pages` and `read` find places of pages and slots.
What attends all keys (a chunk that is read by full attention) gets them on the device for the time
of one layer (`on_device`).

Where steps rank every key (`Reads.all_keys`), keys lie on the device as in an `AppendCache`, and
the pool is one of values alone.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jax_longctx.caches import paged
from jax_longctx.caches.append_only import AppendCache, Store, empty_append_cache, write_rows
from jax_longctx.caches.host_pages import (
    joined,
    page_shape,
    row_of,
    rows_to_host,
    shifted,
    to_device,
    to_host,
    whole_on_device,
    with_slots,
    write_at,
)
from jax_longctx.caches.paged import Near
from jax_longctx.caches.scope import Scope, Votes
from jax_longctx.caches.working_set import Fetches, WorkingSet, empty_working_set
from jax_longctx.contract import CacheShape, LayerContext, resized
from jax_longctx.errors import ConfigError
from jax_longctx.settings import SHARES
from jax_longctx.sharding import axes_field
from pallas_kernels.common import AnyCache, cut
from pallas_kernels.plane import each_array, part_of, rows_of
from pallas_kernels.quantised import AnyStored, apart, joined_as

TURNS = (16, 4, 1)
# Of each row, as in an `AppendCache`.
_COUNTS = ("length", "position", "context_length", "context_position")
# The pool is a multiple of this, which kernels tile by.
_GRANULE = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reads:
    """What a method reads of a store, in tokens, from which a working set is made.

    Attributes:
      page: tokens of a page. It divides 128.
      first: tokens at the beginning of a row that are always read.
      newest: tokens before a chunk or step that are always read.
      chosen: most pages that a step chooses, of one kv head with `apart`.
      chunk: most tokens of a segment.
      apart: whether every kv head chooses its own pages; if not, all heads choose the same.
      all_keys: whether steps read every key. Then keys stay on the device, and all else here is of
        values.
    """

    page: int
    first: int
    newest: int
    chosen: int
    chunk: int
    apart: bool
    all_keys: bool = False


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Offloaded(Store):
    """Keys and values of every token of a row; the context's lie in the host's memory.

    Attributes:
      page: tokens of a page.
      head: pages of the head.
      newest, chunk: as in `Reads`.
      settled: whether the context has ended.
      frames: the page in each frame of the pool.
      k, v: the host's pages, [B, P, K, page / lines, lines, H], as they are stored.
      k_scales, v_scales: of 8 bits, [B, K, S]; None for arrays.
      pool_k, pool_v: head, frames and tail, on the device.
      keys: every key, on the device; else None. With them `k`, `k_scales` and `pool_k` are None.
      base: the first slot that the tail holds. The head counts where it is not 0.
      length, position, context_length, context_position: as in `AppendCache`.
    """

    fetches = True
    page: int = dataclasses.field(metadata={"static": True})
    head: int = dataclasses.field(metadata={"static": True})
    newest: int = dataclasses.field(metadata={"static": True})
    chunk: int = dataclasses.field(metadata={"static": True})
    settled: bool = dataclasses.field(metadata={"static": True})
    frames: WorkingSet
    k: Any = axes_field("batch", None, "kv_heads", None, None, None, in_place=True, host=True)
    v: Any = axes_field("batch", None, "kv_heads", None, None, None, in_place=True, host=True)
    k_scales: Any = axes_field("batch", "kv_heads", None, in_place=True)
    v_scales: Any = axes_field("batch", "kv_heads", None, in_place=True)
    pool_k: Any = axes_field("batch", "kv_heads", "room", None, in_place=True)
    pool_v: AnyCache = axes_field("batch", "kv_heads", "room", None, in_place=True)
    keys: Any = axes_field("batch", "kv_heads", "slots", None, in_place=True)
    base: Int[Array, " B"] = axes_field("batch")
    length: Int[Array, " B"] = axes_field("batch")
    position: Int[Array, " B"] = axes_field("batch")
    context_length: Int[Array, " B"] = axes_field("batch")
    context_position: Int[Array, " B"] = axes_field("batch")

    @property
    def sizes(self) -> tuple[int, ...]:
        batch, heads, _, width = self.pool_v.shape
        return batch, heads, self.frames.pages * self.page, width

    @property
    def nbytes(self) -> int:
        parts = (self.keys, self.k, self.v, self.k_scales, self.v_scales)
        return sum(x.nbytes for x in parts if x is not None)

    @property
    def all_keys(self) -> AnyCache:
        return self.keys

    @property
    def before_tail(self) -> int:
        """Pages of the pool before the tail."""
        return self.head + self.frames.count

    # The pool.

    def _placed(self, slots: Int[Array, "B ..."]) -> Int[Array, "B ..."]:
        """Where slots of the head or the tail lie in the pool; -1 for none, or beyond its end."""
        base = _beside(self.base, slots)
        in_head = (base > 0) & (slots < self.head * self.page)
        at = jnp.where(in_head, slots, slots - base + self.before_tail * self.page)
        return jnp.where((slots < 0) | (at >= self.pool_v.shape[2]), -1, at)

    def _placed_pages(self, pages: Int[Array, "B Y C"]) -> Int[Array, "B Y C"]:
        """Pages as pages of the pool; -1 for negative ones. All must be on the device."""
        base = _beside(self.base // self.page, pages)
        frames = self.frames.frames_of(pages) + self.head
        at = jnp.where(pages >= base, pages - base + self.before_tail, frames)
        at = jnp.where((base > 0) & (pages < self.head), pages, at)
        return jnp.where(pages < 0, -1, at)

    def _in_pool(self, part: paged.Pages | Near) -> paged.Pages | Near:
        """The same of the pool, with a list for each kv head; between head and tail lie frames."""
        if isinstance(part, Near):
            return Near(self._placed(part.slots))
        begin = jnp.where(self.base > 0, part.start, self._placed(part.start))
        ends = (self.base > 0) & (part.stop <= self.head * self.page)
        moved = part.stop - self.base + self.before_tail * self.page
        pages, stop = self._placed_pages(part.listed), jnp.where(ends, part.stop, moved)
        part = dataclasses.replace(part, listed=pages, start=begin, stop=stop)
        return paged.listed_apart(part, self.pool_v.shape[1])

    @property
    def _in_host(self) -> tuple[str, ...]:
        """What lies in the host's memory, of `k` and `v`."""
        return ("k", "v") if self.keys is None else ("v",)

    @property
    def _pools(self) -> tuple[AnyCache, ...]:
        """The pools of the arrays in the host's memory."""
        return tuple(getattr(self, f"pool_{name}") for name in self._in_host)

    @property
    def _hosts(self) -> tuple[tuple[Any, Any], ...]:
        """Its pages and their scales."""
        return tuple((getattr(self, x), getattr(self, f"{x}_scales")) for x in self._in_host)

    def _with(self, pools: Any, hosts: Any = None) -> "Offloaded":
        """The store with other `_pools` and `_hosts`."""
        found = {f"pool_{x}": pool for x, pool in zip(self._in_host, pools, strict=True)}
        for name, (pages, scales) in zip(self._in_host, hosts or self._hosts, strict=True):
            found |= {name: pages, f"{name}_scales": scales}
        return dataclasses.replace(self, **found)

    def _given(self, k: Any, v: Any) -> tuple[Any, ...]:
        """Those of these keys and values that lie in the host's memory."""
        return (k, v) if self.keys is None else (v,)

    # Writing.

    def append(
        self,
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        valid: Int[Array, " B"],
        ctx: LayerContext,
    ) -> "Offloaded":
        store = self if self.settled else self._moved_on()
        if store.keys is not None:
            keys = write_rows(store.keys, k, store.length, valid)
            store = dataclasses.replace(store, keys=keys)
        news = store._given(k, v)
        at = store.length - store.base + store.before_tail * store.page
        pools = [write_rows(x, new, at, valid) for x, new in zip(store._pools, news, strict=True)]
        if not store.settled and store.head:
            few = jnp.clip(store.head * store.page - store.length, 0, valid)
            pools = [
                write_rows(x, new, store.length, few, whole=False)
                for x, new in zip(pools, news, strict=True)
            ]
        length, position = store.length + valid, store.position + valid
        begin, store = store.length, dataclasses.replace(store, length=length, position=position)
        store = store._with(pools)
        return store if store.settled else store._kept(begin, k.shape[1])

    @property
    def _buffers(self) -> tuple[AnyCache, AnyStored]:
        # Beside all keys the pool of values is shorter.
        return (self.pool_k if self.keys is None else self.keys), self.pool_v

    @property
    def _last_base(self) -> int:
        """The largest `base`: the pages that a chunk touches must fit after it."""
        run = -(-(self.chunk + 2 * self.page) // self.page) * self.page
        return max(self.sizes[2] - run, 0)

    def _next_base(self) -> Int[Array, " B"]:
        """`base` for the next chunk or step."""
        base = jnp.maximum(self.length - self.newest, 0) // self.page * self.page
        return jnp.maximum(jnp.minimum(base, self._last_base), self.base)

    def _moved_on(self) -> "Offloaded":
        """The store with room in its tail for a chunk."""
        base = self._next_base()
        first = self.before_tail * self.page
        size = self.pool_v.shape[2] - first
        pools = [
            write_at(x, shifted(cut(x, first, size), base - self.base), first) for x in self._pools
        ]
        return dataclasses.replace(self._with(pools), base=base)

    def _kept(self, begin: Int[Array, " B"], tokens: int) -> "Offloaded":
        """The store whose pages with at most `tokens` tokens from `begin` on went to the host."""
        batch, pages = self.v.shape[:2]
        run = min(-(-(tokens - 1) // self.page) + 1, pages)
        first_B = jnp.clip(begin // self.page, 0, pages - run)
        at_B = first_B * self.page - self.base + self.before_tail * self.page

        def row(index: Any, hosts: tuple[Any, ...]) -> tuple[Any, ...]:
            found = []
            place = (index, first_B[index])
            for pool, (host, scales) in zip(self._pools, hosts, strict=True):
                part, own = apart(row_of(pool, index, at_B[index], run * self.page))
                scales = write_at(scales, own, first_B[index] * self.page, index)
                found.append((to_host(host, part, place, run), scales))
            return tuple(found)

        hosts = self._hosts
        hosts = row(0, hosts) if batch == 1 else jax.lax.fori_loop(0, batch, row, hosts)
        return self._with(self._pools, hosts)

    def end_context(self, reserve: int) -> "Offloaded":
        """As of any store; the tail then has room for the `reserve` tokens."""
        store = super().end_context(reserve)
        base, first = store._next_base(), store.before_tail * store.page
        size = _tail(store.newest, store.page, max(reserve, store.chunk), first)

        def tail(x: Any) -> Any:
            moved = shifted(cut(x, first, x.shape[2] - first), base - store.base)
            return joined(cut(x, 0, first), with_slots(moved, size))

        pools = [tail(x) for x in store._pools]
        return dataclasses.replace(store._with(pools), base=base, settled=True)

    # Reading.

    def fetch(
        self, wanted: Any, valid: Int[Array, " B"], ctx: LayerContext, *, step: bool
    ) -> "Offloaded":
        if isinstance(wanted, Scope):
            if not wanted.low.shape[1]:
                return self
            wanted = wanted.pages(self.page)
        far = (wanted >= self.head) & (wanted < (self.base // self.page)[:, None, None])
        far &= (valid > 0)[:, None, None]
        frames, fetches = self.frames.taken(jnp.where(far, wanted, -1), valid, ctx, step=step)
        return dataclasses.replace(self._with(self._fetched(fetches)), frames=frames)

    def select(self, votes: Votes, ctx: LayerContext) -> Scope:
        """Never a list: what is fetched is fetched by spans."""
        return votes.scope(self.length, self.sizes[2], ctx)

    def attend_pages(
        self, q: Float[Array, "B 1 N H"], ways: paged.Ways, ctx: LayerContext, prior: Any = None
    ) -> tuple[Array, ...]:
        """By the last of these ways: the pool is no run of slots."""
        way = [self._in_pool(part) for part in ways[-1]()]
        return super().attend_pages(q, [lambda: way], ctx, prior)

    def _where(self, slots: Array, *, near: bool) -> tuple[Array, Array]:
        if near:
            at = self._placed(slots)
        else:
            at = self._placed_pages(jnp.where(slots < 0, -1, slots // self.page)) * self.page
            at = jnp.where(slots < 0, -1, at + slots % self.page)
        return at if self.keys is None else slots, at

    def _fetched(self, fetches: Fetches) -> tuple[AnyCache, ...]:
        """The pools with new pages in their frames."""
        wanted, frame, new, rank = fetches
        rows, groups = jnp.arange(new.shape[0])[:, None, None], jnp.arange(new.shape[1])[:, None]
        counts = jnp.sum(new, axis=2, dtype=jnp.int32).reshape(-1)
        total = jnp.sum(counts)
        # Row, head, page and slot of the new entries, one after the other.
        part = jnp.arange(counts.size)
        before = jnp.sum(jnp.where(part < part[:, None], counts, 0), axis=1, dtype=jnp.int32)
        place = jnp.where(new, rank + before.reshape(*new.shape[:2], 1), new.size)
        about = jnp.broadcast_arrays(rows, groups, wanted, (frame + self.head) * self.page)
        entries = jnp.zeros((new.size, len(about)), jnp.int32)
        entries = entries.at[place].set(jnp.stack(about, axis=-1), mode="drop")

        def fetch(number: Array, pools: tuple[Any, ...]) -> tuple[Any, ...]:
            row, head, page, slot = entries[number]
            line, one = (row, page), head if self.frames.apart else None
            found = []
            for pool, (host, scales) in zip(pools, self._hosts, strict=True):
                numbers = to_device(host, line, one)  # [1, K, page, H]
                own = row_of(scales, row, page * self.page, self.page, one)
                found.append(write_at(pool, joined_as(pool, numbers, own), slot, row, head))
            return tuple(found)

        def turn(width: int, carry: tuple[Any, Any]) -> tuple[Any, Any]:
            number, pools = carry
            for offset in range(width):
                pools = fetch(number + offset, pools)
            return number + width, pools

        carry = jnp.int32(0), self._pools
        for width in TURNS:
            if width > new.size:
                continue
            carry = jax.lax.while_loop(
                lambda carry, width=width: carry[0] + width <= total,
                lambda carry, width=width: turn(width, carry),
                carry,
            )
        return carry[1]

    def on_device(self) -> AppendCache:
        """All keys and values on the device, as an `AppendCache`: a copy, for a short time."""
        slots = self.sizes[2]
        first = self.before_tail * self.page
        found = [] if self.keys is None else [with_slots(part_of(self.keys), slots)]
        for pool, (host, scales) in zip(self._pools, self._hosts, strict=True):
            parts = with_slots((whole_on_device(host), part_of(scales)), slots)
            whole = joined_as(pool, *parts)
            if self.settled:
                tail = cut(pool, first, pool.shape[2] - first)
                more = self.length - self.base

                def overlaid(old: Any, part: Array, more: Array = more) -> Any:
                    return write_rows(old, jnp.swapaxes(part, 1, 2), self.base, more)

                whole = jax.tree.map(overlaid, whole, tail)
            found.append(whole)
        return AppendCache(found[0], found[1], *(getattr(self, name) for name in _COUNTS))

    def row(self, row: Any) -> "Offloaded":
        """One row alone, its pages still in the host's memory."""

        def one_row(x: Any) -> Array:
            rows, first = rows_of(x)
            return jax.lax.dynamic_slice_in_dim(rows, first + row, 1)

        names = ("k", "v", "k_scales", "v_scales", "pool_k", "pool_v", "keys", "base", *_COUNTS)
        cuts = each_array(one_row, {name: getattr(self, name) for name in names})
        return dataclasses.replace(self, **cuts)

    def seated(self, given: "Offloaded", row: Any, place: Any) -> "Offloaded":
        """The store with the row `row` of another one, of any size, as its own row `place`.

        Both contexts have ended. The row's keys and values are on the device meanwhile.
        """
        whole, slots = given.row(row).on_device(), self.frames.pages * self.page
        k, v = (with_slots(x, slots) for x in (whole.k, whole.v))
        return self.filled(dataclasses.replace(whole, k=k, v=v), place)

    def filled(self, whole: AppendCache, row: Any = 0) -> "Offloaded":
        """The store with the keys and values of a context that has ended; frames are empty.

        Args:
          row: the first of the store's rows that `whole` replaces.
        """
        # A question may have been asked of the context since.
        ended, empty = whole.context_length, jnp.zeros_like(whole.length)
        base = dataclasses.replace(self, length=ended, base=empty)._next_base()
        first = self.before_tail * self.page
        store, pools, hosts = self, [], []
        if self.keys is not None:
            keys = with_slots(whole.k, self.keys.shape[2])
            store = dataclasses.replace(self, keys=write_at(self.keys, keys, 0, row))
        olds = zip(store._pools, store._hosts, strict=True)
        for x, (pool, (host, scales)) in zip(store._given(whole.k, whole.v), olds, strict=True):
            size = pool.shape[2] - first

            def tail(part: Array, size: int = size) -> Array:
                padded = resized(part, 2, part.shape[2] + size)
                cut_row = functools.partial(jax.lax.dynamic_slice_in_dim, slice_size=size, axis=1)
                return jax.vmap(cut_row)(padded, base)

            head = with_slots(x, self.head * self.page)
            pool = write_at(write_at(pool, head, 0, row), jax.tree.map(tail, x), first, row)
            pools.append(pool)
            numbers, own = apart(x)
            scales = write_at(scales, with_slots(own, self.sizes[2]), 0, row)
            hosts.append((rows_to_host(host, numbers, row, self.page), scales))
        counts = {name: getattr(whole, name) for name in _COUNTS} | {"base": base}
        write_row = jax.lax.dynamic_update_slice_in_dim
        return dataclasses.replace(
            store._with(pools, hosts),
            frames=self.frames.emptied(row, len(base)),
            **{name: write_row(getattr(self, name), x, row, 0) for name, x in counts.items()},
        )


def _beside(x: Int[Array, " B"], like: Array) -> Array:
    """`x` with axes of size 1 appended, up to the number of axes of `like`."""
    return x.reshape(-1, *(1 for _ in like.shape[1:]))


def _tail(newest: int, page: int, more: int, first: int) -> int:
    """Slots of a tail with room for `more` tokens, after `first` slots of the pool."""
    need = newest + more + 4 * page + 1
    return -(-(first + need) // _GRANULE) * _GRANULE - first


def empty_store(shape: CacheShape, reads: Reads) -> AppendCache | Offloaded:
    """An empty store of `shape.slots` slots, where the engine wants it.

    Raises:
      ConfigError: the working set is smaller than what a step reads.
    """
    if shape.offload is None:
        return empty_append_cache(shape)
    page, pages = reads.page, shape.slots // reads.page
    chosen = min(reads.chosen, pages)
    frames = SHARES * chosen
    if shape.offload.working_set is not None:
        frames = shape.offload.working_set // page
        if frames < chosen:
            raise ConfigError(
                f"a working set of {shape.offload.working_set:,} tokens is too small: a step "
                f"chooses up to {chosen * page:,} of a row of {shape.slots:,}; raise working_set "
                f"to that or more"
            )
    frames = max(min(frames, pages), 1)
    head = -(-reads.first // page)
    first = (head + frames) * page
    size = first + _tail(reads.newest, page, reads.chunk, first)
    group, groups = ("kv_heads", shape.num_kv_heads) if reads.apart else (None, 1)
    names = ("v",) if reads.all_keys else ("k", "v")
    arrays: dict[str, Any] = dict.fromkeys(("k", "k_scales", "pool_k", "keys"))
    if reads.all_keys:
        arrays["keys"] = shape.empty_slots(shape.slots)
    for name in names:
        numbers, scales = apart(jax.eval_shape(lambda: shape.empty_slots(shape.slots)))
        host = (shape.batch, pages, shape.num_kv_heads, *page_shape(page), numbers.shape[3])
        arrays |= {
            name: jnp.zeros(host, numbers.dtype),
            f"{name}_scales": jax.tree.map(jnp.zeros_like, scales),
            f"pool_{name}": shape.empty_slots(size),
        }
    # An array for each field: a donated buffer may be named once.
    counts = {name: jnp.zeros((shape.batch,), jnp.int32) for name in ("base", *_COUNTS)}
    return Offloaded(
        page=page,
        head=head,
        newest=reads.newest,
        chunk=reads.chunk,
        settled=False,
        frames=empty_working_set(shape.batch, groups, pages, frames, group),
        **arrays,
        **counts,
    )
