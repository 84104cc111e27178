"""SnapKV: after the question, each layer keeps the tokens that the prompt's last queries attended.

Li et al. 2024, "SnapKV: LLM Knows What You are Looking for Before Generation", section 4. Context
and question are read by full attention. Then, in each layer and for each kv head,

1. the last `window` queries' probabilities over all keys are summed over these queries and reduced
   over the query heads that share a kv head;
2. the sums of all tokens before the window are pooled over `kernel` neighbours;
3. the budget - window best tokens and the window itself stay, at their true positions.

Reading the question costs one more pass of `window` queries over the keys (their log-sum-exp is
remembered from the prefill, layer by layer); each answered token reads budget + answer tokens. The
cache of the context stays for the next question, and is freed where there will be none.

Beside the paper: the authors repeat keys for every query head before they are cached, so that each
query head keeps its own tokens and grouped queries save no memory; here a kv head's group shares
one choice (`over_group`; `layer` averages over all heads of the layer), unless `expand_kv` asks for
theirs: the answer's cache is then as many times larger. `decode_policy="fifo"` lets a token leave
for each new one, the lowest score first, then the oldest: RefreshKV's partial cache.
"""

from collections.abc import Iterable
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_longctx.caches.fifo import FifoCache, best_last, gather_fifo, padded
from jax_longctx.caches.observed import ObservedCache, empty_observed_cache
from jax_longctx.contract import (
    CHUNK_ROWS,
    QKV,
    Attended,
    CacheShape,
    LayerContext,
    Prompt,
    Registered,
    Segment,
    Stage,
    method,
)
from jax_longctx.errors import ConfigError
from jax_longctx.models.config import ModelConfig
from jax_longctx.parts.appending import Appending
from jax_longctx.parts.observation import Pool, check_kernel, pooled_scores, refuse_windows
from pallas_kernels.attention_mass import attention_mass
from pallas_kernels.decode_attention import decode_attention

__all__ = ["SnapKV"]


