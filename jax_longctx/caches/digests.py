"""What a selector keeps of each page of a cache: digests, and the largest products they allow."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jax_longctx.caches.append_only import Rewinding, write_rows
from jax_longctx.caches.branched import Branched, parting
from jax_longctx.contract import LayerContext
from jax_longctx.sharding import axes_field
from pallas_kernels.common import AnyCache
from pallas_kernels.dispatch import platform
from pallas_kernels.page_scores import Digests, SharedPages, page_scores, shared_page_scores
from pallas_kernels.plane import each_array, part_of
from pallas_kernels.select_pages import Best, select_pages


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PageDigests:
    """A box, a ball or a point for the keys of each page.

    Pages are this shard's, of `page` slots each. A method with `scores` of its own may keep other
    numbers of these shapes.

    Attributes:
      high: the box's upper corner, or the centre of a ball or point.
      low: the box's lower corner; None for the others.
      radius: the ball's; None for the others.
    """

    high: AnyCache = axes_field("batch", "kv_heads", "pages", None, in_place=True)
    low: AnyCache | None = axes_field("batch", "kv_heads", "pages", None, in_place=True)
    radius: Float[Array, "B K P"] | None = axes_field("batch", "kv_heads", "pages")

    @property
    def plain(self) -> Digests:
        """As the operations take them."""
        return Digests(self.high, self.low, self.radius)

    @property
    def vectors(self) -> AnyCache:
        """Both corners of each page's box as one vector of 2 H; a ball's or point's centre."""
        if self.low is None:
            return self.high
        return jnp.concatenate([part_of(self.high), part_of(self.low)], axis=-1)

    def scores(
        self, q: Float[Array, "B N H"], store: Any, page: int, ctx: LayerContext
    ) -> Float[Array, "B N P"]:
        """The largest (unscaled) q.k in a page's box or ball, q.centre for a point; float32.

        -inf from the first page on that begins beyond the tokens of `store`.
        """
        return digest_scores(q, self, store.held(ctx), page)

    def select(
        self, q: Float[Array, "B N H"], best: Best, page: int, ctx: LayerContext, **how: Any
    ) -> Int[Array, "B X C"]:
        """`select_pages` by these scores, on one shard; `how` are `size` and `together`."""
        return select_pages(q, self.plain, best, **how)

    def refreshed(
        self, method: Any, store: Any, past: Array, added: int, ctx: LayerContext, after: Any = None
    ) -> Any:
        """The digests after at most `added` tokens joined `store` behind slot `past`.

        The pages that the tokens touch are summarised anew from their keys, by
        `method.summarise`. That costs little more than the tokens' own keys, needs no state of a
        half-filled page, and is right after a rewind. A page's slots lie together on one shard.

        Args:
          after: what is made of the digests as they were, before these are written.
        """
        page = method.page_size
        batch, heads, slots, width = store.sizes
        pages = slots // page
        own = ctx.slots(pages, page)
        touched = own.most(min((added + page - 2) // page + 1, pages * own.shards))
        # A run of pages across the shard's border is shifted: pages may be summarised again.
        first_B = jnp.minimum(own.below(past // page), pages - touched)
        slot_BM = first_B[:, None] * page + jnp.arange(touched * page)
        paged = (batch, heads, touched, page, width)
        keys_BKPZH = store.read(slot_BM[:, None], near=True, values=False)[0].reshape(paged)
        held_BM = slot_BM < store.held(ctx)[:, None]
        new = method.summarise(keys_BKPZH, held_BM.reshape(-1, touched, page))
        count_B, digests = jnp.full_like(first_B, touched), self
        if after is not None:
            digests, _ = jax.lax.optimization_barrier((digests, after))

        def write(old: Any, new: Array) -> Any:
            if new.ndim == 3:
                return write(old[..., None], new[..., None])[..., 0]
            return write_rows(old, jnp.swapaxes(new, 1, 2), first_B, count_B)

        return each_array(write, digests, new)


@parting(PageDigests)
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BranchedDigests(Branched):
    """`PageDigests` of rows that go on from one context, of P = shared and own pages at most."""

    def _shared(self, page: int, ctx: LayerContext) -> SharedPages:
        """This shard's digests that rows share."""
        split = self.split
        if ctx.seq_size > 1:
            split = ctx.slots(self.shared.high.shape[2], page).below(split)
        return SharedPages(self.shared.plain, split)

    def scores(
        self, q: Float[Array, "B N H"], store: Any, page: int, ctx: LayerContext
    ) -> Float[Array, "B N P"]:
        """As `PageDigests.scores`."""
        shared = self._shared(page, ctx)
        pages_B = shared.split + jnp.maximum(-(-store.own.held(ctx) // page), 0)
        return shared_page_scores(q, self.own.plain, pages_B, shared)

    def select(
        self, q: Float[Array, "B N H"], best: Best, page: int, ctx: LayerContext, **how: Any
    ) -> Int[Array, "B X C"]:
        """As `PageDigests.select`, with a list for each kv head at least."""
        lists = select_pages(q, self.own.plain, best, shared=self._shared(page, ctx), **how)
        batch, number, size = lists.shape
        return jnp.broadcast_to(lists, (batch, max(number, self.own.high.shape[1]), size))

    def refreshed(
        self, method: Any, store: Any, past: Array, added: int, ctx: LayerContext, after: Any = None
    ) -> Any:
        """As `PageDigests.refreshed`, of the rows' own pages alone."""
        past = past - store.split
        return self.with_own(self.own.refreshed(method, store.own, past, added, ctx, after))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SelectiveCache(Rewinding):
    """All keys and values, and the digests of pages.

    Attributes:
      store: keys after rotary embedding, and values: a `Store`.
      digests: a summary of each page, `PageDigests`, or None where a method keeps none;
        `BranchedDigests` where rows share a context.
      prompt: tokens of context and question.
      kept: tokens attended in decode so far, summed over the steps, of each query head.
      steps: decode steps so far; `kept / steps` is the mean budget that was used.
    """

    store: Any
    digests: Any
    prompt: Int[Array, " B"] = axes_field("batch")
    kept: Int[Array, "B N"] = axes_field("batch", "heads")
    steps: Int[Array, " B"] = axes_field("batch")

    def rewind(self) -> Any:
        """The cache at the end of the context.

        Later digests are garbage until they are made anew; no query sees them before.
        """
        kept, steps = jnp.zeros_like(self.kept), jnp.zeros_like(self.steps)
        return dataclasses.replace(super().rewind(), kept=kept, steps=steps)

    def chosen(
        self, choose: Callable[[Any], Any], refresh: Callable[..., Any], *, late: bool
    ) -> tuple[Any, Any]:
        """A scope that the digests chose, and the cache with those of the newest tokens.

        Args:
          late: whether the digests may be written after the choice. Where pages are fetched, XLA
            would copy all layers' digests for that order, and else for the other one.
        """
        if late and not self.store.fetches:
            scope = choose(self)
            return scope, refresh(self, scope.number)
        cache = refresh(self)
        return choose(cache), cache

    def written_before(self, part: Any, *, late: bool) -> tuple[Any, Any]:
        """`part`, which waits for the digests that `chosen` has written `late`, and the cache.

        Else all layers' digests or keys would be copied for the reads of what follows.
        """
        if not late or self.store.fetches:
            return part, self
        part, digests = jax.lax.optimization_barrier((part, self.digests))
        return part, dataclasses.replace(self, digests=digests)

    def counted(self, chosen: Any, valid: Int[Array, " B"]) -> Any:
        """The cache after a decode step of rows with valid[b] = 1."""
        kept = self.kept + chosen.kept * valid[:, None]
        store = self.store if chosen.store is None else chosen.store
        return dataclasses.replace(self, store=store, kept=kept, steps=self.steps + valid)


def digest_scores(
    q: Float[Array, "B N H"], digests: PageDigests, length: Int[Array, " B"], page_size: int
) -> Float[Array, "B N P"]:
    """`PageDigests.scores` of the first length[b] slots."""
    return page_scores(q, digests.plain, jnp.maximum(-(-length // page_size), 0))


def masked_mean(
    x: Float[Array, "B K P Z *H"], held: Bool[Array, "B P Z"]
) -> Float[Array, "B K P *H"]:
    """Mean over the held slots of a page, in float32; 0 for an empty page."""
    held = held[:, None].astype(jnp.float32)
    held = held.reshape(*held.shape, *[1] * (x.ndim - 4))
    total = _over_slots(jnp.add, jnp.where(held > 0, x.astype(jnp.float32), 0.0))
    return total / jnp.maximum(_over_slots(jnp.add, held), 1.0)


def masked_max(x: Float[Array, "B K P Z *H"], held: Bool[Array, "B P Z"]) -> Array:
    """Maximum over the held slots of a page, its first ones, in x's dtype; 0 for an empty page."""
    held = held[:, None].reshape(held.shape[0], 1, *held.shape[1:], *[1] * (x.ndim - 4))
    top = _over_slots(jnp.maximum, jnp.where(held, x, -jnp.inf))
    return jnp.where(held[:, :, :, 0], top, 0).astype(x.dtype)


def _over_slots(combine: Callable[[Array, Array], Array], x: Array) -> Array:
    """The slots of each page added or, by `jnp.maximum`, their maximum.

    Of one page on a GPU, as a decode step has it, slot after slot: elementwise operations fuse with
    the write of the digest, reductions would be launches.
    """
    if platform() == "gpu" and x.shape[2] == 1:
        each = [jax.lax.index_in_dim(x, i, axis=3, keepdims=False) for i in range(x.shape[3])]
        while len(each) > 1:
            pairs = zip(each[::2], each[1::2], strict=False)
            each = [combine(*pair) for pair in pairs] + each[len(each) & ~1 :]
        return each[0]
    return jnp.sum(x, axis=3) if combine is jnp.add else jnp.max(x, axis=3)
