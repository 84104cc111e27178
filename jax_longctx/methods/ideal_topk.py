"""Ideal top-k: each query reads exactly the tokens of its largest products.

The upper bound for selectors (RESA, section 5.1). Every key is read and scored exactly; only values
are left out, and no time is saved. `granularity=kv_head` ranks by the mean of the group's
softmaxes.
"""

from jaxtyping import Array, Float

from jax_longctx.caches import SelectiveCache
from jax_longctx.contract import LayerContext, method
from jax_longctx.parts.selecting import Selecting
from pallas_kernels.decode_attention import decode_logits


@method(source="RESA, section 5.1")
class IdealTopK(Selecting):
    """Decode attends the best tokens by exact score: what a selector can reach at most."""

    def scores(
        self, q: Float[Array, "B N H"], cache: SelectiveCache, ctx: LayerContext
    ) -> Float[Array, "B N P"]:
        """q.k of this shard's slots, unscaled."""
        return decode_logits(q[:, None], cache.store.all_keys, cache.store.held(ctx), scale=1.0)
