"""The best keys of every query by definition, all scores materialised; for tests only."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from pallas_kernels.common import Bounds, Cache, PerQuery, Queries


def topk_scores(
    q: Queries,
    k: Cache,
    bounds: Bounds,
    tolerance: PerQuery,
    *,
    count: int,
) -> tuple[Float[Array, "B T N C"], Int[Array, "B T N C"]]:
    """Sort every slot of [start, stop) by the best score it ties with, descending, then by slot."""
    start, stop = bounds
    k_BNSH = jnp.repeat(k, q.shape[2] // k.shape[1], axis=1).astype(jnp.float32)
    scores_BTNS = jnp.einsum("BTNH,BNSH->BTNS", q.astype(jnp.float32), k_BNSH, precision="highest")
    slots_S = jnp.arange(k.shape[2])
    held_BS = (slots_S >= start[:, None]) & (slots_S < stop[:, None])
    scores_BTNS = jnp.where(held_BS[:, None, None] & ~jnp.isnan(scores_BTNS), scores_BTNS, -jnp.inf)
    ranks_BTNS = _best_tied(scores_BTNS, tolerance)
    order_BTNC = jnp.argsort(-ranks_BTNS, axis=-1, stable=True)[..., :count]
    values_BTNC = jnp.take_along_axis(scores_BTNS, order_BTNC, axis=-1)
    short = [(0, 0)] * 3 + [(0, count - values_BTNC.shape[-1])]
    values_BTNC = jnp.pad(values_BTNC, short, constant_values=-jnp.inf)
    indices_BTNC = jnp.pad(order_BTNC, short, constant_values=-1)
    return values_BTNC, jnp.where(jnp.isneginf(values_BTNC), -1, indices_BTNC)


def _best_tied(scores: Float[Array, "B T N S"], tolerance: PerQuery) -> Float[Array, "B T N S"]:
    """For every score the best one that is at most `tolerance` above it."""
    number = scores.shape[-1]
    ascending_XS = jnp.sort(scores, axis=-1).reshape(-1, number)
    above_XS = (scores + tolerance[..., None]).reshape(-1, number)
    after_XS = jax.vmap(partial(jnp.searchsorted, side="right"))(ascending_XS, above_XS)
    return jnp.take_along_axis(ascending_XS, after_XS - 1, axis=-1).reshape(scores.shape)
