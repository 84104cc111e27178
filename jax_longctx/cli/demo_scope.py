"""Where ReAttention looks while it answers: how often each layer's scope held each token.

`WatchedReAttention` is ReAttention that counts. In every layer each token that chooses alone (the
question's last, and every generated one) adds one to each slot of its scope. The answers are
ReAttention's own. The counts begin anew with every question; `scope_shares` gives those of the
newest answer.

Cost: 4 bytes a slot and layer, and one scatter of the scope's size a layer and step.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jax_longctx.caches import Store, local_slots
from jax_longctx.contract import CHUNK_ROWS, QKV, Attended, CacheShape, LayerContext, Segment, Stage
from jax_longctx.engine import Context
from jax_longctx.engine.distributed import to_host
from jax_longctx.engine.runs import each_layer
from jax_longctx.errors import InputError
from jax_longctx.methods.reattention import ReAttention
from jax_longctx.sharding import Stacked, axes_field


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Watched:
    """One layer's cache, and the tokens in its scopes since the question began.

    Attributes:
      counts: steps whose scope held the slot.
      steps: tokens that chose alone.
    """

    store: Store
    counts: Int[Array, "B S"] = axes_field("batch", "slots")
    steps: Int[Array, " B"] = axes_field("batch")


@dataclasses.dataclass(frozen=True, kw_only=True)
class WatchedReAttention(ReAttention):
    """ReAttention that counts how often its scopes held each token (see `scope_shares`)."""

    @property
    def stripes(self) -> bool:
        """The host reads the counts in the text's order."""
        return False

    def init_cache(self, shape: CacheShape) -> Watched:
        counts = jnp.zeros((shape.batch, shape.slots), jnp.int32)
        return Watched(super().init_cache(shape), counts, jnp.zeros((shape.batch,), jnp.int32))

    def attend(
        self, new: QKV, cache: Watched, segment: Segment, ctx: LayerContext
    ) -> tuple[Attended, Watched]:
        part, store, scope = self.attend_chosen(new, cache.store, segment, ctx)
        if new[0].shape[1] > 1 or segment.role not in ("query", "decode"):
            return part, dataclasses.replace(cache, store=store)
        (slots_BC, number_B), valid_B = scope.listed(), segment.valid_of(CHUNK_ROWS)
        held_BC = jnp.arange(slots_BC.shape[1]) < jnp.where(valid_B > 0, number_B, 0)[:, None]
        slots = cache.counts.shape[1]
        own_BC = local_slots(jnp.where(held_BC, slots_BC, -1), slots, ctx)
        # A negative index would wrap around; one past the end is what `drop` drops.
        at_BC = jnp.where(own_BC < 0, slots, own_BC)
        rows_B1 = jnp.arange(at_BC.shape[0])[:, None]
        counts = cache.counts.at[rows_B1, at_BC].add(1, mode="drop")
        return part, Watched(store, counts, cache.steps + valid_B)

    def finish(self, cache: Watched, ctx: LayerContext, stage: Stage, reserve: int) -> Watched:
        return dataclasses.replace(cache, store=super().finish(cache.store, ctx, stage, reserve))

    def fork(self, cache: Watched) -> Watched:
        zeros = jnp.zeros_like(cache.counts), jnp.zeros_like(cache.steps)
        return Watched(super().fork(cache.store), *zeros)

    def read_bytes(self, cache: Watched, length: int) -> int:
        return super().read_bytes(cache.store, length)


def scope_shares(context: Context, row: int = 0) -> Float[np.ndarray, "L T"]:
    """Of the newest answer's steps, the share whose scope held each token of the context.

    A share for each layer and each of the row's T context tokens, from 0 to 1.

    Raises:
      InputError: another method read the context, or nothing was asked of it yet.
    """
    counted = tuple(map(_counted, context.usable_caches()))
    shares = []
    for counts, steps in each_layer(counted):
        number = int(to_host(steps)[row])
        if not number:
            raise InputError("nothing was asked of this context yet; ask a question first")
        shares.append(to_host(counts)[row, : context.lengths[row]] / number)
    return np.stack(shares)


def _counted(cache: Any) -> Any:
    """The counts and steps of a layer, or of a run of layers, without keys and values."""
    if isinstance(cache, Stacked):
        return cache.over(_counted(cache.cache))
    if not isinstance(cache, Watched):
        raise InputError("this context was not read by WatchedReAttention; read it with that")
    return cache.counts, cache.steps
