"""Expected Attention: tokens stay that the queries to come will attend, as the text's foretell.

Devoto et al. 2025, "Expected Attention: KV Cache Compression by Estimating Attention from Future
Queries Distribution", section 3. Queries of a head before rotary embedding are taken for normally
distributed, with the mean and covariance of the text's queries after its first `sink` tokens. At
the end of the context

1. both are rotated by R, the mean of the rotations of the next `future` positions, each times what
   the model multiplies queries with there: mean m becomes R m, covariance C becomes R C R^T;
2. a key's expected weight is E exp(q.k / sqrt(H)) = exp(m.k' / sqrt(H) + k'.C k' / 2 H), where k'
   is R^T k; its share among all tokens after the first ones is averaged over the query heads of a
   kv head;
3. the share times ||v|| ranks the tokens.

Mean and covariance are summed up chunk by chunk, without cancellation (Chan et al. 1983). They are
N H^2 floats a layer until the context ends. Ranking takes 2 N H^2 flops a token. A soft cap of
scores is left out of the expectation. kvpress, the authors' code, does the same.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_longctx.caches import AppendCache, Rewinding
from jax_longctx.caches.reading import numbers
from jax_longctx.contract import QKV, CacheShape, LayerContext, Segment, method
from jax_longctx.contract.context import apply_rope
from jax_longctx.parts.compressing import Compressing, future_angles, whole
from jax_longctx.sharding import axes_field
from pallas_kernels.common import factor_of

# float32 also where a GPU would multiply with fewer bits.
_EXACT = jax.lax.Precision.HIGHEST


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QueriesCache(Rewinding):
    """Every key and value of a row, and the distribution of its queries.

    Attributes:
      count: queries so far, the first ones of the text left out.
      mean: of the queries, before rotary embedding.
      spread: sum of the products of their deviations from the mean.
    """

    store: AppendCache
    count: Float[Array, " B"] = axes_field("batch")
    mean: Float[Array, "B N H"] = axes_field("batch", "heads", None)
    spread: Float[Array, "B N H H"] = axes_field("batch", "heads", None, None)


@method(source="Devoto et al. 2025 (Expected Attention), section 3")
class ExpectedAttention(Compressing):
    """After the context, only tokens stay that queries like the text's will attend.

    Attributes:
      future: positions to come over which rotations are averaged.
    """

    future: int = 512

    by_values = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least(1, "future")

    def init_cache(self, shape: CacheShape) -> QueriesCache:
        heads, width = (shape.batch, shape.num_heads), (shape.head_dim,)
        sizes = ((shape.batch,), heads + width, heads + 2 * width)
        return QueriesCache(super().init_cache(shape), *map(jnp.zeros, sizes))

    def gathered(self, new: QKV, cache: Any, segment: Segment, ctx: LayerContext) -> Any:
        if segment.role != "context":
            return cache
        q, index_T = new[0].astype(jnp.float32), jnp.arange(new[0].shape[1])
        later_BT = cache.store.length[:, None] + index_T >= self.sink
        counts_BT = later_BT & (index_T < segment.valid_of()[:, None])
        counts_BT11 = counts_BT[..., None, None]
        came_B = jnp.sum(counts_BT, axis=1, dtype=jnp.float32)
        count_B = cache.count + came_B
        some_B, seen_B = jnp.maximum(came_B, 1), jnp.maximum(count_B, 1)
        mean_BNH = jnp.sum(q, axis=1, where=counts_BT11) / some_B[:, None, None]
        off = jnp.where(counts_BT11, q - mean_BNH[:, None], 0.0)
        spread = jnp.einsum("BTNH,BTNJ->BNHJ", off, off, precision=_EXACT)
        moved_BNH = mean_BNH - cache.mean
        both_B = (cache.count * came_B / seen_B)[:, None, None, None]
        spread += both_B * moved_BNH[..., None] * moved_BNH[..., None, :]
        mean = cache.mean + moved_BNH * (came_B / seen_B)[:, None, None]
        return QueriesCache(cache.store, count_B, mean, cache.spread + spread)

    def scores(self, cache: Any, ctx: LayerContext) -> Float[Array, "B K S"]:
        store, slots = cache.store, cache.store.sizes[2] * ctx.seq_size
        batch, heads, _, width = store.sizes
        cos, sin = future_angles(store.position, jnp.arange(self.future), width, ctx)
        group = (batch, heads, -1)
        mean_BKGH = cache.mean.reshape(*group, width)
        count_B11 = jnp.maximum(cache.count, 1)[:, None, None]
        spread_BKGHJ = cache.spread.reshape(*group, width, width)

        def logits(head: tuple[Array, Array, Array]) -> Float[Array, "B G S"]:
            keys_BSH, mean_BGH, spread_BGHJ = head
            # (R m).k = m.(R^T k): the key is turned back in place of the queries.
            back = apply_rope(keys_BSH[:, None].astype(jnp.float32), cos, -sin)  # [B, 1, S, H]
            back_BSH = back[:, 0] * factor_of(ctx.scale)
            mean_BGS = jnp.einsum("BSH,BGH->BGS", back_BSH, mean_BGH, precision=_EXACT)
            seen_BGSJ = jnp.einsum("BSH,BGHJ->BGSJ", back_BSH, spread_BGHJ, precision=_EXACT)
            return mean_BGS + jnp.sum(seen_BGSJ * back_BSH[:, None], axis=-1) / (2 * count_B11)

        # Head by head: products of all heads would be as large as many caches.
        each = (jnp.moveaxis(x, 1, 0) for x in (numbers(store.k), mean_BKGH, spread_BKGHJ))
        logits_BKGS = jnp.moveaxis(jax.lax.map(logits, tuple(each)), 0, 1)
        logits_BNS = whole(logits_BKGS.reshape(batch, -1, store.sizes[2]), ctx)
        index_S, length_B1 = jnp.arange(slots), store.length[:, None]
        ranked_BS = (index_S >= self.sink) & (index_S < length_B1)
        shares_BNS = jax.nn.softmax(logits_BNS, axis=-1, where=ranked_BS[:, None])
        shares_BKS = jnp.mean(shares_BNS.reshape(*group, slots), axis=2)
        norms_BKC = jnp.linalg.norm(numbers(store.v).astype(jnp.float32), axis=-1)
        return shares_BKS * whole(norms_BKC, ctx)
