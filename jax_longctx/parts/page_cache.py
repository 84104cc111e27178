"""Which pages the authors' ArkVale code has on the device, and therefore attends.

Chen et al. 2024, section 4.3, as released: a layer keeps a fixed number of pages on the device and
the others on the host. After the prompt those stay that the last token scores best. At each step

1. a page that left the window is on the device;
2. the best pages by the newest query are recalled where they are not;
3. as many of the worst others go, and all that remain are attended, the best or not.

All keys are on the device here; what is emulated is which of them a step sees. Released code drops
a page for the one that leaves the window by the previous step's scores, here by the newest ones.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jax_longctx.contract import LayerContext
from jax_longctx.parts.selectors import Span
from pallas_kernels.select_large_k import select_large_k, select_mask

__all__ = ["held", "local_part", "recall"]


def held(
    resident: Bool[Array, "B X"], span: Span, before: Span, ctx: LayerContext
) -> Bool[Array, "B P"]:
    """Pages on the device before any is recalled; `before` is the span one token ago.

    `resident` is this shard's part.
    """
    entered_BP = (span.tokens > 0) & (before.tokens == 0)
    return ctx.gather_seq(resident, axis=1) | entered_BP


def recall(
    scores: Float[Array, "B P"], held: Bool[Array, "B P"], count: Int[Array, " B"], size: int
) -> tuple[Int[Array, "B C"], Bool[Array, "B P"]]:
    """The C = size pages (or all of fewer) on the device once the best count[b] are recalled.

    As ids, -1 for none, and as a mask. `scores` are -inf where a page cannot be selected.
    """
    wanted_BP = select_mask(scores, count)
    others_BP = jnp.where(held, scores, -jnp.inf)
    ranked_BP = jnp.where(wanted_BP, jnp.inf, others_BP)
    return select_large_k(ranked_BP, size, size=size), select_mask(ranked_BP, size)


def local_part(pages: Bool[Array, "B P"], ctx: LayerContext) -> Bool[Array, "B X"]:
    """This shard's part of a mask over all pages."""
    own = pages.shape[1] // ctx.seq_size
    return jax.lax.dynamic_slice_in_dim(pages, ctx.seq_offset(own), own, axis=1)
