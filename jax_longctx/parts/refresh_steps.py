"""RefreshKV's steps: the choice of a partial cache, partial steps and full steps.

Which steps are partial by schedule the host knows: they are a program that does not hold the full
cache's matmuls at all. In the others all rows are due alike. A full step by schedule has no branch
either; where a cosine decides, one `lax.cond` a layer says whether the full cache is touched, and
where one row must, every row of the shard does and takes the result that is its own. The token's
key and value are written to both caches before, so that the branches only read the large one. The
shards that hold parts of one row agree on the cosine's answer first (`LayerContext.agree`).
"""

import dataclasses
import typing
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jax_longctx.caches import AppendCache, append, local_slots, where_rows
from jax_longctx.caches.fifo import Count, FifoCache, FifoList, best_last, gather_fifo
from jax_longctx.contract import CHUNK_ROWS, QKV, Attended, LayerContext, Segment
from jax_longctx.parts.observation import pooled_scores
from jax_longctx.sharding import axes_field
from pallas_kernels.decode_attention import attend_with_logits, decode_attention
from pallas_kernels.sparse_decode_attention import sparse_decode_attention

__all__ = ["CHECK", "PARTIAL", "RefreshCache", "begin", "effective_strides", "step"]

Partial = FifoCache | FifoList

# Variants of decode steps: over the partial cache alone, and those that may attend every key.
PARTIAL = "partial"
CHECK = "check"


class Refresher(typing.Protocol):
    """The hyper-parameters that the steps depend on (see `jax_longctx.methods.refreshkv`)."""

    @property
    def budget(self) -> int | None: ...
    @property
    def ratio(self) -> float: ...
    @property
    def kernel(self) -> int: ...
    @property
    def over_group(self) -> Literal["max", "mean", "first"]: ...
    @property
    def schedule(self) -> Literal["adaptive", "fixed"]: ...
    @property
    def stride(self) -> int: ...
    @property
    def threshold(self) -> float: ...
    @property
    def qc_space(self) -> Literal["post_rope", "pre_rope"]: ...
    @property
    def evict_on_push(self) -> bool: ...
    @property
    def force_self(self) -> bool: ...
    @property
    def ablation(self) -> Literal["none", "no_refresh", "no_full"]: ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RefreshCache:
    """Every key and value of a row, and the part that decode reads.

    Attributes:
      partial: keys and values, or with `indexed` only which tokens they are.
      query: sum over all heads of the query of the layer's last full step.
      steps, full_steps: decode steps of this answer, and those that attended every key.
    """

    store: AppendCache
    partial: Partial
    query: Float[Array, "B H"] = axes_field("batch", None)
    steps: Int[Array, " B"] = axes_field("batch")
    full_steps: Int[Array, " B"] = axes_field("batch")

    def with_store(self, store: AppendCache) -> "RefreshCache":
        """The cache around another store."""
        return dataclasses.replace(self, store=store)

    @property
    def order(self) -> FifoList:
        """Which tokens the partial cache holds."""
        return self.partial.order if isinstance(self.partial, FifoCache) else self.partial


def effective_strides(caches: Sequence[RefreshCache]) -> list[float]:
    """Decode steps for each full step, layer by layer over all rows; inf where there was none."""
    sums = [(int(np.sum(cache.steps)), int(np.sum(cache.full_steps))) for cache in caches]
    return [steps / full if full else float("inf") for steps, full in sums]


def _budget(method: Refresher, cache: RefreshCache) -> Count:
    """Tokens that are chosen: as many for all rows, or a share of each row's own prompt."""
    if method.budget is not None:
        return method.budget
    prompt_B = cache.store.length - cache.steps
    return jnp.maximum(jnp.floor(jnp.float32(method.ratio) * prompt_B).astype(jnp.int32), 1)


def _limit(method: Refresher, cache: RefreshCache) -> Count:
    """Tokens that a partial step reads at most."""
    if isinstance(cache.partial, FifoCache) and not method.evict_on_push:
        return cache.partial.k.shape[2]
    return _budget(method, cache) + 1


