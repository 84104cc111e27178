"""Attention of a decode step to pages of a store, and to slots near the ends of the text."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jax_longctx.contract import LayerContext
from pallas_kernels.common import AnyCache, Capped, merge
from pallas_kernels.sparse_decode_attention import (
    Pages,
    Shared,
    sparse_decode_attention,
    takes_around,
)


class Near(NamedTuple):
    """Slots [B, C] of all heads among a row's first and newest ones; -1 for none."""

    slots: Int[Array, "B C"]


# What a token attends to, one after the other; and what makes several such, of which one is taken.
Way = Sequence[Pages | Near]
Ways = Sequence[Callable[[], Way]]


def attended(
    q: Float[Array, "B 1 N H"],
    buffers: tuple[AnyCache, AnyCache],
    ways: Ways,
    ctx: LayerContext,
    prior: Any,
    shared: Shared | None = None,
) -> tuple[Array, ...]:
    """`Store.attend_pages` of these buffers, in which slots and pages lie as they are given."""
    k, v = buffers
    slots = k.shape[2] if shared is None else k.shape[2] + shared.k.shape[2]

    def whole(part: Pages | Near) -> Pages:
        """As pages; a list for each kv head at least, where rows share slots."""
        if isinstance(part, Near):
            start = jnp.zeros_like(part.slots[:, 0])
            part = Pages(part.slots[:, None], start, start + slots, 1)
        elif shared is None:
            return part
        return listed_apart(part, k.shape[1])

    def runs(part: Pages | Near) -> bool:
        if isinstance(part, Near) or part.around is None:
            return True
        part = whole(part)
        if isinstance(ctx.scale, Capped):
            return False
        return takes_around(q, k, part.listed, part.size, prior is not None, shared)

    way = next(way for way in (make() for make in ways) if all(map(runs, way)))
    how = {"scale": ctx.scale, "prior": prior, "shared": shared}
    return merged([sparse_decode_attention(q, k, v, whole(part), **how) for part in way])


def listed_apart(pages: Pages, kv_heads: int) -> Pages:
    """The same with a list for each kv head in place of one for all."""
    batch, lists, number = pages.listed.shape
    listed = jnp.broadcast_to(pages.listed, (batch, max(lists, kv_heads), number))
    return dataclasses.replace(pages, listed=listed)


def merged(parts: Sequence[tuple[Array, ...]]) -> tuple[Array, ...]:
    """Attentions to different slots as one, and those of the prior. One alone stays as it is."""
    if len(parts) == 1:
        return parts[0]
    return sum((merge([(x[i], x[i + 1]) for x in parts]) for i in range(0, len(parts[0]), 2)), ())
