"""Budgets that differ from layer to layer, and from head to head.

PyramidKV (Cai et al. 2024, "PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information
Funneling", section 3.2): lower layers attend widely and upper ones to few tokens. So budgets fall
in equal steps from the first layer to the last, which has the beta-th part of their mean. The mean
stays the budget; a share of the text that would pass 1 stays at it, and the last layer gets more.
All layers of the model count, also those with a sliding window, which keep that. A layer keeps no
fewer tokens than its method needs.

Of texts shorter than the first layer's budget the last layers keep no more: their memory is theirs.
The authors' code levels such budgets out. Layers of other sizes are other programs: a loop over
layers becomes one program for each of them, which compiles as many times as long.

Ada-KV (Feng et al. 2024, section 3.3) and CriticalKV (Feng et al. 2025, section 3) let the kv heads
of a layer share their budgets (`head_budgets.ada_tokens`). Each head's tokens then lie in pages of
its own (`caches.uneven`), in the memory of the layer's budget. CriticalKV weighs a token by
||W v||_1, the mean over the query heads of its kv head, where W is the head's part of the output
projection: found as the text is read, one number a token and kv head.
"""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jax_longctx.caches import AppendCache, compacted, write_run
from jax_longctx.caches.uneven import UnevenCache, uneven
from jax_longctx.contract import CacheShape, LayerContext
from jax_longctx.parts.appending import Appending
from jax_longctx.parts.head_budgets import ada_tokens
from jax_longctx.sharding import axes_field
from pallas_kernels.select_large_k import select_large_k


class Ranked(NamedTuple):
    """How the tokens of a text rank, and how many of them stay.

    Attributes:
      scores: of the slots of all shards, in the text's order, -inf of an empty one.
      count: tokens that stay in each kv head, or on average over the heads.
      most: the largest count.
    """

    scores: Float[Array, "B K S"]
    count: Int[Array, " B"]
    most: int

    def best(self) -> Int[Array, "B K C"]:
        """The slots of each head's `count` best tokens, ascending, then -1 up to `most`."""
        count_BK = jnp.broadcast_to(self.count[:, None], self.scores.shape[:2])
        return select_large_k(self.scores, count_BK, size=self.most)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class WeighedStore(AppendCache):
    """Every key and value of a row, and how large the values are in the layer's output.

    Attributes:
      norms: ||W v||_1 of each token's value in float32, the mean over its kv head's query heads.
    """

    norms: Float[Array, "B K S"] = axes_field("batch", "kv_heads", "slots", in_place=True)

    def append(
        self,
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        valid: Int[Array, " B"],
        ctx: LayerContext,
    ) -> "WeighedStore":
        assert ctx.output is not None
        heads, stored = v.shape[2], super().append(k, v, valid, ctx)
        assert isinstance(stored, WeighedStore)
        w_GKHD = jnp.moveaxis(ctx.output.reshape(heads, -1, *ctx.output.shape[1:]), 1, 0)

        def of_head(w_KHD: Array) -> Float[Array, "B T K"]:
            out = jnp.einsum("BTKH,KHD->BTKD", v, w_KHD, preferred_element_type=jnp.float32)
            return jnp.sum(jnp.abs(out), axis=-1)

        # One query head of each group at a time: all products would be as large as many caches.
        norms_BTK = jnp.mean(jax.lax.map(of_head, w_GKHD), axis=0)
        norms = write_run(self.norms, norms_BTK, self.length, valid, ctx)
        return dataclasses.replace(stored, norms=norms)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budgeted(Appending):
    """A method that keeps `budget` tokens.

    Attributes:
      budget: tokens that each kv head keeps, on average over the layers.
      over_layers: `uniform`, or `pyramid`: more in lower layers (PyramidKV).
      beta: a pyramid's last layer has the budget divided by it.
      over_heads: `uniform`; `ada`: the kv heads of a layer share their budgets (Ada-KV); or
        `critical`: and half of a head's tokens stay by their values' part in the layer's output
        too (CriticalKV).
    """

    budget: int = 1024
    over_layers: Literal["uniform", "pyramid"] = "uniform"
    beta: float = 20.0
    over_heads: Literal["uniform", "ada", "critical"] = "uniform"

    def __post_init__(self) -> None:
        if self.beta < 1:
            raise self.refused(f"beta must be at least 1, got {self.beta}")

    @property
    def least(self) -> int:
        """The smallest budget of a layer."""
        return 1

    @property
    def wants_output(self) -> bool:
        return self.over_heads == "critical"

    @property
    def cannot_hand_over(self) -> str | None:
        if self.over_heads == "uniform":
            return None
        return (
            f"with over_heads={self.over_heads} its heads keep numbers of tokens of their own, and "
            "the pages of a method that follows are of all heads alike; take over_heads=uniform"
        )

    def init_cache(self, shape: CacheShape) -> Any:
        store = super().init_cache(shape)
        if not self.wants_output:
            return store
        norms = jnp.zeros((shape.batch, shape.num_kv_heads, shape.slots), jnp.float32)
        return WeighedStore(**vars(store), norms=norms)

    def what_stays(
        self, store: AppendCache, ranked: Ranked, reserve: int, ctx: LayerContext, *, raw: bool
    ) -> AppendCache | UnevenCache:
        """The tokens that rank best, in a smaller cache with room for `reserve` more.

        Args:
          raw: whether keys are to be stored before rotary embedding; of even heads.
        """
        scores_BKS, count_B, most = ranked
        if self.over_heads == "uniform":
            return compacted(store, ranked.best(), count_B, reserve, ctx, raw=raw)
        norms, scores_BKS = None, ctx.gather_heads(scores_BKS, axis=1)
        if isinstance(store, WeighedStore):
            norms = ctx.gather_heads(ctx.slots(store.sizes[2]).whole(store.norms, 2), axis=1)
        kept_BKS = ada_tokens(scores_BKS, count_B, norms)
        return uneven(store, kept_BKS, kept_BKS.shape[1] * most, reserve, ctx)

    def of_layer(self, layer: int, layers: int) -> "Budgeted":
        if self.over_layers == "uniform":
            return self
        return dataclasses.replace(self, over_layers="uniform", **self.own_budget(layer, layers))

    def own_budget(self, layer: int, layers: int) -> dict[str, float]:
        """The settings that are a layer's own."""
        own = stepped(self.budget, self.budget * (2 - 1 / self.beta), layer, layers)
        return {"budget": max(round(own), self.least)}


def stepped(mean: float, most: float, layer: int, layers: int) -> float:
    """A layer's part of numbers that fall from `most` in equal steps, with that mean."""
    return most - 2 * (most - mean) * layer / max(layers - 1, 1)
