"""The best keys of every query by definition, all scores materialised; for tests only."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int


def topk_scores(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B K S H"],
    start: Int[Array, " B"],
    stop: Int[Array, " B"],
    *,
    count: int,
    tile_best: int | None = None,
) -> tuple[Float[Array, "B T N C"], Int[Array, "B T N C"]]:
    """Sort every slot of [start, stop) by descending score, then by slot."""
    k_BNSH = jnp.repeat(k, q.shape[2] // k.shape[1], axis=1).astype(jnp.float32)
    scores_BTNS = jnp.einsum("BTNH,BNSH->BTNS", q.astype(jnp.float32), k_BNSH, precision="highest")
    slots_S = jnp.arange(k.shape[2])
    held_BS = (slots_S >= start[:, None]) & (slots_S < stop[:, None])
    scores_BTNS = jnp.where(held_BS[:, None, None] & ~jnp.isnan(scores_BTNS), scores_BTNS, -jnp.inf)
    if tile_best is not None:
        scores_BTNS = _keep_best_of_tiles(scores_BTNS, start, tile_best)
    order_BTNC = jnp.argsort(-scores_BTNS, axis=-1, stable=True)[..., :count]
    values_BTNC = jnp.take_along_axis(scores_BTNS, order_BTNC, axis=-1)
    short = [(0, 0)] * 3 + [(0, count - values_BTNC.shape[-1])]
    values_BTNC = jnp.pad(values_BTNC, short, constant_values=-jnp.inf)
    indices_BTNC = jnp.pad(order_BTNC, short, constant_values=-1)
    return values_BTNC, jnp.where(jnp.isneginf(values_BTNC), -1, indices_BTNC)


def _keep_best_of_tiles(
    scores: Float[Array, "B T N S"], start: Int[Array, " B"], tile: int
) -> Float[Array, "B T N S"]:
    """-inf for all but the first best slot of every tile of slots counted from start[b]."""
    slots_S = jnp.arange(scores.shape[3])
    tile_BS = (slots_S - start[:, None]) // tile
    # [B, S, S]: whether slot r shares slot s's tile; s stays if no such r beats or precedes it.
    together = (tile_BS[:, :, None] == tile_BS[:, None])[:, None, None]
    s, r = scores[..., :, None], scores[..., None, :]
    beaten = together & ((r > s) | ((r == s) & (slots_S < slots_S[:, None])))
    return jnp.where(jnp.any(beaten, axis=-1), -jnp.inf, scores)
