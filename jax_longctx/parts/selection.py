"""The duties of methods that select pages for each query.

Prefill and question are exact attention over an append-only cache (keys after rotary embedding);
a decode step is `sparse_decode`'s. Layers with a sliding window stay exact, as do the first ones
where the method says so.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_longctx.caches import AppendCache, append, empty_append_cache, where_rows
from jax_longctx.contract import (
    CHUNK_ROWS,
    QKV,
    Attended,
    CacheShape,
    LayerContext,
    Prompt,
    Segment,
    Stage,
)
from jax_longctx.errors import ConfigError
from jax_longctx.models.config import ModelConfig
from jax_longctx.parts.appending import Appending
from jax_longctx.parts.digests import digest_scores, empty_digests, refresh
from jax_longctx.parts.selectors import (
    Allocation,
    Granularity,
    Pools,
    SelectiveCache,
    Selector,
    check,
)
from jax_longctx.parts.sparse_decode import (
    Selected,
    attend_selected,
    first_resident,
    most_pages,
)

__all__ = [
    "Allocation",
    "Granularity",
    "Pools",
    "SelectiveCache",
    "Selector",
    "adopt",
    "append_token",
    "attend",
    "check",
    "counted",
    "finish",
    "fork",
    "init_cache",
    "read_bytes",
    "read_exactly",
    "scores_of_digests",
    "segments",
    "validate",
]


class Rewindable(Protocol):
    """A cache that can go back to the end of its context."""

    def end_context(self) -> Any: ...
    def rewind(self) -> Any: ...


def validate(method: Selector, config: ModelConfig) -> None:
    """Every model can be read sparsely; RESA's stop test needs RESA."""
    if method.allocation == "psa-resa":
        raise ConfigError("allocation psa-resa needs RESA's prior; use the method resa")


