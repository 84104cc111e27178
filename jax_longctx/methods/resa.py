"""RESA: sparse decode that estimates what it does not read.

RESA, section 4. A selector (Quest, ArkVale or the ideal one) chooses the tokens that a query
attends. Every other token gets its logit under the prompt's mean query, shifted by one number a
head; its value counts through sums that are known without reading it (see `residual`). The prior is
made at the end of the question, by one more query row over all keys; a generated token joins it in
O(1).

Cost beside the selector's: one more query row over the selected keys, which are read anyway, and
O(heads H) of state. `frozen` also keeps the prior's float32 logits of all slots (3% of the cache
for groups of 4 and heads of 128 in bfloat16) and reads those of the selected ones.

Where the paper is silent: the first 4 and last 64 tokens are attended beside the budget, the
selectors keep their own page sizes, every layer is sparse, and pages are chosen for each query
head. `growth` says how generated tokens change the prior. `append` is the paper's Eq. 2 for all
keys so far. `append-fixed-mean` keeps mu_k at the prompt's mean. Under `frozen` generated tokens
count only while they are selected. `rebuild` is `append` with generated tokens' queries in the mean
query: every `rebuild_every` steps the prior is made anew from it, over all keys.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_longctx.caches import AppendCache
from jax_longctx.contract import (
    ENDS,
    QKV,
    CacheShape,
    LayerContext,
    Prompt,
    Segment,
    WithCache,
    cannot_offload,
    mark_ends,
    method,
)
from jax_longctx.methods.arkvale import ArkVale, Digest
from jax_longctx.methods.ideal_topk import IdealTopK
from jax_longctx.methods.quest import Quest
from jax_longctx.models.config import ModelConfig
from jax_longctx.parts import residual
from jax_longctx.parts.residual import ResaCache
from jax_longctx.parts.selecting import Selecting

# The variant of decode steps that make the prior anew.
REBUILD = "rebuild"


@method(source="RESA, section 4")
class Resa(Selecting):
    """Sparse decode over selected tokens, the others estimated from the mean query.

    Attributes:
      selector: the method that chooses tokens.
      digest: ArkVale's setting.
      lam: weight of the residual, 0 (plain sparse attention) to 1.
      lambda_mode: `normalized`, or Eq. 5 as printed (`paper_literal`).
      growth: how generated tokens change the prior.
      rebuild_every: steps between two rebuilds.
      prior_group: a prior for each query head, or one for a kv head, of its group's mean query.
      page_size: None is the selector's default.
    """

    selector: Literal["quest", "arkvale", "ideal"] = "quest"
    digest: Digest = "cuboid-mean"
    lam: float = 1.0
    lambda_mode: Literal["normalized", "paper_literal"] = "normalized"
    growth: Literal["append", "append-fixed-mean", "frozen", "rebuild"] = "append"
    rebuild_every: int = 32
    prior_group: Literal["query_head", "mean"] = "query_head"
    page_size: int | None = None

    wants_queries = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least(1, "rebuild_every")
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
        if self.selector == "arkvale":
            return ArkVale(digest=self.digest, **shared)
        return Quest(**shared)

    @property
    def cannot_offload(self) -> str | None:
        """None with a selector of pages, unless the prior's logits are stored by slot."""
        if self.growth == "frozen":
            return "growth=frozen reads logits by slot"
        return cannot_offload(self.base)

    def validate(self, config: ModelConfig) -> None:
        """Every model can be decoded sparsely, and here `psa-resa` has its prior."""

    def init_cache(self, shape: CacheShape) -> Any:
        cache = self.base.init_cache(shape)
        if isinstance(cache, AppendCache):
            return cache
        shared, masked = self.prior_group == "mean", self.growth == "frozen"
        background = residual.empty_background(shape, shared=shared, masked=masked)
        return ResaCache(**vars(cache), background=background)

    def segments(self, prompt: Prompt) -> Iterable[Segment]:
        segments = super().segments(prompt)
        return mark_ends(segments) if prompt.stage == "question" else segments

    def step_variant(self, step: int) -> str:
        """REBUILD at the steps that make the prior anew."""
        due = self.growth == "rebuild" and step % self.rebuild_every == 0
        return REBUILD if due else ""

    def attend(self, new: QKV, cache: Any, segment: Segment, ctx: LayerContext) -> WithCache:
        if not isinstance(cache, ResaCache):
            return self.base.attend(new, cache, segment, ctx)
        if segment.role == "decode":
            return self._decode(new, cache, segment, ctx)
        q, k, _ = new
        positions_BT = cache.store.position[:, None] + jnp.arange(q.shape[1])
        rotated = ctx.rotate(q, positions_BT), ctx.rotate(k, positions_BT)
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
        if self.growth in ("append", "rebuild"):
            queries = q if self.growth == "rebuild" else None
            length_B = background.counted + valid_B
            background = residual.observe(background, queries, k, valid_B, length_B)
        if segment.variant == REBUILD:
            background = residual.begin_answer(
                background, cache.store.on_device(), valid_B > 0, ctx
            )
        elif self.growth != "frozen":
            background = residual.grow(background, k, new[2], valid_B, ctx)
        prior = residual.prior_of(background, q, ctx)
        chosen = base.attend_selected(q, cache, ctx, prior, valid_B)
        everything_BN = chosen.kept == cache.store.length[:, None]
        literal = self.lambda_mode == "paper_literal"
        part = residual.combine(chosen, prior, everything_BN, lam=self.lam, literal=literal)
        return part, dataclasses.replace(cache.counted(chosen, valid_B), background=background)

    def adopt(
        self, cache: Any, ctx: LayerContext, queries: Float[Array, "B N H"] | None = None
    ) -> Any:
        if isinstance(cache, AppendCache):
            return cache
        background = residual.adopt(cache.background, cache.store, ctx, queries)
        return dataclasses.replace(self.base.adopt(cache, ctx), background=background)

    def read_bytes(self, cache: Any, length: int) -> int:
        read = self.base.read_bytes(cache, length)
        if not isinstance(cache, ResaCache):
            return read
        store, logits = cache.store, cache.background.logits
        if logits is not None:
            slots = store.sizes[2]
            read += self.base.attended(length, slots) * logits.nbytes // slots
        if self.growth == "rebuild":
            # All keys and values, once in so many steps.
            read += store.nbytes // self.rebuild_every
        return read
