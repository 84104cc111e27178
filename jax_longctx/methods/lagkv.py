"""LagKV: tokens stay that stand out from the tokens that follow them.

Liang et al. 2025, "LagKV: Lag-Relative Information of the KV Cache Tells Which Tokens Are
Important", section 3. After the first `sink` tokens the text is cut into parts of `lag` tokens.
In each kv head, for keys and for values,

1. a channel of a part is scaled by the smallest and the largest number that it has in the next
   part;
2. a token's number is the standard deviation over its channels, and its share the softmax of these
   numbers within the part.

The sums of both shares rank the tokens of a part. Parts are alike: each gives its best tokens. The
last whole part and what follows have no next part to be compared with: they come before all others,
the newest first.

The authors keep a share of each part while they read. Here, as in kvpress, the ranks within all
parts share one budget, when the text has been read. A channel that is constant in the next part
counts as 0, where the formula divides by zero.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_longctx.caches.reading import numbers
from jax_longctx.contract import LayerContext, method
from jax_longctx.parts.compressing import Compressing, whole


@method(source="Liang et al. 2025 (LagKV), section 3")
class LagKV(Compressing):
    """After the context, only tokens stay that differ from the tokens after them.

    Attributes:
      lag: tokens of a part.
    """

    lag: int = 128

    by_values = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least(2, "lag")

    def scores(self, cache: Any, ctx: LayerContext) -> Float[Array, "B K S"]:
        store, lag = cache.store, self.lag
        slots = store.sizes[2] * ctx.seq_size
        parts = -(-max(slots - self.sink, 1) // lag)
        pad = (0, 0), (0, 0), (0, parts * lag)

        def shares(x: Array) -> Float[Array, "B K P Z"]:
            spread_BKS = jnp.pad(whole(self._spread(x, parts, store.held(ctx), ctx), ctx), pad)
            among_BKE = spread_BKS[..., self.sink : self.sink + parts * lag]
            return jax.nn.softmax(among_BKE.reshape(*x.shape[:2], parts, lag), axis=-1)

        sums_BKPZ = shares(numbers(store.k)) + shares(numbers(store.v))
        ranks_BKPZ = jnp.argsort(jnp.argsort(sums_BKPZ, axis=-1), axis=-1) / lag
        ranks_BKS = ranks_BKPZ.reshape(*ranks_BKPZ.shape[:2], -1)  # [B, K, P * Z]
        ranks_BKS = jnp.pad(ranks_BKS, ((0, 0), (0, 0), (self.sink, 0)))[..., :slots]
        compared_B = jnp.maximum((store.length - self.sink) // lag - 1, 0) * lag
        index_S = jnp.arange(slots)
        last_BS = index_S >= self.sink + compared_B[:, None]
        return jnp.where(last_BS[:, None], 1 + index_S / slots, ranks_BKS)

    def _spread(self, x: Array, parts: int, held: Array, ctx: LayerContext) -> Array:
        """[B, K, S]: the deviation of each of this shard's tokens, seen from the next part."""
        x = x.astype(jnp.float32)
        index_S = jnp.arange(x.shape[2])
        part_S = (ctx.slots(x.shape[2]).at(index_S) - self.sink) // self.lag
        into_S = jnp.where(part_S < 0, parts, part_S)
        held_BS = (index_S < held[:, None])[:, None, :, None]

        def most(x: Array) -> Array:
            empty = jnp.full((*x.shape[:2], parts, x.shape[3]), -jnp.inf)
            found = empty.at[:, :, into_S].max(jnp.where(held_BS, x, -jnp.inf), mode="drop")
            found = jnp.roll(ctx.pmax_seq(found), -1, axis=2)
            return jnp.take(found, into_S, axis=2, mode="clip")

        least, range_BKSH = -most(-x), most(x) + most(-x)
        scaled = jnp.where(range_BKSH > 0, (x - least) / range_BKSH, 0.0)
        return jnp.std(scaled, axis=-1, ddof=1)
