"""Attention within a window at true distances, merged with what lies outside it.

The near part of InfLLM's attention (see `clamped` for the others) and, since it needs the
log-sum-exp of the whole, what the tokens in the window receive (see `received`).

Positions are counted from the window's first token, so that angles stay small in a text of any
length. A chunk attends three parts: the tokens that leave its window while it is read, under a
mask; the rest of the window, which all its queries see; and itself.
"""

import dataclasses
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jax_longctx.caches import AppendCache
from jax_longctx.contract import QKV, Attended, LayerContext
from jax_longctx.parts import received
from jax_longctx.parts.clamped import Run, read_run
from pallas_kernels.decode_attention import attend_logits, decode_logits
from pallas_kernels.lse import merge
from pallas_kernels.prefill_attention import cache_attention, causal_attention

__all__ = ["Near", "Score"]

Score = Literal["mass", "logit"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Near:
    """Attention to the `window` newest tokens of each query.

    Attributes:
      score: what tokens receive.
      begin, valid: the new tokens are begin[b] .. begin[b] + valid[b] - 1, cached already.
    """

    window: int
    score: Score
    begin: Int[Array, " B"]
    valid: Int[Array, " B"]
    ctx: LayerContext

    def attend(
        self, new: QKV, store: AppendCache, others: list[Attended]
    ) -> tuple[Attended, tuple[Array, Array, Array], Float[Array, "B N T"] | None]:
        """The merged attention, and what tokens receive, as `block_memory.keep_received` takes it.

        Args:
          q, k, v: the new tokens', before rotary embedding.
          others: this shard's parts outside the window.
        """
        q, k, v = new
        alone = q.shape[1] == 1
        start_B = jnp.maximum(self.begin - self.window, 0)
        end_B = self.begin + self.valid if alone else self.begin
        slots_BX = start_B[:, None] + jnp.arange(self.window + alone)
        run = read_run(store, slots_BX, end_B - start_B, self.ctx)
        first_B = start_B + run.first
        back_BX = (self.begin - first_B)[:, None] - jnp.arange(run.k.shape[2])
        near = self.ctx.rotate(jnp.swapaxes(run.k, 1, 2), self.window - back_BX)
        run = run._replace(k=jnp.swapaxes(near, 1, 2))
        at_T = self.window + jnp.arange(q.shape[1])
        at_BT = jnp.broadcast_to(at_T, q.shape[:2])
        q = self.ctx.rotate(q, at_BT)
        if alone:
            part, seen, own = *self._token(q, run, back_BX, others), None
        else:
            k = self.ctx.rotate(k, at_BT)
            part, seen, own = self._chunk(q, k, v, run, back_BX, others)
        return part, (seen, first_B, run.number), own

    def _token(
        self, q: Array, run: Run, back: Array, others: list[Attended]
    ) -> tuple[Attended, Float[Array, "B N X"]]:
        """A lone token, one of the run itself."""
        logits = decode_logits(q, run.k, run.number, scale=self.ctx.scale)
        near = attend_logits(jnp.where((back < self.window)[:, None], logits, -jnp.inf), run.v)
        part = self.ctx.seq_merge(*merge([*others, near]))
        if self.score == "logit":
            return part, received.logit_of_token(logits, back)
        return part, received.mass_of_token(logits, part[1], back, self.window)

    def _chunk(
        self, q: Array, k: Array, v: Array, run: Run, back: Array, others: list[Attended]
    ) -> tuple[Attended, Float[Array, "B N X"], Float[Array, "B N T"]]:
        """A chunk behind the run."""
        queries, size, scale = q.shape[1], run.k.shape[2], self.ctx.scale
        leaving = {"window": self.window, "query_start": back[:, 0]}
        k_edge, v_edge = (x[:, :, :queries] for x in (run.k, run.v))
        parts = [*others, cache_attention(q, k_edge, v_edge, run.number, scale=scale, **leaving)]
        if size > queries:
            k_stay, v_stay = (x[:, :, queries:] for x in (run.k, run.v))
            number_B = run.number - queries
            parts.append(cache_attention(q, k_stay, v_stay, number_B, scale=scale))
        earlier = self.ctx.seq_merge(*merge(parts))
        part = merge([earlier, causal_attention(q, k, v, scale=scale)])
        own = jnp.swapaxes(k, 1, 2)
        if self.score == "logit":
            amounts = received.logit_of_chunk(q, run.k, back, own, self.valid, self.window, scale)
        else:
            amounts = received.mass_of_chunk(
                q, part[1], run.k, back, own, self.valid, self.window, scale
            )
        return part, *amounts
