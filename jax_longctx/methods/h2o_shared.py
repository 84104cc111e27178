"""H2O with CItruS's shared cache: heavy hitters are what the instruction has looked at so far.

Bai et al. 2024 (CItruS), section 5.2, "H2O + Shared Cache"; H2O is Zhang et al. 2023. As `h2o` in
CItruS's setting (section 4.3), each kv head ranks its own tokens by accumulated attention mass,
those cached before a chunk may leave, down to `budget - chunk`, and the chunk joins. What is
accumulated for every cached token and chunk of v tokens, with an instruction of n tokens that looks
beside it (`instruction`), both against the cache as it was:

    acc += (1 - alpha) * mass of the chunk + alpha * v / n * mass of the instruction

each averaged over the query heads of the kv head; v / n brings both to the same scale. A chunk's
tokens join with (1 - alpha) times the mass that they get within the chunk: no instruction has seen
them yet. With `acc_kind=mean` they are ranked by acc over the number of rows that it is from, so
that a token does not stay for having been there long. After the context the instruction is its own
chunk: its mass is added, it evicts once more, is read, and the answer grows the cache. Cost: as
`citrus`, and one more product for the chunk's mass when alpha < 1.

The authors' script names alpha `query_alpha`, 1 by default; the code behind it is not published, so
that the sum, its scale and its scope (a kv head) are this library's reading.
"""

from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_longctx.caches import BudgetCache
from jax_longctx.contract import (
    CHUNK_ROWS,
    INSTRUCTION_ROWS,
    QKV,
    Attended,
    CacheShape,
    LayerContext,
    Registered,
    Segment,
    method,
)
from jax_longctx.errors import ConfigError
from jax_longctx.parts import eviction, instruction
from pallas_kernels.lse import side_by_side

__all__ = ["H2OShared"]


@method(source="Bai et al. 2024 (CItruS), section 5.2")
class H2OShared(Registered):
    """The tokens that drew the most attention from the instruction, per kv head.

    Attributes:
      budget: tokens that each kv head holds, the newest chunk among them.
      chunk: tokens of the context read between two evictions.
      alpha: share of the instruction in what is accumulated; with 0 it is H2O in CItruS's setting.
      acc_kind: tokens are ranked by the sum, or by its mean over the rows that looked at them.
    """

    budget: int = 1024
    chunk: int = 256
    alpha: float = 1.0
    acc_kind: Literal["sum", "mean"] = "sum"

    query_aware = True
    needs_question = True

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise ConfigError(f"H2OShared: alpha must lie within 0 and 1, got {self.alpha}")
        eviction.check(self)

    def init_cache(self, shape: CacheShape) -> BudgetCache:
        return eviction.empty_cache(self, shape, statistics=2 if self.acc_kind == "mean" else 1)

    def attend(
        self, new: QKV, cache: BudgetCache, segment: Segment, ctx: LayerContext
    ) -> tuple[Attended, Any]:
        if eviction.only_joins(self, segment):
            valid_B = segment.valid_of(CHUNK_ROWS)
            return eviction.read_and_append(self, new, cache, valid_B, ctx)
        chunk = instruction.look(self, new, cache, segment, ctx, CHUNK_ROWS)
        own = 1.0
        if segment.role != "probe_and_context":
            out, lse, mass_BKU = chunk.out, chunk.lse, chunk.mass()
        else:
            probe = instruction.look(self, new, cache, segment, ctx, INSTRUCTION_ROWS)
            parts = (chunk.out, chunk.lse), (probe.out, probe.lse)
            out, lse = side_by_side(*parts)
            mass_BKU, own = self._blend(chunk, probe), 1 - self.alpha
        sums = scores = eviction.accumulated(cache, self._added(chunk, mass_BKU, own))
        if self.acc_kind == "mean":
            # Nobody has looked at what has just joined: it has no mass either.
            scores = sums / jnp.where(sums[..., 1:] > 0, sums[..., 1:], 1.0)
        return (out, lse), eviction.evict(self, cache, chunk, scores[..., 0], segment, sums)

    def _added(
        self, chunk: eviction.Look, mass: Float[Array, "B K U"], own: float
    ) -> Float[Array, "B K U M"]:
        """Mass over the group and, for a mean, the rows that it is from; `own` is their weight
        within the chunk."""
        group = chunk.q.shape[2] // chunk.k.shape[2]
        if self.acc_kind == "sum":
            return mass[..., None] / group
        slots = chunk.past_k.shape[2]
        within_U = jnp.where(jnp.arange(mass.shape[2]) < slots, 1.0, own)
        rows_BKU = jnp.broadcast_to((within_U * chunk.onlookers)[:, None], mass.shape)
        return jnp.stack([mass / group, rows_BKU], axis=-1)

    def _blend(self, chunk: eviction.Look, probe: eviction.Look) -> Float[Array, "B K U"]:
        """What the chunk's slots and tokens gain, summed over the group."""
        looked_BKU = instruction.with_tokens(instruction.mass_on_cache(probe), chunk)
        scale_B = self.alpha * chunk.valid / jnp.maximum(probe.valid, 1)
        gained_BKU = looked_BKU * scale_B[:, None, None]
        if self.alpha == 1:
            return gained_BKU
        return gained_BKU + (1 - self.alpha) * chunk.mass()

    positions = instruction.positions
    protocol = instruction.protocol
    validate = eviction.validate
    reach = eviction.reach
    segments = instruction.segments
    finish = eviction.finish
    fork = eviction.fork
    read_bytes = eviction.read_bytes
