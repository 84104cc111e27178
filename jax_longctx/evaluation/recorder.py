"""Full attention that keeps every layer's queries: what measurements of attention look at."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jax_longctx.caches import AppendCache, write_run
from jax_longctx.contract import (
    CHUNK_ROWS,
    QKV,
    Attended,
    CacheShape,
    LayerContext,
    Segment,
    Stage,
)
from jax_longctx.engine import Engine
from jax_longctx.engine.distributed import to_host
from jax_longctx.parts.appending import Appending
from jax_longctx.sharding import axes_field

__all__ = ["Recorded", "Recorder", "queries_and_keys"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Recorded:
    """Full attention's cache and the rotated query of every token."""

    store: AppendCache
    queries: Float[Array, "B N S H"] = axes_field("batch", "heads", "slots", None)


@dataclasses.dataclass(frozen=True)
class Recorder(Appending):
    """Full attention that keeps its queries."""

    def init_cache(self, shape: CacheShape) -> Recorded:
        size = (shape.batch, shape.num_heads, shape.slots, shape.head_dim)
        return Recorded(super().init_cache(shape), jnp.zeros(size, shape.dtype))

    def attend(
        self, new: QKV, cache: Recorded, segment: Segment, ctx: LayerContext
    ) -> tuple[Attended, Recorded]:
        q = new[0]
        positions_BT = cache.store.position[:, None] + jnp.arange(q.shape[1])
        valid_B = segment.valid_of(CHUNK_ROWS)
        rotated = ctx.rotate(q, positions_BT)
        queries = write_run(cache.queries, rotated, cache.store.length, valid_B, ctx)
        part, store = super().attend(new, cache.store, segment, ctx)
        return part, Recorded(store, queries)

    def finish(self, cache: Recorded, ctx: LayerContext, stage: Stage, reserve: int) -> Recorded:
        return dataclasses.replace(cache, store=cache.store.end_context())

    def fork(self, cache: Recorded) -> Recorded:
        return dataclasses.replace(cache, store=cache.store.rewind())

    def read_bytes(self, cache: Recorded, length: int) -> int:
        return super().read_bytes(cache.store, length)


def queries_and_keys(
    engine: Engine, text: Sequence[int]
) -> list[tuple[Float[np.ndarray, "N T H"], Float[np.ndarray, "K T H"]]]:
    """Every layer's rotated queries and keys of a text under full attention, float32.

    The engine gives model and mesh; its method does not matter.
    """
    recorder = Engine(engine.config, engine.params, Recorder(), engine.mesh, chunk=engine.chunk)
    caches: Any = recorder.prefill([text], reserve=0).usable_caches()
    found = []
    for cache in caches:
        arrays = cache.queries, cache.store.k
        q, k = (to_host(x[0, :, : len(text)].astype(jnp.float32)) for x in arrays)
        found.append((q, k))
    return found
