"""KeyDiff: the keys that differ most from the mean key stay.

Park et al. 2025, "KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference in
Resource-Constrained Environments", section 3. Keys that point another way than the others get most
of the attention. The anchor of a kv head is the mean of its keys, each divided by its norm; a
token's score is minus the cosine of its key and the anchor. Keys are rotated, as they are cached.

The authors evict while they read the text block by block, in memory of a fixed size. Here, as in
kvpress, the whole text is ranked once, when it has been read.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_longctx.caches.reading import numbers
from jax_longctx.contract import LayerContext, method
from jax_longctx.parts.compressing import Compressing, whole


@method(source="Park et al. 2025 (KeyDiff), section 3")
class KeyDiff(Compressing):
    """After the context, only the keys that differ most from the mean key stay."""

    measures_keys = True

    def scores(self, cache: Any, ctx: LayerContext) -> Float[Array, "B K S"]:
        store = cache.store
        keys = numbers(store.k).astype(jnp.float32)
        unit_BKSH = keys / jnp.maximum(jnp.linalg.norm(keys, axis=-1, keepdims=True), 1e-12)
        held_BS = jnp.arange(keys.shape[2]) < store.held(ctx)[:, None]
        # Its length does not change a cosine: the sum stands for the mean.
        anchor_BKH = ctx.psum_seq(jnp.sum(unit_BKSH, axis=2, where=held_BS[:, None, :, None]))
        length_BK1 = jnp.linalg.norm(anchor_BKH, axis=-1, keepdims=True)
        anchor_BKH = anchor_BKH / jnp.maximum(length_BK1, 1e-12)
        return whole(-jnp.einsum("BKSH,BKH->BKS", unit_BKSH, anchor_BKH), ctx)