def _leaving(method: Refresher) -> int | None:
    """Tokens that may leave the partial cache before it is chosen anew; None: any number."""
    if not method.evict_on_push:
        return 0
    if method.schedule == "fixed" and method.ablation != "no_refresh":
        return method.stride
    return None


def begin(
    method: Refresher, q: Float[Array, "B 1 N H"], cache: RefreshCache, ctx: LayerContext
) -> RefreshCache:
    """The cache as the answer starts, chosen by the prompt's last query (before rotation)."""
    rotated = ctx.rotate(q, cache.store.position[:, None] - 1)
    zeros = jnp.zeros_like(cache.steps)
    cache = dataclasses.replace(cache, steps=zeros, full_steps=zeros)
    every_B = jnp.ones(zeros.shape, bool)
    _, _, partial = _look(method, rotated, cache, every_B, ctx)
    query = _summed(q if method.qc_space == "pre_rope" else rotated, ctx)
    return dataclasses.replace(cache, partial=partial, query=query)


def step(
    method: Refresher, new: QKV, cache: RefreshCache, segment: Segment, ctx: LayerContext
) -> tuple[Attended, RefreshCache]:
    """One answered token (spec: decode step), partial or full as the schedule says."""
    q, k, v = new
    valid_B = segment.valid_of(CHUNK_ROWS)
    at_B1 = cache.store.position[:, None]
    raw, q, k = q, ctx.rotate(q, at_B1), ctx.rotate(k, at_B1)
    cache = dataclasses.replace(
        cache,
        store=append(cache.store, k, v, valid_B, ctx),
        partial=_push(method, cache, k, v, valid_B),
        steps=cache.steps + valid_B,
    )
    if segment.variant == PARTIAL:
        return _read(method, q, cache, ctx), cache
    turned_B = valid_B > 0
    done_B = ~turned_B
    summed_BH = _summed(raw if method.qc_space == "pre_rope" else q, ctx)
    if method.schedule == "fixed":
        out, lse, partial = _full_step(method, q, cache, turned_B, ctx)
    else:
        turned_B &= _cosine(summed_BH, cache.query) <= method.threshold
        # Branches hold collectives: every shard of a row must take the same one.
        turned_B = ctx.agree(turned_B)

        def stay() -> tuple[Array, Array, Partial]:
            return *_read(method, q, cache, ctx), cache.partial

        def full() -> tuple[Array, Array, Partial]:
            return _full_step(method, q, cache, turned_B, ctx)

        def some() -> tuple[Array, Array, Partial]:
            *attended, partial = full()
            return *where_rows(turned_B, tuple(attended), _read(method, q, cache, ctx)), partial

        all_or_some = jnp.where(jnp.all(turned_B | done_B), 2, 1)
        branch = jnp.where(jnp.any(turned_B), all_or_some, 0)
        out, lse, partial = jax.lax.switch(branch, [stay, some, full])
    cache = dataclasses.replace(
        cache,
        partial=partial,
        query=where_rows(turned_B, summed_BH, cache.query),
        full_steps=cache.full_steps + turned_B,
    )
    return (out, lse), cache


def _full_step(
    method: Refresher,
    q: Float[Array, "B 1 N H"],
    cache: RefreshCache,
    turned: Bool[Array, " B"],
    ctx: LayerContext,
) -> tuple[Float[Array, "B 1 N H"], Float[Array, "B 1 N"], Partial]:
    """Every key attended, the partial cache of `turned` rows chosen anew; less under ablations."""
    out, lse, partial = _look(method, q, cache, turned, ctx)
    if method.ablation == "no_refresh":
        partial = cache.partial
    if method.ablation == "no_full":
        out, lse = _read(method, q, dataclasses.replace(cache, partial=partial), ctx)
    return out, lse, partial


