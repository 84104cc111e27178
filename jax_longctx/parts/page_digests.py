"""What a selector keeps of each page of a cache, and how it is kept right as tokens come and go.

A page is `page_size` slots that lie together on one shard of the slots. After tokens were appended,
the pages they touch are summarised anew from their keys. That costs little more than the tokens'
own keys, needs no state of a half-filled page, and is right again after a cache was rewound.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jax_longctx.caches import AppendCache, read_lines, write_rows
from jax_longctx.contract import CacheShape, LayerContext
from jax_longctx.sharding import axes_field
from pallas_kernels.page_scores import page_scores


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PageDigests:
    """A box, a ball or a point for the keys of each page.

    Attributes:
      high: the box's upper corner, or the centre of a ball or point.
      low: the box's lower corner; None for the others.
      radius: the ball's; None for the others.
    """

    high: Float[Array, "B K P H"] = axes_field("batch", "kv_heads", "pages", None)
    low: Float[Array, "B K P H"] | None = axes_field("batch", "kv_heads", "pages", None)
    radius: Float[Array, "B K P"] | None = axes_field("batch", "kv_heads", "pages")


# Keys [B,K,P,Z,H] and which slots [B,P,Z] are held -> the pages' digests, finite for empty pages,
# or None for a method that keeps none.
Summarise = Callable[[Array, Array], PageDigests | None]


def empty_digests(shape: CacheShape, page_size: int, summarise: Summarise) -> PageDigests | None:
    """Digests of `shape.slots` empty slots; None where `summarise` makes none."""
    pages = shape.slots // page_size
    keys = (shape.batch, shape.num_kv_heads, pages, page_size, shape.head_dim)
    abstract = jax.eval_shape(
        summarise,
        jax.ShapeDtypeStruct(keys, shape.dtype),
        jax.ShapeDtypeStruct((shape.batch, pages, page_size), jnp.bool_),
    )
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract)


def refresh(
    digests: PageDigests,
    summarise: Summarise,
    store: AppendCache,
    past: Int[Array, " B"],
    added: int,
    page_size: int,
    ctx: LayerContext,
) -> PageDigests:
    """Digests that are right for `store`, whose rows got up to `added` tokens after `past`."""
    pages = store.k.shape[2] // page_size
    touched = min((added + page_size - 2) // page_size + 1, pages)
    # A run of pages that crosses the shard's border is shifted: to redo a page does no harm.
    first_B = jnp.clip(past // page_size - ctx.seq_offset(pages), 0, pages - touched)
    slot_BM = first_B[:, None] * page_size + jnp.arange(touched * page_size)
    paged = (*store.k.shape[:2], touched, page_size, store.k.shape[3])
    keys_BKPZH = read_lines(store.k, slot_BM[:, None]).reshape(paged)
    held_BM = slot_BM < store.held(ctx)[:, None]
    new = summarise(keys_BKPZH, held_BM.reshape(-1, touched, page_size))
    count_B = jnp.full_like(first_B, touched)

    def write(old: Array, new: Array) -> Array:
        if new.ndim == 3:
            return write(old[..., None], new[..., None])[..., 0]
        return write_rows(old, jnp.swapaxes(new, 1, 2), first_B, count_B)

    return jax.tree.map(write, digests, new)


def digest_scores(
    q: Float[Array, "B N H"], digests: PageDigests, length: Int[Array, " B"], page_size: int
) -> Float[Array, "B N P"]:
    """The largest (unscaled) q.k in a page's box or ball, q.centre for a point; float32.

    -inf from the first page on that begins at or beyond slot length[b].
    """
    filled_B = jnp.maximum(-(-length // page_size), 0)
    low = digests.high if digests.low is None else digests.low
    scores_BNP = page_scores(q, digests.high, low, filled_B)
    if digests.radius is None:
        return scores_BNP
    norm_BN = jnp.linalg.norm(q.astype(jnp.float32), axis=-1)
    radius_BNP = jnp.repeat(digests.radius, q.shape[1] // digests.radius.shape[1], axis=1)
    return scores_BNP + norm_BN[..., None] * radius_BNP


def masked_mean(
    x: Float[Array, "B K P Z *H"], held: Bool[Array, "B P Z"]
) -> Float[Array, "B K P *H"]:
    """Mean over the held slots of a page, in float32; 0 for an empty page."""
    held = held[:, None].astype(jnp.float32)
    held = held.reshape(*held.shape, *[1] * (x.ndim - 4))
    total = jnp.sum(jnp.where(held > 0, x.astype(jnp.float32), 0.0), axis=3)
    return total / jnp.maximum(jnp.sum(held, axis=3), 1.0)


def masked_max(x: Float[Array, "B K P Z *H"], held: Bool[Array, "B P Z"]) -> Array:
    """Maximum over the held slots of a page, in x's dtype; 0 for an empty page."""
    held = held[:, None].reshape(held.shape[0], 1, *held.shape[1:], *[1] * (x.ndim - 4))
    top = jnp.max(jnp.where(held, x, -jnp.inf), axis=3)
    return jnp.where(jnp.any(held, axis=3), top, 0).astype(x.dtype)
