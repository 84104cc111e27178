"""RefreshKV: decode over a small partial cache, chosen anew when the query's direction changes.

Xu et al. 2025, "RefreshKV: Updating Small KV Cache During Long-form Generation", sections 2 and
A.1. Prefill of context and question is full attention. The last token's probabilities (maximum over
a kv head's group, maximum over `kernel` neighbours) choose the `budget` tokens of each kv head's
partial cache, by default an eighth of the prompt. Then, in each layer and at each answered token,

1. its key and value join the full cache and the partial one, whose lowest-scored token leaves (then
   the next, then the tokens answered first);
2. a partial step attends the partial cache alone, the token itself included;
3. a full step attends every key, and the same probabilities choose the partial cache anew.

Full steps come every `stride` tokens ("fixed") or, checked every `qc_stride` tokens, where the
cosine between the mean query of all heads and that of the layer's last full step is at most
`threshold` ("adaptive"). A partial step reads budget + 1 tokens, a full one all of them; the full
cache stays in memory, the partial one beside it.

Where the paper is silent: the token of a full step is always chosen and leaves last; the mean query
is taken after rotary embedding, as the keys see it. Unlike in the paper each token joins the full
cache at once: no token is lost where more than `budget` come between two full steps. Thresholds lie
in [-1, 1]: at 1 every check refreshes, at -1 practically none; a fixed stride beyond the answer
never does. `research/refreshkv_ablated.py` has the ablations of section 5.

The host knows the steps that are partial by schedule: they are a program without the full cache's
matmuls. A full step by schedule has no branch. Where a cosine decides, each layer attends its
partial cache, and then goes through a loop of one turn, or of none, that reads the full one. Where
one row needs it, all rows of the shard compute it, and each takes its own result. The token's key
and value are written to both caches before.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jax_longctx.caches import where_rows
from jax_longctx.caches.fifo import FifoCache
from jax_longctx.contract import QKV, Attended, LayerContext, Segment, WithCache, method
from jax_longctx.parts.partial_decode import PartialDecoding, RefreshCache
from pallas_kernels.plane import each_array, written

# Variants of decode steps: over the partial cache alone, and those that may attend every key.
PARTIAL = "partial"
CHECK = "check"


@method(source="Xu et al. 2025, section 2")
class RefreshKV(PartialDecoding):
    """Decode reads a part of the cache, chosen anew by full steps when the query changes.

    Attributes:
      schedule: full steps by the cosine (`adaptive`) or by `stride` alone (`fixed`).
      stride, qc_stride: steps from one full step (`fixed`) or check (`adaptive`) to the next.
      threshold: a full step follows where the cosine is at most this.
    """

    schedule: Literal["adaptive", "fixed"] = "adaptive"
    stride: int = 10
    qc_stride: int = 5
    threshold: float = 0.85

    def __post_init__(self) -> None:
        self.at_least(1, "stride", "qc_stride")
        super().__post_init__()
        if not -1 <= self.threshold <= 1:
            raise self.refused(
                f"threshold is a cosine from -1 to 1, got {self.threshold}; for no full "
                f"step at all set schedule=fixed and a stride beyond the answer"
            )

    @property
    def measures_keys(self) -> bool:
        """Whether a cosine of queries decides."""
        return self.schedule != "fixed"

    @property
    def every(self) -> int:
        """Steps from one that may be full to the next."""
        return self.stride if self.schedule == "fixed" else self.qc_stride

    @property
    def leaving(self) -> int | None:
        return self.stride if self.schedule == "fixed" else None

    def step_variant(self, step: int) -> str:
        return PARTIAL if step % self.every else CHECK

    def read_bytes(self, cache: RefreshCache, length: int) -> int:
        """The partial cache and a step's share of a full step; with "adaptive" the most."""
        everything = cache.store.k.nbytes + cache.store.v.nbytes
        return super().read_bytes(cache, length) + everything // self.every

    def step(self, new: QKV, cache: Any, segment: Segment, ctx: LayerContext) -> WithCache:
        """One answered token, partial or full as the schedule says."""
        q, k, v = new
        valid_B, at_B1 = segment.valid_of(), cache.store.position[:, None]
        q, k = ctx.rotate_queries(q, at_B1), ctx.rotate(k, at_B1)
        cache = self.push(k, v, cache, valid_B, ctx)
        if segment.variant == PARTIAL:
            return self.read(q, cache, ctx), cache
        turned_B = valid_B > 0
        summed_BH = self.summed(q, ctx)
        if self.schedule == "fixed":
            attended, partial = self.full_step(q, cache, turned_B, ctx)
        else:
            turned_B &= _cosine(summed_BH, cache.query) <= self.threshold
            # The loop holds collectives: every shard of a row must take it or leave it.
            turned_B = ctx.agree(turned_B)

            def full(_: Any, before: tuple[Attended, FifoCache]) -> tuple[Attended, FifoCache]:
                partly, old = before
                wholly, new = self.full_step(
                    q, dataclasses.replace(cache, partial=old), turned_B, ctx
                )
                return where_rows(turned_B, wholly, partly), each_array(written, old, new)

            # A loop of one turn or none: what XLA's conditionals give back, they copy.
            given = self.read(q, cache, ctx), cache.partial
            attended, partial = jax.lax.fori_loop(0, jnp.any(turned_B).astype(int), full, given)
        query = where_rows(turned_B, summed_BH, cache.query)
        full_steps = cache.full_steps + turned_B
        cache = dataclasses.replace(cache, partial=partial, query=query, full_steps=full_steps)
        return attended, cache

    def full_step(
        self, q: Array, cache: RefreshCache, turned: Bool[Array, " B"], ctx: LayerContext
    ) -> tuple[Attended, FifoCache]:
        """Attention to all keys, and a new partial cache for `turned` rows."""
        return self.look(q, cache, turned, ctx)


def _cosine(a: Float[Array, "B H"], b: Float[Array, "B H"]) -> Float[Array, " B"]:
    """In [-1, 1], 0 where either is zero."""
    norms_B = jnp.linalg.norm(a, axis=1) * jnp.linalg.norm(b, axis=1)
    products_B = jnp.sum(a * b, axis=1)
    return jnp.clip(products_B / jnp.maximum(norms_B, jnp.finfo(jnp.float32).tiny), -1.0, 1.0)
