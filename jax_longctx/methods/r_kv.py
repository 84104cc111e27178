"""R-KV: tokens stay that the newest ones attend to and that repeat no other, in answers too.

Cai et al. 2025, "R-KV: Redundancy-aware KV Cache Compression for Reasoning Models", section 3. The
last `local` tokens observe, and stay. Of the tokens before them, in each kv head,

1. importance (3.2): the logits of the observers' queries, the largest of the group's heads; their
   softmax over these tokens; the maximum over `kernel` neighbours; the mean over the observers;
2. redundancy (3.3): each key's cosines with the others. A key whose cosine with another one is
   above `similar` does not count for the newest such: of what repeats itself the newest stays. The
   softmax over these tokens of each one's mean cosine;
3. lam * importance - (1 - lam) * redundancy (3.4) ranks them.

Tokens leave after each `interval` of an answer, the paper's buffer. They leave at the end of the
context as well, as in the authors' code, which ranks there by the same formula. The paper pools
each observer's row before the mean, the code after it; here as the paper has it. One newest similar
key is spared, as in the code; the paper leaves the number open.

Cost of ranking n tokens: n^2 cosines a kv head, in blocks that are never all in memory.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_longctx.caches import AppendCache
from jax_longctx.caches.reading import numbers
from jax_longctx.contract import QKV, CacheShape, LayerContext, Segment, method
from jax_longctx.parts.compressing import Compressing
from jax_longctx.parts.partial import check_kernel, latest, pooled
from jax_longctx.sharding import axes_field
from pallas_kernels.common import capped, factor_of

# Keys whose cosines with all others are in memory at once, a kv head.
_ROWS = 128


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ObservedStore:
    """Keys and values of a row, and its last W queries, rotated, the newest last."""

    store: AppendCache
    queries: Float[Array, "B W N H"] = axes_field("batch", None, "heads", None)


@method(source="Cai et al. 2025 (R-KV), section 3")
class RKV(Compressing):
    """Of text and answer, tokens stay that the newest attend to and that repeat no other.

    Attributes:
      lam: the weight of importance; 1 - lam is that of redundancy.
      kernel: neighbours over which importance is pooled.
      similar: the cosine above which keys repeat each other.
    """

    sink: int = 0
    local: int = 8
    interval: int | None = 128
    lam: float = 0.1
    kernel: int = 7
    similar: float = 0.5

    measures_keys = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least(1, "local")
        self.fraction("lam")
        check_kernel(self)

    def init_cache(self, shape: CacheShape) -> ObservedStore:
        size = (shape.batch, self.local, shape.num_heads, shape.head_dim)
        return ObservedStore(super().init_cache(shape), jnp.zeros(size, shape.dtype))

    def gathered(self, new: QKV, cache: Any, segment: Segment, ctx: LayerContext) -> Any:
        q, store = new[0], cache.store
        q = ctx.rotate_queries(q, store.position[:, None] + jnp.arange(q.shape[1]))
        return ObservedStore(store, latest(cache.queries, q, segment.valid_of()))

    def scores(self, cache: Any, ctx: LayerContext) -> Float[Array, "B K S"]:
        store, own = cache.store, ctx.slots(cache.store.sizes[2])
        batch, heads, size, width = store.sizes
        index_S = jnp.arange(size * ctx.seq_size)
        ranked_BS = index_S < store.length[:, None] - self.local
        count_B1 = jnp.maximum(jnp.sum(ranked_BS, axis=1, keepdims=True), 1)
        rows = math.gcd(_ROWS, size)
        at_RZ = own.at(jnp.arange(size)).reshape(-1, rows)

        def each(head: tuple[Array, Array]) -> Float[Array, "B S"]:
            mine_BCH, q_BWGH = head
            keys_BSH = own.whole(mine_BCH, axis=1).astype(jnp.float32)
            dots = jnp.einsum("BWGH,BSH->BWGS", q_BWGH.astype(jnp.float32), keys_BSH)
            logits_BWS = jnp.max(capped(dots * factor_of(ctx.scale), ctx.scale), axis=2)
            shares_BWS = jax.nn.softmax(logits_BWS, axis=-1, where=ranked_BS[:, None])
            importance_BS = jnp.mean(pooled(shares_BWS, self.kernel), axis=1)
            unit_BSH = keys_BSH / (jnp.linalg.norm(keys_BSH, axis=-1, keepdims=True) + 1e-8)

            def add(sums_BS: Array, at_Z: Array) -> tuple[Array, None]:
                cosines_BZS = jnp.einsum("BZH,BSH->BZS", unit_BSH[:, at_Z], unit_BSH)
                counts = ranked_BS[:, at_Z, None] & ranked_BS[:, None]
                counts &= at_Z[:, None] != index_S
                alike_BZS = jnp.where(counts & (cosines_BZS > self.similar), index_S, -1)
                newest_BZ1 = jnp.max(alike_BZS, axis=-1, keepdims=True)
                counts &= index_S != newest_BZ1
                return sums_BS + jnp.sum(cosines_BZS, axis=1, where=counts), None

            sums_BS, _ = jax.lax.scan(add, jnp.zeros(ranked_BS.shape, jnp.float32), at_RZ)
            means_BS = ctx.psum_seq(sums_BS) / count_B1
            redundancy_BS = jax.nn.softmax(means_BS, axis=-1, where=ranked_BS)
            return self.lam * importance_BS - (1 - self.lam) * redundancy_BS

        q_BWKGH = cache.queries.reshape(batch, self.local, heads, -1, width)
        given = jnp.moveaxis(numbers(store.k), 1, 0), jnp.moveaxis(q_BWKGH, 2, 0)
        return jnp.moveaxis(jax.lax.map(each, given), 0, 1)
