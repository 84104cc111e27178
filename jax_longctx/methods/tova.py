"""TOVA: the tokens that the newest token attends to most.

Oren et al. 2024, section 3.2. After a segment each layer keeps the `budget` tokens with the highest
attention probability under the segment's last token, averaged over all query heads, so that all
heads of a layer keep the same tokens; the last token itself competes. Scores are not remembered
from one segment to the next. In decode one token leaves a step. Cost: attention over the budget,
and one more row of scores.

Differences from the authors' code, which drops once after the whole prompt: prefill goes in
chunks, each followed by an eviction, so that memory is bounded (a `chunk` as long as the text
equals theirs). Kept tokens stay in the order of the text, as `shifted` needs. As a baseline of
CItruS (`protocol=citrus`, `positions=shifted`) the last row of a chunk ranks the tokens before it,
and the last row of the question those that remain.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_longctx.contract import method
from jax_longctx.parts.evicting import Evicting, Look
from pallas_kernels.attention_mass import Reduction, attention_mass


@method(source="Oren et al. 2024, section 3.2")
class TOVA(Evicting):
    """The tokens that the newest one attends to most, per layer."""

    def rank(self, seen: Look) -> Float[Array, "B 1 U"]:
        # The sum over all heads, in place of their mean.
        mass_BKU = _of_last_row(seen)
        return seen.ctx.psum_heads(jnp.sum(mass_BKU, axis=1))[:, None]


def _of_last_row(seen: Look) -> Float[Array, "B K U"]:
    """Each row's last valid query: its probability of every slot and token, over the group."""
    last_B1 = jnp.maximum(seen.valid - 1, 0)[:, None]
    q_B1NH = jnp.take_along_axis(seen.q, last_B1[..., None, None], axis=1)
    lse_B1N = jnp.take_along_axis(seen.log_total, last_B1[..., None], axis=1)
    how, length_B = Reduction(seen.ctx.scale), seen.cache.length
    past = attention_mass(q_B1NH, seen.past_k, lse_B1N, length_B, how)
    # It sees every valid token of its segment, so no causal start is needed.
    k_BKTH = jnp.swapaxes(seen.k, 1, 2)
    new = attention_mass(q_B1NH, k_BKTH, lse_B1N, seen.valid, how)
    return jnp.concatenate([past, new], axis=2)
