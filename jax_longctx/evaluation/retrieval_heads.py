"""How much each kv head looks far back: the numbers by which DuoAttention divides them.

A passage lies in a long text, and follows it once more. A token of the copy is foretold by the
passage: heads that retrieve attend to it there. A head's number is the attention that the copy's
tokens give to what a streaming head would not keep: tokens after the first `sink` and before the
last `recent` ones. Of a kv head it is that of the query head with the most, for it is lost to all
of them. The authors learn their numbers by training; this takes one pass over the text.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jax_longctx.caches import Rewinding, numbers
from jax_longctx.contract import QKV, CacheShape, LayerContext, Segment, WithCache
from jax_longctx.engine import Engine
from jax_longctx.engine.prefill import prefill_question
from jax_longctx.engine.runs import each_layer
from jax_longctx.parts.appending import Appending
from jax_longctx.sharding import axes_field
from pallas_kernels.common import capped, factor_of, group_heads


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FarCache(Rewinding):
    """Every key and value, and the attention that each kv head gave to far tokens.

    Attributes:
      far: the sum over the question's tokens so far.
    """

    store: Any
    far: Float[Array, "B K"] = axes_field("batch", "kv_heads")

    @property
    def position(self) -> Array:
        """Position of each row's next token."""
        return self.store.position


@dataclasses.dataclass(frozen=True, kw_only=True)
class Far(Appending):
    """Full attention that measures how far the question's tokens look, on one device.

    Attributes:
      sink, recent: tokens that are not far.
    """

    sink: int
    recent: int

    stripes = False

    def init_cache(self, shape: CacheShape) -> FarCache:
        far = jnp.zeros((shape.batch, shape.num_kv_heads), jnp.float32)
        return FarCache(super().init_cache(shape), far)

    def attend(self, new: QKV, cache: Any, segment: Segment, ctx: LayerContext) -> WithCache:
        at_BT = cache.position[:, None] + jnp.arange(new[0].shape[1])
        part, store = super().attend(new, cache.store, segment, ctx)
        after = dataclasses.replace(cache, store=store)
        if segment.role != "query":
            return part, after
        keys, q = numbers(store.k), ctx.rotate_queries(new[0], at_BT)
        q_BKGTH = group_heads(q, keys.shape[1])
        logits = jnp.einsum("BKGTH,BKSH->BKGTS", q_BKGTH, keys, preferred_element_type=jnp.float32)
        logits = capped(factor_of(ctx.scale) * logits, ctx.scale)
        index_S, at_BT1 = jnp.arange(keys.shape[2]), at_BT[..., None]
        lse_BKGT = group_heads(ctx.with_sinks(part[1])[..., None], keys.shape[1])[..., 0]
        share = jnp.exp(logits - lse_BKGT[..., None])
        far_BTS = (index_S >= self.sink) & (index_S < at_BT1 - self.recent)
        far_BTS &= (jnp.arange(q.shape[1]) < segment.valid_of()[:, None])[..., None]
        far_BKG = jnp.sum(share, axis=(3, 4), where=far_BTS[:, None, None])
        return part, dataclasses.replace(after, far=cache.far + jnp.max(far_BKG, axis=-1))


def far_attention(
    engine: Engine, texts: Sequence[Sequence[int]], passages: Sequence[Sequence[int]], **near: int
) -> Float[np.ndarray, "L K"]:
    """The share of each kv head's attention that the passages' tokens give to far ones.

    Zeros of layers with a sliding window.

    Args:
      texts: token ids, each with its passage in it.
      near: `Far`'s settings.
    """
    engine, rows = engine.under(Far(**near)), [list(passage) for passage in passages]
    context = engine.prefill(texts, reserve=max(map(len, rows)))
    with engine.asked(context, keep=False) as live:
        prefill_question(engine.setup, engine.params, live, rows, context.total)
        found = [getattr(cache, "far", None) for cache in each_layer(live.caches)]
    tokens = sum(map(len, rows))
    none = np.zeros(engine.config.num_kv_heads)
    return np.stack([none if far is None else np.sum(far, axis=0) / tokens for far in found])
