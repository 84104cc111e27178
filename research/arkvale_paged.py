"""ArkVale as the authors' released code computes it, for studies of parity alone.

Chen et al. 2024, section 4.3, as released: a layer keeps a fixed number of pages on the device and
the others on the host. After the prompt the pages with the last token's best scores stay. At each
step

1. a page that left the window is on the device;
2. the best pages by the newest query are recalled if they are not on it;
3. the worst other pages leave until the number is right, and all that remain are attended.

All keys are on the device here; emulated is which of them a step attends. When a page leaves the
window, the released code drops a page by the previous step's scores; here the newest ones count.
The authors' settings are those that `ArkVale` names, and `resident=4000`: a cache of 128 pages,
sinks and window among them.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jax_longctx.caches import where_rows
from jax_longctx.contract import QKV, CacheShape, LayerContext, Segment, WithCache, method
from jax_longctx.methods.arkvale import ArkVale
from jax_longctx.parts.selecting import SelectiveCache, gathered
from jax_longctx.parts.sparse_decode import Lists, Selected, Span, named
from jax_longctx.sharding import axes_field
from pallas_kernels.select_large_k import select_large_k, select_mask


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedCache(SelectiveCache):
    """A selector's cache, and `resident`: which pages are on the device."""

    resident: Bool[Array, "B P"] = axes_field("batch", "pages")

    def counted(self, chosen: Selected, valid: Int[Array, " B"]) -> Any:
        """The cache after a step: the attended pages are those on the device."""
        assert chosen.local is not None
        attended_BP = named(chosen.local[:, 0], self.resident.shape[1])
        resident = where_rows(valid > 0, attended_BP, self.resident)
        return dataclasses.replace(super().counted(chosen, valid), resident=resident)


@method(source="Chen et al. 2024, section 4.3 and released code")
class ArkValePaged(ArkVale):
    """ArkVale with the page cache of the authors' code, whose pages are all attended.

    Attributes:
      resident: tokens of the page cache, all attended; at most the budget is recalled in a step.
    """

    resident: int = 4096

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.granularity != "layer" or self.allocation != "uniform" or self.ratio is not None:
            raise self.refused(
                "resident, one page cache a layer, needs granularity layer, "
                f"allocation uniform and a budget in tokens; got granularity {self.granularity}, "
                f"allocation {self.allocation}, ratio {self.ratio}"
            )
        if self.resident < max(self.budget, self.page_size):
            raise self.refused(
                f"resident {self.resident} must hold the budget of {self.budget} "
                f"tokens that may be recalled, and a page of {self.page_size}; raise resident"
            )

    @property
    def cannot_offload(self) -> str:
        """The page cache says what is attended, and the keys lie on the device."""
        return "it emulates a page cache over keys on the device; use arkvale"

    @property
    def own_tokens(self) -> int | None:
        """None: each row has a page cache of its own."""
        return None

    def init_cache(self, shape: CacheShape) -> Any:
        cache = super().init_cache(shape)
        resident = jnp.zeros((shape.batch, shape.slots // self.page_size), bool)
        return PagedCache(**vars(cache), resident=resident)

    def attend(self, new: QKV, cache: Any, segment: Segment, ctx: LayerContext) -> WithCache:
        part, cache = super().attend(new, cache, segment, ctx)
        if segment.role != "query":
            return part, cache
        valid_B = segment.valid_of()
        last_B1 = jnp.maximum(valid_B - 1, 0)[:, None]
        last_B1NH = jnp.take_along_axis(new[0], last_B1[..., None, None], axis=1)
        rotated = ctx.rotate(last_B1NH, cache.store.position[:, None] - 1)
        ranked_BP = self._ranked(rotated, cache, self.selectable(cache.store, ctx), ctx)
        begun_BP = select_mask(ranked_BP, self.most_pages(0, ranked_BP.shape[1]))
        # The last segment with tokens of the row counts.
        own = ctx.slots(cache.resident.shape[1], self.page_size).part(begun_BP, 1)
        resident = where_rows(valid_B > 0, own, cache.resident)
        return part, dataclasses.replace(cache, resident=resident)

    def most_pages(self, slots: int, pages: int) -> int:
        """Pages that the page cache holds."""
        return min(self.resident // self.page_size, pages)

    def _ranked(
        self, q: Float[Array, "B 1 N H"], cache: Any, span: Span, ctx: LayerContext
    ) -> Float[Array, "B P"]:
        scores_BNP = gathered(self.scores(q[:, 0], cache, ctx), span, ctx, self.page_size)
        return self.pooled(scores_BNP, span.tokens, cache.store.k.shape[1], ctx)[:, 0]

    def choose(
        self,
        q: Float[Array, "B 1 N H"],
        cache: Any,
        span: Span,
        ctx: LayerContext,
        *_: Any,
        **__: Any,
    ) -> Lists:
        """The pages on the device once the best by this query are recalled."""
        earlier = dataclasses.replace(cache.store, length=cache.store.length - 1)
        left_window_BP = (span.tokens > 0) & (self.selectable(earlier, ctx).tokens == 0)
        own = ctx.slots(cache.resident.shape[1], self.page_size)
        held_BP = own.whole(cache.resident, axis=1) | left_window_BP
        pages = held_BP.shape[1]
        count_B = jnp.full_like(cache.prompt, min(self.pages_of(0), pages))
        chosen_BC = recall(
            self._ranked(q, cache, span, ctx), held_BP, count_B, self.most_pages(0, pages)
        )
        batch, kv_heads = cache.store.k.shape[:2]
        return Lists(jnp.broadcast_to(chosen_BC[:, None], (batch, kv_heads, chosen_BC.shape[1])))


def recall(
    scores: Float[Array, "B P"], held: Bool[Array, "B P"], count: Int[Array, " B"], size: int
) -> Int[Array, "B C"]:
    """The C = size pages on the device once the best count[b] are recalled, -1 for none.

    `held` are those on it before; `scores` are -inf where a page cannot be selected.
    """
    wanted_BP = select_mask(scores, count)
    others_BP = jnp.where(held, scores, -jnp.inf)
    return select_large_k(jnp.where(wanted_BP, jnp.inf, others_BP), size, size=size)
