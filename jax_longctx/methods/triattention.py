"""TriAttention: tokens stay that queries to come will attend, by their distance and by norms.

Mao et al. 2026, "TriAttention: Efficient Long Reasoning with Trigonometric KV Compression". Before
rotary embedding a head's queries lie near one centre, wherever they stand. So how much a key will
be attended follows from the centre and from its distance, by a trigonometric series. Channels f
and f + H/2 make a complex number. For a key k and a query at distance d

    trig(d) = sum_f |E q_f| |k_f| cos(w_f d + angle(E q_f) - angle(k_f))
    norm = sum_f (E |q_f| - |E q_f|) |k_f|

The norms count as far as the queries do not concentrate. A query head's score is the mean of
trig(d) + norm over queries 1, 2, 4 .. 65536 positions ahead. Scores of the tokens that compete are
brought to mean 0 and deviation 1, and the largest of a kv head's group ranks the token.

The sum of trig is the product of the rotated key with the centre, rotated to a position to come:
no key is turned back, and the mean of the rotations is taken once.

Tokens leave after each `interval` of an answer. The authors measure E q and E |q| once for a model,
on some long text, and report that any text serves. Here they are a row's own means, over text,
question and answer so far: no file, no calibration, any model. Their code by default holds the
prompt, and averages a head's scores over the layers; here prompts compete, each layer on its own
(their option `per_layer_perhead_pruning`).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jax_longctx.caches import AppendCache
from jax_longctx.caches.reading import numbers
from jax_longctx.contract import QKV, CacheShape, LayerContext, Segment, method
from jax_longctx.contract.context import apply_rope
from jax_longctx.parts.compressing import Compressing, future_angles, whole
from jax_longctx.sharding import axes_field

# Positions ahead of the next token's.
_AHEAD = 2 ** np.arange(17)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CentredStore:
    """Keys and values of a row, and what its queries have been, before rotary embedding.

    Attributes:
      count: queries so far.
      centre: their mean.
      size: the mean of their absolute values as complex numbers.
    """

    store: AppendCache
    count: Float[Array, " B"] = axes_field("batch")
    centre: Float[Array, "B N H"] = axes_field("batch", "heads", None)
    size: Float[Array, "B N F"] = axes_field("batch", "heads", None)


@method(source="Mao et al. 2026 (TriAttention)")
class TriAttention(Compressing):
    """Of text and answer, tokens stay that queries to come will attend from where they stand."""

    interval: int | None = 128

    def init_cache(self, shape: CacheShape) -> CentredStore:
        heads, width = (shape.batch, shape.num_heads), shape.head_dim
        sizes = (heads[:1], (*heads, width), (*heads, width // 2))
        return CentredStore(super().init_cache(shape), *map(jnp.zeros, sizes))

    def gathered(self, new: QKV, cache: Any, segment: Segment, ctx: LayerContext) -> Any:
        q, valid_B = new[0].astype(jnp.float32), segment.valid_of()
        counts_BT11 = (jnp.arange(q.shape[1]) < valid_B[:, None])[..., None, None]
        count_B = cache.count + valid_B
        part_B11 = 1 / jnp.maximum(count_B, 1)[:, None, None]

        def mean(old: Array, each: Array) -> Array:
            return old + part_B11 * jnp.sum(each - old[:, None], axis=1, where=counts_BT11)

        sizes = mean(cache.size, _sizes(q))
        return CentredStore(cache.store, count_B, mean(cache.centre, q), sizes)

    def scores(self, cache: Any, ctx: LayerContext) -> Float[Array, "B K S"]:
        store = cache.store
        batch, heads, size, width = store.sizes
        angles = future_angles(store.position, _AHEAD, width, ctx)
        ahead_BNH = apply_rope(cache.centre[:, None], *angles)[:, 0]
        growth_B1 = jnp.mean(ctx.growth(store.position[:, None] + _AHEAD), axis=1, keepdims=True)
        scale_BF = growth_B1 * np.asarray(ctx.rope.scales(width), np.float32)
        spread_BNF = scale_BF[:, None] * (cache.size - _sizes(cache.centre))

        def each(head: tuple[Array, Array, Array]) -> Float[Array, "B G C"]:
            keys_BCH, ahead_BGH, spread_BGF = head
            keys_BCH = keys_BCH.astype(jnp.float32)
            trig = jnp.einsum("BCH,BGH->BGC", keys_BCH, ahead_BGH)
            return trig + jnp.einsum("BCF,BGF->BGC", _sizes(keys_BCH), spread_BGF)

        # Head by head: absolute values of all keys would be half as large as all of these.
        grouped = (x.reshape(batch, heads, -1, x.shape[-1]) for x in (ahead_BNH, spread_BNF))
        given = (jnp.moveaxis(x, 1, 0) for x in (numbers(store.k), *grouped))
        found_BKGC = jnp.moveaxis(jax.lax.map(each, tuple(given)), 0, 1)
        found_BNS = whole(found_BKGC.reshape(batch, -1, size), ctx)
        index_S = jnp.arange(found_BNS.shape[2])
        ranked_BS = (index_S >= self.sink) & (index_S < store.length[:, None] - self.local)
        how = {"axis": -1, "keepdims": True, "where": ranked_BS[:, None]}
        off_BNS = found_BNS - jnp.mean(found_BNS, **how)
        off_BNS = off_BNS / jnp.maximum(jnp.std(found_BNS, **how), 1e-6)
        return jnp.max(off_BNS.reshape(batch, heads, -1, off_BNS.shape[2]), axis=2)


def _sizes(x: Float[Array, "*R H"]) -> Float[Array, "*R F"]:
    """Absolute values of the complex numbers that channels f and f + H/2 make."""
    real, imaginary = jnp.split(x, 2, axis=-1)
    return jnp.sqrt(real**2 + imaginary**2)
