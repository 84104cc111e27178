"""Which tokens a partial cache has: pooled scores (`pooled_scores`), and the best (`best_last`)."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jax_longctx.caches.fifo import Count, FifoCache
from pallas_kernels.select_large_k import select_large_k

# Up to this many smallest entries are found by `top_k`: XLA has a GPU kernel for it.
_FEW = 16

Pool = Literal["max", "avg"]


def best_last(
    scores: Float[Array, "B K S"],
    position: Int[Array, " B"],
    budget: Count,
    size: int,
    leaving: int | None = None,
) -> FifoCache:
    """The `budget` best of each row's first `position[b]` tokens, the worst first to leave.

    Of equal scores the lower index is kept, and the higher leaves first.

    Args:
      scores: finite, or -inf for empty slots.
      size: M, at least the largest budget.
      leaving: most tokens that leave before the list is made anew; the others follow in the text's
        order. None: any number.
    """
    count_B = jnp.minimum(position, jnp.minimum(budget, size))
    count_BK = jnp.broadcast_to(count_B[:, None], scores.shape[:2])
    slots_BKM = select_large_k(scores, count_BK, size=size)
    kept_BKM = jnp.take_along_axis(scores, jnp.maximum(slots_BKM, 0), axis=2)
    kept_BKM = jnp.where(slots_BKM < 0, jnp.inf, kept_BKM)
    if leaving is None or leaving > _FEW:
        chosen_BKM = _sorted(kept_BKM, slots_BKM)
    else:
        chosen_BKM = _worst_first(kept_BKM, slots_BKM, min(leaving, size))
    return FifoCache(chosen_BKM, count_B, jnp.zeros_like(count_B), position, None, None)


def _sorted(scores: Float[Array, "B K M"], slots: Int[Array, "B K M"]) -> Int[Array, "B K M"]:
    """Slots by ascending score; among equals the last comes first."""
    # Flipped, so that a stable sort puts the higher slot of equals first.
    turned = (jnp.flip(scores, axis=2), jnp.flip(slots, axis=2))
    return jax.lax.sort(turned, dimension=2, is_stable=True, num_keys=1)[1]


def _worst_first(
    scores: Float[Array, "B K M"], slots: Int[Array, "B K M"], number: int
) -> Int[Array, "B K M"]:
    """The first `number` of `_sorted`, then the other slots in order."""
    size = slots.shape[2]
    # Of equals `top_k` takes the first: flipped, the higher slot.
    _, turned_BKX = jax.lax.top_k(-jnp.flip(scores, axis=2), number)
    places_BKX = size - 1 - turned_BKX
    # The place of the j-th of the others, past those of the worst that lie before it.
    place, rival = places_BKX[..., :, None], places_BKX[..., None, :]
    before_BKX = places_BKX - jnp.sum(rival < place, axis=-1)
    index_M = jnp.arange(size - number)
    skipped_BKM = jnp.sum(before_BKX[..., None] <= index_M, axis=2)
    order_BKM = jnp.concatenate([places_BKX, index_M + skipped_BKM], axis=2)
    return jnp.take_along_axis(slots, order_BKM, axis=2)


def pooled_scores(
    mass: Float[Array, "B K S"], length: Int[Array, " B"], window: int, kernel: int, pool: Pool
) -> Float[Array, "B K S"]:
    """Scores of each row's first `length[b]` tokens, -inf for the slots beyond.

    All but the last `window` tokens are scored by their mass (at most 1), pooled over `kernel`
    neighbours among themselves: the maximum, or the mean with missing neighbours as zeros. The last
    `window` tokens come before all others, the newest first.
    """
    slots_S = jnp.arange(mass.shape[2])
    newest_BS = slots_S - (length - window)[:, None]
    mass = jnp.where((newest_BS < 0)[:, None], mass, 0.0)
    scores = pooled(mass, kernel, pool)
    scores = jnp.where((newest_BS >= 0)[:, None], (2.0 + newest_BS)[:, None], scores)
    return jnp.where((slots_S < length[:, None])[:, None], scores, -jnp.inf)


def pooled(mass: Float[Array, "B X S"], kernel: int, pool: Pool = "max") -> Float[Array, "B X S"]:
    """The maximum over `kernel` neighbours of numbers that are not negative, or their mean."""
    half = kernel // 2
    how = ((1, 1, kernel), (1, 1, 1), ((0, 0), (0, 0), (half, half)))
    if pool == "max":
        # Padding with -inf equals padding with zeros.
        return jax.lax.reduce_window(mass, -jnp.inf, jax.lax.max, *how)
    return jax.lax.reduce_window(mass, 0.0, jax.lax.add, *how) / kernel


def latest(
    old: Float[Array, "B W *R"], new: Float[Array, "B T *R"], valid: Int[Array, " B"]
) -> Float[Array, "B W *R"]:
    """The last W of each row's old ones and its first `valid[b]` new ones."""
    size = old.shape[1]
    index_BW = valid[:, None] + jnp.arange(size)
    index_BW = index_BW.reshape(*index_BW.shape, *(1,) * (old.ndim - 2))  # [B, W, 1 ...]
    kept = jnp.take_along_axis(old, jnp.minimum(index_BW, size - 1), axis=1)
    came = jnp.take_along_axis(new, jnp.clip(index_BW - size, 0, new.shape[1] - 1), axis=1)
    return jnp.where(index_BW < size, kept, came.astype(old.dtype))


def check_kernel(method: Any) -> None:
    """Raises ConfigError unless the method's `kernel` has a centre."""
    if method.kernel < 1 or method.kernel % 2 == 0:
        raise method.refused(f"kernel must be odd and at least 1, got {method.kernel}")