@method(source="Li et al. 2024, section 4")
class SnapKV(Registered):
    """After the question, only the tokens that its end attended stay for the answer."""

    budget: int = 1024
    window: int = 32
    kernel: int = 7
    pool: Pool = "max"
    over_group: Literal["mean", "max", "first", "layer"] = "mean"
    decode_policy: Literal["grow", "fifo"] = "grow"
    expand_kv: bool = False

    phase = "decode"
    query_aware = True
    append_only = True
    shrinks = True

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ConfigError(f"SnapKV: window must be at least 1, got {self.window}")
        if self.budget <= self.window:
            raise ConfigError(
                f"SnapKV: budget {self.budget} must exceed window {self.window}; raise budget"
            )
        check_kernel("SnapKV", self.kernel)
        if self.expand_kv and self.over_group != "mean":
            raise ConfigError(
                f"SnapKV: expand_kv chooses for each query head, so that over_group "
                f"{self.over_group} has nothing to reduce; leave over_group away"
            )

    def validate(self, config: ModelConfig) -> None:
        refuse_windows("SnapKV", config)

    def init_cache(self, shape: CacheShape) -> ObservedCache:
        return empty_observed_cache(shape, self.window)

    def segments(self, prompt: Prompt) -> Iterable[Segment]:
        return Appending().segments(prompt)

    def attend(
        self, new: QKV, cache: ObservedCache | FifoCache, segment: Segment, ctx: LayerContext
    ) -> tuple[Attended, ObservedCache | FifoCache]:
        q, k, v = new
        valid_B = segment.valid_of(CHUNK_ROWS)
        if isinstance(cache, FifoCache):
            at_B1 = cache.order.position[:, None]
            limit = self.limit(cache)
            # With expand_kv each query head's own.
            each = cache.k.shape[1] // k.shape[2]
            k, v = (jnp.repeat(x, each, axis=2) for x in (ctx.rotate(k, at_B1), v))
            cache = cache.push(k, v, valid_B, limit)
            length_B = cache.order.length(limit)
            part = decode_attention(
                ctx.rotate(q, at_B1), cache.k, cache.v, length_B, scale=ctx.scale
            )
            return part, cache
        at_BT = cache.store.position[:, None] + jnp.arange(q.shape[1])
        (out, lse), store = Appending().attend(new, cache.store, segment, ctx)
        return (out, lse), cache.observe(store, ctx.rotate(q, at_BT), lse, valid_B)

    def limit(self, cache: FifoCache) -> int:
        """Slots of the answer's cache before the first token leaves."""
        return cache.k.shape[2] if self.decode_policy == "grow" else self.budget + 1

    def finish(
        self, cache: ObservedCache, ctx: LayerContext, stage: Stage, reserve: int
    ) -> ObservedCache | FifoCache:
        if stage == "context":
            return cache.end_context()
        store = cache.store
        # X is K, or N with expand_kv.
        mass_BXS = self._mass_by_head(cache, ctx) if self.expand_kv else self._mass(cache, ctx)
        scores_BXS = pooled_scores(mass_BXS, store.length, self.window, self.kernel, self.pool)
        size = min(self.budget, scores_BXS.shape[2])
        order = best_last(scores_BXS, store.length, self.budget, size)
        room = reserve if self.decode_policy == "grow" else min(reserve, self.budget + 1 - size)
        capacity = padded(size + room)
        return gather_fifo(store, order, capacity, capacity, ctx)

    def _mass(self, cache: ObservedCache, ctx: LayerContext) -> Float[Array, "B K S"]:
        """Mean probability that the window's queries gave each token before it, on all shards."""
        store = cache.store
        # Tokens before the window are seen by all of it: no mask among its queries is needed.
        seen_B = store.held(ctx, but_last=self.window)
        group = "sum" if self.over_group in ("mean", "layer") else self.over_group
        mass_BKS = attention_mass(
            cache.queries, store.k, cache.lse, seen_B, scale=ctx.scale, over_group=group
        )
        mass_BKS = mass_BKS / self.window
        if group == "sum":
            mass_BKS = mass_BKS / (cache.queries.shape[2] // store.k.shape[1])
        if self.over_group == "layer":
            mean_B1S = ctx.psum_heads(jnp.mean(mass_BKS, axis=1, keepdims=True)) / ctx.head_shards
            mass_BKS = jnp.broadcast_to(mean_B1S, mass_BKS.shape)
        return ctx.gather_seq(mass_BKS, axis=2)

    def _mass_by_head(self, cache: ObservedCache, ctx: LayerContext) -> Float[Array, "B N S"]:
        """`_mass` of every query head, on all shards."""
        store = cache.store
        seen_B, kv_heads = store.held(ctx, but_last=self.window), store.k.shape[1]
        grouped = (*cache.lse.shape[:2], kv_heads, -1)  # [B, W, K, G]
        q_GBWKH = jnp.moveaxis(cache.queries.reshape(*grouped, store.k.shape[3]), 3, 0)
        lse_GBWK = jnp.moveaxis(cache.lse.reshape(grouped), 3, 0)

        def one(head: tuple[Array, Array]) -> Float[Array, "B K S"]:
            return attention_mass(head[0], store.k, head[1], seen_B, scale=ctx.scale)

        mass_GBKS = jax.lax.map(one, (q_GBWKH, lse_GBWK)) / self.window
        mass_BKGS = jnp.moveaxis(mass_GBKS, 0, 2)
        mass_BNS = mass_BKGS.reshape(len(seen_B), -1, store.k.shape[2])
        return ctx.gather_seq(mass_BNS, axis=2)

    def fork(self, cache: ObservedCache) -> ObservedCache:
        return cache.rewind()

    def read_bytes(self, cache: ObservedCache | FifoCache, length: int) -> int:
        buffer = cache.k if isinstance(cache, FifoCache) else cache.store.k
        token = 2 * buffer.size // buffer.shape[2] * buffer.dtype.itemsize
        if isinstance(cache, FifoCache):
            return token * buffer.shape[2]
        each = cache.queries.shape[2] // buffer.shape[1] if self.expand_kv else 1
        return each * token * min(length, self.budget)
