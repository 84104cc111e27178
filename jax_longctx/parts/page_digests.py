"""What a selector keeps of each page of a cache: digests, and the largest products they allow."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jax_longctx.caches import Branched, parting
from jax_longctx.contract import LayerContext
from jax_longctx.sharding import axes_field
from pallas_kernels.dispatch import platform
from pallas_kernels.page_scores import Digests, SharedPages, page_scores, shared_page_scores
from pallas_kernels.plane import Plane


@parting
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PageDigests:
    """A box, a ball or a point for the keys of each page.

    Attributes:
      high: the box's upper corner, or the centre of a ball or point.
      low: the box's lower corner; None for the others.
      radius: the ball's; None for the others.
    """

    high: Float[Array, "B K P H"] | Plane = axes_field(
        "batch", "kv_heads", "pages", None, in_place=True
    )
    low: Float[Array, "B K P H"] | Plane | None = axes_field(
        "batch", "kv_heads", "pages", None, in_place=True
    )
    radius: Float[Array, "B K P"] | None = axes_field("batch", "kv_heads", "pages")

    @property
    def plain(self) -> Digests:
        """As the operations take them."""
        return Digests(self.high, self.low, self.radius)


def digest_scores(
    q: Float[Array, "B N H"], digests: PageDigests, length: Int[Array, " B"], page_size: int
) -> Float[Array, "B N P"]:
    """The largest (unscaled) q.k in a page's box or ball, q.centre for a point; float32.

    -inf from the first page on that begins at or beyond slot length[b].
    """
    return page_scores(q, digests.plain, jnp.maximum(-(-length // page_size), 0))


def branched_scores(
    q: Float[Array, "B N H"],
    digests: Branched,
    own_length: Int[Array, " B"],
    page_size: int,
    ctx: LayerContext,
) -> Float[Array, "B N P"]:
    """`digest_scores` of rows that share the first pages, of P = shared and own pages at most.

    Args:
      own_length: this shard's slots of each row that it does not share.
    """
    shared = shared_pages(digests, page_size, ctx)
    pages_B = shared.split + jnp.maximum(-(-own_length // page_size), 0)
    return shared_page_scores(q, digests.own.plain, pages_B, shared)


def shared_pages(digests: Branched, page_size: int, ctx: LayerContext) -> SharedPages:
    """This shard's digests that rows share."""
    shared, split = digests.shared, digests.split
    if ctx.seq_size > 1:
        split = ctx.slots(shared.high.shape[2], page_size).below(split)
    return SharedPages(shared.plain, split)


def masked_mean(
    x: Float[Array, "B K P Z *H"], held: Bool[Array, "B P Z"]
) -> Float[Array, "B K P *H"]:
    """Mean over the held slots of a page, in float32; 0 for an empty page."""
    held = held[:, None].astype(jnp.float32)
    held = held.reshape(*held.shape, *[1] * (x.ndim - 4))
    total = _over_slots(jnp.add, jnp.where(held > 0, x.astype(jnp.float32), 0.0))
    return total / jnp.maximum(_over_slots(jnp.add, held), 1.0)


def masked_max(x: Float[Array, "B K P Z *H"], held: Bool[Array, "B P Z"]) -> Array:
    """Maximum over the held slots of a page, its first ones, in x's dtype; 0 for an empty page."""
    held = held[:, None].reshape(held.shape[0], 1, *held.shape[1:], *[1] * (x.ndim - 4))
    top = _over_slots(jnp.maximum, jnp.where(held, x, -jnp.inf))
    return jnp.where(held[:, :, :, 0], top, 0).astype(x.dtype)


def _over_slots(combine: Callable[[Array, Array], Array], x: Array) -> Array:
    """The slots of each page added or, by `jnp.maximum`, their maximum.

    Of one page on a GPU, as a decode step has it, slot after slot: elementwise operations fuse with
    the write of the digest, reductions would be launches.
    """
    if platform() == "gpu" and x.shape[2] == 1:
        each = [jax.lax.index_in_dim(x, i, axis=3, keepdims=False) for i in range(x.shape[3])]
        while len(each) > 1:
            pairs = zip(each[::2], each[1::2], strict=False)
            each = [combine(*pair) for pair in pairs] + each[len(each) & ~1 :]
        return each[0]
    return jnp.sum(x, axis=3) if combine is jnp.add else jnp.max(x, axis=3)