def init_cache(method: Selector, shape: CacheShape) -> SelectiveCache | AppendCache:
    """A plain cache in layers that stay exact."""
    if shape.layer < method.skip_layers or shape.window is not None:
        return empty_append_cache(shape)
    resident = None
    if method.resident_pages:
        resident = jnp.zeros((shape.batch, shape.slots // method.page_size), bool)
    return SelectiveCache(
        empty_append_cache(shape),
        empty_digests(shape, method.page_size, method.summarise),
        jnp.zeros((shape.batch,), jnp.int32),
        jnp.zeros((shape.batch, shape.num_heads), jnp.int32),
        jnp.zeros((shape.batch,), jnp.int32),
        resident,
    )


def segments(method: Selector, prompt: Prompt) -> Iterable[Segment]:
    return Appending().segments(prompt)


def attend(
    method: Selector,
    new: QKV,
    cache: SelectiveCache | AppendCache,
    segment: Segment,
    ctx: LayerContext,
) -> tuple[Attended, SelectiveCache | AppendCache]:
    q, k, v = new
    if isinstance(cache, AppendCache):
        return Appending().attend(new, cache, segment, ctx)
    if segment.role == "decode":
        q, k, cache = append_token(method, q, k, v, cache, segment, ctx)
        chosen = attend_selected(method, q, cache, ctx)
        return (chosen.out, chosen.lse), counted(cache, chosen, segment)
    return read_exactly(method, new, cache, segment, ctx)


def read_exactly(
    method: Selector, new: QKV, cache: SelectiveCache, segment: Segment, ctx: LayerContext
) -> tuple[Attended, SelectiveCache]:
    """`attend` of context and question."""
    q, past_B = new[0], cache.store.length
    part, store = Appending().attend(new, cache.store, segment, ctx)
    cache = dataclasses.replace(cache, store=store, prompt=store.length)
    cache = _refreshed(method, cache, past_B, q.shape[1], ctx)
    if cache.resident is not None and segment.role == "query":
        valid_B = segment.valid_of(CHUNK_ROWS)
        last_B1 = jnp.maximum(valid_B - 1, 0)[:, None]
        last_B1NH = jnp.take_along_axis(q, last_B1[..., None, None], axis=1)
        rotated = ctx.rotate(last_B1NH, cache.store.position[:, None] - 1)
        begun = first_resident(method, rotated, cache, ctx)
        # The last segment of a question with tokens of a row is the one that counts.
        resident_BP = where_rows(valid_B > 0, begun, cache.resident)
        cache = dataclasses.replace(cache, resident=resident_BP)
    return part, cache


def adopt(
    method: Selector, cache: SelectiveCache | AppendCache, ctx: LayerContext
) -> SelectiveCache | AppendCache:
    """The cache whose store another method's prefill has filled: every page summarised."""
    if isinstance(cache, AppendCache):
        return cache
    store = cache.store
    cache = dataclasses.replace(cache, prompt=store.length)
    return _refreshed(method, cache, jnp.zeros_like(store.length), store.k.shape[2], ctx)


def _refreshed(
    method: Selector, cache: SelectiveCache, past: Array, added: int, ctx: LayerContext
) -> SelectiveCache:
    if cache.digests is None:
        return cache
    digests = refresh(
        cache.digests, method.summarise, cache.store, past, added, method.page_size, ctx
    )
    return dataclasses.replace(cache, digests=digests)


def append_token(
    method: Selector,
    q: Float[Array, "B 1 N H"],
    k: Float[Array, "B 1 K H"],
    v: Float[Array, "B 1 K H"],
    cache: SelectiveCache,
    segment: Segment,
    ctx: LayerContext,
) -> tuple[Float[Array, "B 1 N H"], Float[Array, "B 1 K H"], SelectiveCache]:
    """Query and key of a decode step, rotated, and the cache with the token."""
    past_B = cache.store.length
    positions_B1 = cache.store.position[:, None]
    q, k = ctx.rotate(q, positions_B1), ctx.rotate(k, positions_B1)
    store = append(cache.store, k, v, segment.valid_of(CHUNK_ROWS), ctx)
    cache = dataclasses.replace(cache, store=store)
    return q, k, _refreshed(method, cache, past_B, 1, ctx)


def counted(cache: SelectiveCache, chosen: Selected, segment: Segment) -> SelectiveCache:
    """The cache with one more step's kept tokens in its counters, and the step's page cache."""
    valid_B = segment.valid_of(CHUNK_ROWS)
    return dataclasses.replace(
        cache,
        kept=cache.kept + chosen.kept * valid_B[:, None],
        steps=cache.steps + valid_B,
        resident=where_rows(valid_B > 0, chosen.resident, cache.resident),
    )


def scores_of_digests(
    method: Selector, q: Float[Array, "B N H"], cache: SelectiveCache, ctx: LayerContext
) -> Float[Array, "B N P"]:
    """`Selector.scores` of methods that keep digests."""
    assert cache.digests is not None
    return digest_scores(q, cache.digests, cache.store.held(ctx), method.page_size)


def finish(method: object, cache: Rewindable, ctx: LayerContext, stage: Stage, reserve: int) -> Any:
    return cache.end_context()


def fork(method: object, cache: Rewindable) -> Any:
    return cache.rewind()


def read_bytes(method: Selector, cache: SelectiveCache | AppendCache, length: int) -> int:
    if isinstance(cache, AppendCache):
        return Appending().read_bytes(cache, length)
    store = cache.store
    if cache.digests is None:
        scored = store.k.nbytes
    else:
        scored = sum(leaf.nbytes for leaf in jax.tree.leaves(cache.digests))
    slots = store.k.shape[2]
    pages = method.resident_pages or most_pages(method, length, slots // method.page_size)
    tokens = min(pages * method.page_size + method.sink + method.local, length)
    # A group whose heads select alone reads a page once for each of them.
    times = cache.kept.shape[1] // store.k.shape[1] if method.granularity == "query_head" else 1
    keys = tokens * times * store.k.nbytes // slots
    if method.allocation in ("psa-oracle", "psa-estimate", "psa-resa"):
        # The visited keys are read to see where to stop, then again.
        scored += keys + (store.k.nbytes if method.allocation == "psa-oracle" else 0)
    return scored + 2 * keys