def _look(
    method: Refresher,
    q: Float[Array, "B 1 N H"],
    cache: RefreshCache,
    turned: Bool[Array, " B"],
    ctx: LayerContext,
) -> tuple[Float[Array, "B 1 N H"], Float[Array, "B 1 N"], Partial]:
    """One query over all keys: its output, and in `turned` rows what its probabilities choose."""
    store = cache.store
    batch, kv_heads, size, _ = store.k.shape
    held_B = store.held(ctx)
    *attended, logits_BNS = attend_with_logits(q, store.k, store.v, held_B, scale=ctx.scale)
    out, lse = ctx.seq_merge(*attended)
    # A row without keys has no log-sum-exp; nothing is chosen from it.
    base_BN1 = jnp.swapaxes(jnp.where(jnp.isfinite(lse), lse, 0.0), 1, 2)
    p_BKGS = jnp.exp(logits_BNS - base_BN1).reshape(batch, kv_heads, -1, size)
    over = {"max": jnp.max, "mean": jnp.mean, "first": lambda p, axis: p[:, :, 0]}
    mass_BKS = ctx.gather_seq(over[method.over_group](p_BKGS, axis=2), axis=2)
    own = 1 if method.force_self else 0
    scores_BKS = pooled_scores(mass_BKS, store.length, own, method.kernel, "max")
    listed = cache.order.chosen.shape[2]
    leaving = _leaving(method)
    order = best_last(scores_BKS, store.length, _budget(method, cache), listed, leaving)
    order = dataclasses.replace(order, chosen_axis=cache.order.chosen_axis)
    order = where_rows(turned, order, cache.order)
    if isinstance(cache.partial, FifoList):
        return out.astype(q.dtype), lse, order
    # The other rows' tokens are read again too: to keep them would copy their buffers.
    partial = gather_fifo(store, order, _limit(method, cache), cache.partial.k.shape[2], ctx)
    partial = dataclasses.replace(partial, slots_axis=cache.partial.slots_axis)
    return out.astype(q.dtype), lse, partial


def _push(method: Refresher, cache: RefreshCache, k: Array, v: Array, valid: Array) -> Partial:
    """The partial cache with the newest token."""
    if isinstance(cache.partial, FifoList):
        return cache.partial.push(valid)
    return cache.partial.push(k, v, valid, _limit(method, cache))


def _read(
    method: Refresher, q: Array, cache: RefreshCache, ctx: LayerContext
) -> tuple[Array, Array]:
    """One query over the partial cache."""
    partial, limit = cache.partial, _limit(method, cache)
    if isinstance(partial, FifoCache):
        length_B = partial.order.length(limit)
        return decode_attention(q, partial.k, partial.v, length_B, scale=ctx.scale)
    store, size = cache.store, cache.store.k.shape[2]
    # Tokens are slots of the full cache.
    local_BKC = local_slots(partial.tokens(limit, partial.chosen.shape[2] + 1), size, ctx)
    start_B = jnp.zeros_like(store.length)
    out, lse = sparse_decode_attention(
        q, store.k, store.v, local_BKC, start_B, start_B + size, page_size=1, scale=ctx.scale
    )
    return ctx.seq_merge(out, lse)


def _summed(q: Float[Array, "B 1 N H"], ctx: LayerContext) -> Float[Array, "B H"]:
    """Sum of the query over all heads; a cosine is the same as the mean's."""
    return ctx.psum_heads(jnp.sum(q[:, 0].astype(jnp.float32), axis=1))


def _cosine(a: Float[Array, "B H"], b: Float[Array, "B H"]) -> Float[Array, " B"]:
    """In [-1, 1], 0 where either is zero."""
    norms_B = jnp.linalg.norm(a, axis=1) * jnp.linalg.norm(b, axis=1)
    products_B = jnp.sum(a * b, axis=1)
    return jnp.clip(products_B / jnp.maximum(norms_B, jnp.finfo(jnp.float32).tiny), -1.0, 1.0)
