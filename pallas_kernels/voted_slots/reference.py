"""The slots by counts and masks over all slots, which is the definition; for tests only."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Int

from pallas_kernels.voted_slots.xla import Spans


def voted_slots(
    named: Int[Array, "B E"],
    stop: Int[Array, " B"],
    length: Int[Array, " B"],
    spans: Spans,
    *,
    slots: int,
    size: int,
) -> tuple[Int[Array, "B C"], Int[Array, " B"]]:
    """See the public function."""
    kept, span, first, page = spans
    pages = -(-slots // page)
    votes_BP = jnp.sum(named[..., None] == jnp.arange(pages), axis=1)
    order_BP = jnp.argsort(-votes_BP, axis=-1, stable=True)
    kept_BP = (jnp.argsort(order_BP, axis=-1) < kept) & (votes_BP > 0)
    slot_S, centre_P = jnp.arange(slots), jnp.arange(pages) * page + page // 2
    begin_P = centre_P - span // 2
    inside_SP = (slot_S[:, None] >= begin_P) & (slot_S[:, None] < begin_P + span)
    near_BS = jnp.any(inside_SP & kept_BP[:, None], axis=-1)
    length_B1, stop_B1 = length[:, None], stop[:, None]
    attended_BS = near_BS & (slot_S >= first) & (slot_S < stop_B1)
    attended_BS |= (slot_S < first) & (slot_S < length_B1)
    attended_BS |= (slot_S >= stop_B1) & (slot_S < length_B1)
    listed_BS = jnp.sort(jnp.where(attended_BS, slot_S, slots), axis=-1)
    spare = [(0, 0), (0, max(size - slots, 0))]
    listed_BC = jnp.pad(listed_BS, spare, constant_values=slots)[:, :size]
    number_B = jnp.sum(attended_BS, axis=-1, dtype=jnp.int32)
    return jnp.where(listed_BC < slots, listed_BC, -1).astype(jnp.int32), number_B
