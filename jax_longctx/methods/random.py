"""Random: the first and the last tokens stay, and any others.

The baseline of this project for rules that compress a text before they know the question: a rule
that keeps no more of what a question needs than chance has no use. Each kv head of each layer draws
its own tokens, all equally likely. What it draws from is the setting `seed`, the number of the head
and, in place of the layer's number, the channels in which the head's first keys are largest: so a
text is compressed alike in any batch and on any mesh.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_longctx.caches.reading import gather_slots
from jax_longctx.contract import LayerContext, method
from jax_longctx.parts.compressing import Compressing

# First keys that tell one layer from another.
_TELLING = 4


@method(source="a baseline of this project")
class Random(Compressing):
    """After the context, the first and last tokens and a random choice of the others stay.

    Attributes:
      seed: of the draw.
    """

    local: int = 64
    seed: int = 0

    def scores(self, cache: Any, ctx: LayerContext) -> Float[Array, "B K S"]:
        store = cache.store
        batch, heads, slots = store.sizes[:3]
        first_BKC = jnp.broadcast_to(jnp.arange(_TELLING), (batch, heads, _TELLING))
        first_BKC = jnp.where(first_BKC < store.length[:, None, None], first_BKC, -1)
        largest_BKC = jnp.argmax(jnp.abs(gather_slots(store.k, first_BKC, ctx)), axis=-1)
        # While an answer is written each draw is another one.
        gone_B = (store.position - store.length) << 16
        numbers_BK = gone_B[:, None] + ctx.head_offset(heads) + jnp.arange(heads)

        def draw(number: Array, largest_C: Array) -> Array:
            key = jax.random.key(self.seed)
            for part in (number, *largest_C):
                key = jax.random.fold_in(key, part)
            return jax.random.uniform(key, (slots * ctx.seq_size,))

        return jax.vmap(jax.vmap(draw))(numbers_BK, largest_BKC)
