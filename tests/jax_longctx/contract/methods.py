"""Three throw-away methods that need from the contract what no method of the library needs yet.

`KeepRecent`: its cache shrinks at `finish` (as SnapKV's will). `Instructed`: two row groups, chunk
and instruction, in one pass (CItruS). `Cautious`: a `lax.cond` a layer in decode (RefreshKV).
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jax_longctx.caches import (
    AppendCache,
    empty_append_cache,
    gather_slots,
)
from jax_longctx.contract import (
    CHUNK_ROWS,
    INSTRUCTION_ROWS,
    MethodInfo,
    beside,
    chunk_segments,
)
from jax_longctx.methods import Full
from jax_longctx.sharding import axes_field
from pallas_kernels.common import merge
from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.plane import part_of
from pallas_kernels.prefill_attention import cache_attention, causal_attention


def info(**changes: Any) -> MethodInfo:
    return dataclasses.replace(Full().info, append_only=False, **changes)


def bytes_per_slot(k: Any) -> int:
    return 2 * k.nbytes // k.shape[2]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RecentCache:
    """The kept tokens and room for what follows, whole on every shard of the slots."""

    k: Any = axes_field("batch", "kv_heads", "room", None)
    v: Any = axes_field("batch", "kv_heads", "room", None)
    length: Any = axes_field("batch")
    position: Any = axes_field("batch")


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeepRecent:
    """Full attention over the context, then only its last `budget` tokens stay."""

    budget: int = 4
    info: ClassVar[MethodInfo] = info(keeps_all=False)

    validate = Full.validate
    segments = Full.segments

    def init_cache(self, shape):
        return empty_append_cache(shape)

    def attend(self, new, cache, segment, ctx):
        q, k, v = new
        if isinstance(cache, AppendCache):
            return Full().attend(new, cache, segment, ctx)
        valid = segment.valid_of(CHUNK_ROWS)
        step = jnp.arange(q.shape[1])
        positions = cache.position[:, None] + step
        q, k = ctx.rotate(q, positions), ctx.rotate(k, positions)
        earlier = cache_attention(q, cache.k, cache.v, cache.length, scale=ctx.scale)
        out, lse = merge([earlier, causal_attention(q, k, v, scale=ctx.scale)])
        slots = jnp.where(step < valid[:, None], cache.length[:, None] + step, -1)
        # This cache is whole on every shard of the slots: written without an offset.
        write = jax.vmap(lambda row, new, at: row.at[:, at].set(new.swapaxes(0, 1), mode="drop"))
        slots = jnp.where(slots < 0, cache.k.shape[2], slots)
        return (
            (out, lse),
            RecentCache(
                write(cache.k, k, slots),
                write(cache.v, v, slots),
                cache.length + valid,
                cache.position + valid,
            ),
        )

    def finish(self, cache, ctx, stage, reserve):
        kept = jnp.minimum(cache.length, self.budget)
        first = cache.length - kept
        index = jnp.arange(self.budget + reserve)
        slots = jnp.where(index < kept[:, None], first[:, None] + index, -1)
        slots = jnp.broadcast_to(slots[:, None], (slots.shape[0], cache.k.shape[1], len(index)))
        return RecentCache(
            gather_slots(cache.k, slots, ctx),
            gather_slots(cache.v, slots, ctx),
            kept,
            cache.position,
        )

    def fork(self, cache):
        return jax.tree.map(jnp.copy, cache)

    def read_bytes(self, cache, length):
        return bytes_per_slot(cache.k) * min(length, self.budget)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MassCache:
    """An append-only cache and the attention mass the instruction gave each slot."""

    store: AppendCache
    mass: Any = axes_field("batch", "slots")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Instructed:
    """Full attention; beside each chunk the instruction looks at the cache and leaves its mass."""

    info: ClassVar[MethodInfo] = info(needs_question=True)

    validate = Full.validate

    def init_cache(self, shape):
        mass = jnp.zeros((shape.batch, shape.slots), jnp.float32)
        return MassCache(empty_append_cache(shape), mass)

    def segments(self, prompt):
        if prompt.stage == "question":
            return Full().segments(prompt)
        width = max(map(len, prompt.question))
        return [
            beside(chunk, prompt.question, width)
            for chunk in chunk_segments(prompt.context, prompt.chunk, "context")
        ]

    def attend(self, new, cache, segment, ctx):
        q, k, v = new
        if segment.role != "probe_and_context":
            (out, lse), store = Full().attend(new, cache.store, segment, ctx)
            return (out, lse), dataclasses.replace(cache, store=store)
        probe = segment.group(INSTRUCTION_ROWS).columns
        chunk = segment.group(CHUNK_ROWS).columns
        store = cache.store
        out_p, lse_p, mass = self._look(q[:, probe], k[:, probe], v[:, probe], store, segment, ctx)
        part = dataclasses.replace(
            segment,
            tokens=segment.tokens[:, chunk],
            valid=segment.valid[:, :1],
            groups=segment.groups[:1],
        )
        new_c = q[:, chunk], k[:, chunk], v[:, chunk]
        (out_c, lse_c), store = Full().attend(new_c, store, part, ctx)
        out = jnp.concatenate([out_c, out_p], axis=1)
        return (out, jnp.concatenate([lse_c, lse_p], axis=1)), MassCache(store, cache.mass + mass)

    def _look(self, q, k, v, store, segment, ctx):
        """The instruction over the cache as it is, itself causal; and the mass it leaves."""
        positions = store.position[:, None] + jnp.arange(q.shape[1])
        q, k = ctx.rotate(q, positions), ctx.rotate(k, positions)
        size = store.k.shape[2]
        offset = ctx.seq_offset(size)
        seen = jnp.clip(store.length - offset, 0, size)
        earlier = ctx.seq_merge(*cache_attention(q, store.k, store.v, seen, scale=ctx.scale))
        out, lse = merge([earlier, causal_attention(q, k, v, scale=ctx.scale)])
        grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[-1])  # [B, T, K, G, H]
        logits = jnp.einsum("BTKGH,BKSH->BTKGS", grouped, part_of(store.k)) * ctx.scale
        p = jnp.exp(logits - lse.reshape(*grouped.shape[:-1])[..., None])
        real = jnp.arange(q.shape[1]) < segment.valid_of(INSTRUCTION_ROWS)[:, None]
        p = jnp.where(real[:, :, None, None, None], p, 0.0).sum((1, 2, 3))
        p = jnp.where(jnp.arange(size) < seen[:, None], p, 0.0)
        return out, lse, ctx.psum_heads(p)

    def finish(self, cache, ctx, stage, reserve):
        return dataclasses.replace(cache, store=cache.store.end_context(reserve))

    def fork(self, cache):
        return jax.tree.map(jnp.copy, cache)

    def read_bytes(self, cache, length):
        return bytes_per_slot(cache.store.k) * length


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CautiousCache:
    """An append-only cache, the mean query of the newest token, and full steps taken."""

    store: AppendCache
    query: Any = axes_field("batch", None)
    full_steps: Any = axes_field("batch")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cautious:
    """Decode reads the last `window` tokens, or all when the mean query has turned."""

    threshold: float = 0.5
    window: int = 3
    info: ClassVar[MethodInfo] = info(phase="decode")

    validate = Full.validate
    segments = Full.segments

    def init_cache(self, shape):
        return CautiousCache(
            empty_append_cache(shape),
            jnp.zeros((shape.batch, shape.head_dim), jnp.float32),
            jnp.zeros((shape.batch,), jnp.int32),
        )

    def attend(self, new, cache, segment, ctx):
        q, k, v = new
        valid = segment.valid_of(CHUNK_ROWS)
        raw_mean = ctx.psum_heads(q.astype(jnp.float32).sum(2))
        last = jnp.maximum(valid - 1, 0)[:, None, None]
        mean = jnp.take_along_axis(raw_mean, last, axis=1)[:, 0]
        mean = jnp.where(valid[:, None] > 0, mean, cache.query)
        if segment.role != "decode":
            (out, lse), store = Full().attend(new, cache.store, segment, ctx)
            return (out, lse), CautiousCache(store, mean, cache.full_steps)
        norms = jnp.linalg.norm(mean, axis=-1) * jnp.linalg.norm(cache.query, axis=-1)
        turned = (mean * cache.query).sum(-1) <= self.threshold * norms
        turned = turned & (valid > 0)
        positions = cache.store.position[:, None]
        q, k = ctx.rotate(q, positions), ctx.rotate(k, positions)
        store = cache.store.append(k, v, valid, ctx)
        size = store.k.shape[2]
        offset = ctx.seq_offset(size)
        seen = jnp.clip(store.length - offset, 0, size)

        def read(window):
            return decode_attention(
                q,
                store.k,
                store.v,
                seen,
                scale=ctx.scale,
                window=window,
                query_start=positions[:, 0],
                slot_start=offset,
            )

        def either():
            whole, recent = read(None), read(self.window)
            pick = turned[:, None, None]
            out = jnp.where(pick[..., None], whole[0], recent[0])
            return out, jnp.where(pick, whole[1], recent[1])

        # Any row of this shard that turned makes the layer read the whole cache.
        part = jax.lax.cond(jnp.any(turned), either, lambda: read(self.window))
        steps = cache.full_steps + turned
        return ctx.seq_merge(*part), CautiousCache(store, mean, steps)

    def finish(self, cache, ctx, stage, reserve):
        return dataclasses.replace(cache, store=cache.store.end_context(reserve))

    def fork(self, cache):
        return jax.tree.map(jnp.copy, cache)

    def read_bytes(self, cache, length):
        return bytes_per_slot(cache.store.k) * min(length, self.window)


__all__ = ["Cautious", "Instructed", "KeepRecent"]
