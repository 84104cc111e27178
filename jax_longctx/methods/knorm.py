"""Knorm: the keys of the smallest norms stay.

Devoto et al. 2024, "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression",
section 3. Queries give much of their attention to keys of small L2 norm. So a token's score is
-||k||, and neither attention nor the question is needed. Rotary embedding keeps norms as they are.

The authors leave the first two layers whole; kvpress and this file compress every layer. `sink`
tokens stay besides, which 0 turns off.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_longctx.caches.reading import numbers
from jax_longctx.contract import LayerContext, method
from jax_longctx.parts.compressing import Compressing, whole


@method(source="Devoto et al. 2024, section 3")
class Knorm(Compressing):
    """After the context, only the keys of the smallest norms stay."""

    measures_keys = True

    def scores(self, cache: Any, ctx: LayerContext) -> Float[Array, "B K S"]:
        keys = numbers(cache.store.k).astype(jnp.float32)
        return whole(-jnp.linalg.norm(keys, axis=-1), ctx)
