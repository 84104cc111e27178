"""The kind that compresses a text that it has read, before it knows the question.

Prefill is exact attention over an append-only cache. At the end of the context each kv head ranks
its tokens and keeps the best: their keys (rotated at their true positions) and values move, in the
text's order, to a smaller append-only cache. The first `sink` tokens and the last `local` ones stay
before all others. Question and answer are appended behind, at the positions that follow the whole
text. So a context is compressed once and asked many questions.

Heads keep different tokens: a slot holds one token in one head and another in the next. Rows keep
`budget` tokens each, or a share `ratio` of their own length.

Cost: prefill as full attention; a decode step reads what stays.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_longctx.caches import AppendCache, compacted
from jax_longctx.contract import LayerContext, Stage
from jax_longctx.parts.head_budgets import share
from jax_longctx.parts.layer_budgets import Budgeted, stepped
from pallas_kernels.select_large_k import select_large_k


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compressing(Budgeted):
    """A method that keeps, at the end of the context, each kv head's tokens of the highest scores.

    Attributes:
      ratio: the budget as a share of the context, in place of `budget`.
      sink: first tokens that always stay.
      local: last tokens of the context that always stay.
    """

    ratio: float | None = None
    sink: int = 4
    local: int = 0

    phase = "decode"
    keeps_all = False
    hands_over = "context"

    def __post_init__(self) -> None:
        self.at_least(1, "budget")
        self.at_least(0, "sink", "local")
        super().__post_init__()
        self.fraction("ratio", above_zero=True)
        if self.ratio is None and self.budget < self.sink + self.local:
            raise self.refused(
                f"budget {self.budget} must hold sink + local = {self.least} tokens; raise budget"
            )

    @property
    def least(self) -> int:
        return max(self.sink + self.local, 1)

    def own_budget(self, layer: int, layers: int) -> dict[str, float]:
        if self.ratio is None:
            return super().own_budget(layer, layers)
        most = min(self.ratio * (2 - 1 / self.beta), 1.0)
        return {"ratio": max(round(stepped(self.ratio, most, layer, layers), 4), 0.0001)}

    # What a method defines.

    def scores(self, cache: Any, ctx: LayerContext) -> Float[Array, "B K S"]:
        """How each kv head ranks the tokens in the slots of all shards, in the text's order.

        float32, the same on every shard of the slots; `whole` makes them of a shard's own. Slots
        beyond a row's length may hold any number.

        Args:
          cache: as prefill left it; keys and values are in `cache.store`.
        """
        raise NotImplementedError(f"{self.name}: a method that compresses defines scores")

    # The duties.

    def finish(self, cache: Any, ctx: LayerContext, stage: Stage, reserve: int) -> AppendCache:
        """The kept tokens alone, in an `AppendCache` with room for `reserve` more."""
        return self.hand_over(cache, ctx, reserve).end_context(reserve)

    def hand_over(
        self, cache: Any, ctx: LayerContext, reserve: int, *, raw: bool = False
    ) -> AppendCache:
        store: AppendCache = cache.store
        length_B, slots = store.length, store.sizes[2] * ctx.seq_size
        # A row leaves `reserve` slots free, so no row is longer.
        size = max(self._kept(slots - reserve), 1)
        count_B = jnp.minimum(jnp.maximum(self._kept(length_B), 1), length_B)
        index_S, length_B1 = jnp.arange(slots), length_B[:, None]
        fixed_BS = (index_S < self.sink) | (index_S >= length_B1 - self.local)
        scores_BKS = jnp.where(fixed_BS[:, None], jnp.inf, self.scores(cache, ctx))
        scores_BKS = jnp.where((index_S < length_B1)[:, None], scores_BKS, -jnp.inf)
        count_BK = jnp.broadcast_to(count_B[:, None], scores_BKS.shape[:2])
        slots_BKC = select_large_k(scores_BKS, count_BK, size=size)
        return compacted(store, slots_BKC, count_B, reserve, ctx, raw=raw)

    def stays(self, length: int) -> int:
        return max(self._kept(length), 1)

    def _kept(self, length: Any) -> Any:
        """Tokens kept of a context of that length, an int or an array; an array may exceed it."""
        if self.ratio is not None:
            return share(self.ratio, length)
        return min(self.budget, length) if isinstance(length, int) else self.budget


def whole(own: Float[Array, "B K C"], ctx: LayerContext) -> Float[Array, "B K S"]:
    """The numbers of all S slots, in the text's order, from those of this shard's C."""
    return ctx.slots(own.shape[2]).whole(own, axis=2)
