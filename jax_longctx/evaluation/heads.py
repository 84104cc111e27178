"""What is measured of a model's heads once: how far each looks back, and where its queries point.

How far, for DuoAttention: a passage lies in a long text, and follows it once more. A token of the
copy is foretold by the passage: heads that retrieve attend to it there. A kv head's number is the
attention that the copy's tokens give to what a streaming head would not keep: tokens after the
first `sink` and before the last `recent` ones. Of a kv head it is that of the query head with the
most, for it is lost to all of them. The authors learn their numbers by training.

Where, for Q-Filters: the first right singular vector of a query head's queries of the texts is the
first eigenvector of the sum of their products with themselves. That sum takes no more memory for a
longer text.

Both take one pass over a text.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

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
class MeasuredCache(Rewinding):
    """Every key and value, and what the heads did with them.

    Attributes:
      far: attention that each kv head gave to far tokens, the sum over the question's tokens.
      queries: the sum of the text's rotated queries.
      products: the sum of their products with themselves.
    """

    store: Any
    far: Float[Array, "B K"] = axes_field("batch", "kv_heads")
    queries: Float[Array, "B N H"] = axes_field("batch", "heads", None)
    products: Float[Array, "B N H H"] = axes_field("batch", "heads", None, None)

    @property
    def position(self) -> Array:
        """Position of each row's next token."""
        return self.store.position


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measuring(Appending):
    """Full attention that measures its heads, on one device.

    Attributes:
      sink, recent: tokens that are not far.
    """

    sink: int
    recent: int

    stripes = False

    def init_cache(self, shape: CacheShape) -> MeasuredCache:
        batch, heads, width = shape.batch, shape.num_heads, shape.head_dim
        sizes = (batch, shape.num_kv_heads), (batch, heads, width), (batch, heads, width, width)
        return MeasuredCache(super().init_cache(shape), *map(jnp.zeros, sizes))

    def attend(self, new: QKV, cache: Any, segment: Segment, ctx: LayerContext) -> WithCache:
        at_BT = cache.position[:, None] + jnp.arange(new[0].shape[1])
        part, store = super().attend(new, cache.store, segment, ctx)
        after = dataclasses.replace(cache, store=store)
        keys, q = numbers(store.k), ctx.rotate_queries(new[0], at_BT)
        valid_BT = jnp.arange(q.shape[1]) < segment.valid_of()[:, None]
        if segment.role != "query":
            wide = jnp.where(valid_BT[..., None, None], q.astype(jnp.float32), 0.0)
            products = jnp.einsum("BTNH,BTNJ->BNHJ", wide, wide, precision="highest")
            sums = {"products": cache.products + products}
            sums["queries"] = cache.queries + jnp.sum(wide, axis=1)
            return part, dataclasses.replace(after, **sums)
        q_BKGTH = group_heads(q, keys.shape[1])
        logits = jnp.einsum("BKGTH,BKSH->BKGTS", q_BKGTH, keys, preferred_element_type=jnp.float32)
        logits = capped(factor_of(ctx.scale) * logits, ctx.scale)
        index_S, at_BT1 = jnp.arange(keys.shape[2]), at_BT[..., None]
        lse_BKGT = group_heads(ctx.with_sinks(part[1])[..., None], keys.shape[1])[..., 0]
        share = jnp.exp(logits - lse_BKGT[..., None])
        far_BTS = (index_S >= self.sink) & (index_S < at_BT1 - self.recent) & valid_BT[..., None]
        far_BKG = jnp.sum(share, axis=(3, 4), where=far_BTS[:, None, None])
        return part, dataclasses.replace(after, far=cache.far + jnp.max(far_BKG, axis=-1))


class Measured(NamedTuple):
    """What a text's heads did; zeros of layers with a sliding window.

    Attributes:
      far: the share of a kv head's attention that the passage's tokens gave to far ones.
      queries, products: `MeasuredCache`'s sums.
    """

    far: Float[np.ndarray, "L K"]
    queries: Float[np.ndarray, "L N H"]
    products: Float[np.ndarray, "L N H H"]


def measured(engine: Engine, text: Sequence[int], passage: Sequence[int], **near: int) -> Measured:
    """Measures the heads over a text and a copy of a passage in it, both as token ids.

    Args:
      near: `Measuring`'s settings.
    """
    engine = engine.under(Measuring(**near))
    context = engine.prefill([text], reserve=len(passage))
    with engine.asked(context, keep=False) as live:
        prefill_question(engine.setup, engine.params, live, [list(passage)], context.total)
        layers = each_layer(live.caches)
    config = engine.config
    heads = (config.num_heads, config.head_dim)
    none = Measured(*map(np.zeros, (config.num_kv_heads, heads, (*heads, config.head_dim))))
    found = [
        Measured(
            *(np.asarray(x[0]) for x in (cache.far / len(passage), cache.queries, cache.products))
        )
        if isinstance(cache, MeasuredCache)
        else none
        for cache in layers
    ]
    return Measured(*map(np.stack, zip(*found, strict=True)))


def query_filters(
    queries: Float[np.ndarray, "L N H"], products: Float[np.ndarray, "L N H H"], kv_heads: int
) -> Float[np.ndarray, "L K H"]:
    """Q-Filters of a model's kv heads, from sums over all texts."""
    # Eigenvalues ascend.
    first = np.linalg.eigh(products.astype(np.float64)).eigenvectors[..., -1]
    sign = np.where(np.sum(first * queries, axis=-1, keepdims=True) < 0, -1, 1)
    return np.mean((sign * first).reshape(len(first), kv_heads, -1, first.shape[-1]), axis=2)
