"""RESA: sparse decode that estimates what it does not read.

RESA, section 4. A selector (Quest, ArkVale or the ideal one) chooses the tokens that a query
attends. Every other token gets its logit under the prompt's mean query, shifted by one number a
head; its value counts through sums that are known without reading it (see `residual`). The prior is
made at the end of the question, by one more query row over all keys; a generated token joins it in
O(1).

Cost beside the selector's: one more query row over the selected keys, which are read anyway, and
O(heads H) of state.

Where the paper is silent: the first 4 and last 64 tokens are attended beside the budget, the
selectors keep their own page sizes, every layer is sparse, pages are chosen for each query head,
and generated tokens join the prior (Eq. 2 for all keys so far).
"""

import dataclasses
from collections.abc import Iterable
from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_longctx.contract import (
    ENDS,
    QKV,
    CacheShape,
    Feed,
    LayerContext,
    Segment,
    WithCache,
    mark_ends,
    method,
)
from jax_longctx.methods.arkvale import ArkVale
from jax_longctx.methods.ideal_topk import IdealTopK
from jax_longctx.methods.quest import Quest
from jax_longctx.parts import residual
from jax_longctx.parts.residual import ResaCache
from jax_longctx.parts.selecting import Selecting


@method(source="RESA, section 4")
class Resa(Selecting):
    """Sparse decode over selected tokens, the others estimated from the mean query.

    Attributes:
      selector: the method that chooses tokens.
      lam: weight of the residual, 0 (plain sparse attention) to 1.
      page_size: None is the selector's default.
    """

    selector: Literal["quest", "arkvale", "ideal"] = "quest"
    lam: float = 1.0
    page_size: int | None = None

    wants_queries = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.fraction("lam")
        if self.page_size not in (None, 1) and self.selector == "ideal":
            raise self.refused(
                f"the ideal selector chooses single tokens; page_size {self.page_size} "
                "is for quest and arkvale"
            )
        # The selector checks its settings.
        _ = self.base

    @property
    def base(self) -> Selecting:
        """The selector, with this method's settings."""
        names = (field.name for field in dataclasses.fields(Selecting))
        shared: dict[str, Any] = {name: getattr(self, name) for name in names}
        if self.selector == "ideal":
            return IdealTopK(**shared)
        if self.page_size is not None:
            shared["page_size"] = self.page_size
        return ArkVale(**shared) if self.selector == "arkvale" else Quest(**shared)

    @property
    def page_tokens(self) -> int:
        return self.base.page_size

    @property
    def cannot_offload(self) -> str | None:
        """None with a selector of pages."""
        return self.base.cannot_offload

    def init_cache(self, shape: CacheShape) -> Any:
        cache = self.base.init_cache(shape)
        return ResaCache(**vars(cache), background=residual.empty_background(shape))

    def segments(self, feed: Feed) -> Iterable[Segment]:
        return mark_ends(super().segments(feed), feed)

    def attend(self, new: QKV, cache: Any, segment: Segment, ctx: LayerContext) -> WithCache:
        if segment.role == "decode":
            return self._decode(new, cache, segment, ctx)
        q, k, _ = new
        positions_BT = cache.store.position[:, None] + jnp.arange(q.shape[1])
        rotated = ctx.rotate_queries(q, positions_BT), ctx.rotate(k, positions_BT)
        part, cache = self.base.attend(new, cache, segment, ctx)
        store, valid_B = cache.store, segment.valid_of()
        background = residual.observe(cache.background, *rotated, valid_B, store.length)
        if segment.variant == ENDS:
            background = residual.begin_answer(background, store.on_device(), segment.ends, ctx)
        return part, dataclasses.replace(cache, background=background)

    def _decode(self, new: QKV, cache: Any, segment: Segment, ctx: LayerContext) -> WithCache:
        base, valid_B = self.base, segment.valid_of()
        q, k, cache = base.append_token(new, cache, segment, ctx)
        background = cache.background
        length_B = background.counted + valid_B
        background = residual.observe(background, None, k, valid_B, length_B)
        background = residual.grow(background, k, new[2], valid_B, ctx)
        prior = residual.prior_of(background, q, ctx)
        chosen = base.attend_selected(q, cache, ctx, prior, valid_B)
        everything_BN = chosen.kept == cache.store.length[:, None]
        part = residual.combine(chosen, prior, everything_BN, lam=self.lam)
        return part, dataclasses.replace(cache.counted(chosen, valid_B), background=background)

    def adopt(
        self, cache: Any, ctx: LayerContext, queries: Float[Array, "B N H"] | None = None
    ) -> Any:
        background = residual.adopt(cache.background, cache.store, ctx, queries)
        return dataclasses.replace(self.base.adopt(cache, ctx), background=background)

    def begin(self, q: Array, cache: Any, ctx: LayerContext) -> Any:
        store, every = cache.store, jnp.ones(len(q), bool)
        background = residual.begin_answer(cache.background, store.on_device(), every, ctx)
        return dataclasses.replace(cache, background=background)

    def read_bytes(self, cache: Any, length: int) -> int:
        return self.base.read_bytes(cache, length)
