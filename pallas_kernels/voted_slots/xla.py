"""The slots in plain XLA, by comparing each vote, and each span, with each.

The cost does not depend on the length of the cache. XLA for GPUs makes eight kernels of it, each of
which waits for the one before.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Int

_LAST = jnp.iinfo(jnp.int32).max


class Spans(NamedTuple):
    """The spans around the most named slots, after the first slots.

    The span around slot s is s - size // 2 and the `size - 1` slots after that. A page p stands for
    its middle, slot p page + page // 2.

    Attributes:
      kept: how many named ones stay at most.
      size: slots of a span.
      first: slots at the row's beginning that are always listed.
      page: slots of what is named.
    """

    kept: int
    size: int
    first: int
    page: int = 1


def most_voted(named: Int[Array, "B E"], kept: int) -> Int[Array, "B E"]:
    """The `kept` most named entries, among equals the lower, in their places; the rest are -1."""
    slot, rival = named[:, :, None], named[:, None, :]
    entry_E = jnp.arange(named.shape[1])
    votes_BE = jnp.sum(slot == rival, axis=-1)
    repeats_BE = jnp.any((slot == rival) & (entry_E < entry_E[:, None]), axis=-1)
    some_BE = (named >= 0) & ~repeats_BE
    more = votes_BE[:, None, :] > votes_BE[:, :, None]
    same = votes_BE[:, None, :] == votes_BE[:, :, None]
    ahead = some_BE[:, None, :] & (more | (same & (rival < slot)))
    return jnp.where(some_BE & (jnp.sum(ahead, axis=-1) < kept), named, -1)


def spans_around(
    centres: Int[Array, "B M"], span: int, start: int, stop: Int[Array, " B"]
) -> tuple[Int[Array, "B M"], Int[Array, "B M"]]:
    """The union of the spans around different centres, within start <= s < stop[b].

    A span is the `span // 2` slots before its centre, the centre, and those after it.

    Returns:
      (low, high): the slots low <= s < high of each centre that no lower one has; none for a centre
      of -1.
    """
    begin_BM = centres - span // 2
    # Spans of equal size: of the lower ones the next reaches farthest. By comparison, in any order:
    # one kernel.
    before_BM = jnp.max(
        centres[:, None], 2, where=centres[:, None] < centres[:, :, None], initial=-1
    )
    taken_BM = jnp.minimum(before_BM - span // 2 + span, stop[:, None])
    taken_BM = jnp.where(before_BM < 0, start, jnp.maximum(taken_BM, start))
    low_BM = jnp.maximum(begin_BM, taken_BM)
    high_BM = jnp.minimum(begin_BM + span, stop[:, None])
    return low_BM, jnp.where(centres < 0, low_BM, high_BM)


def upto(low: Int[Array, "B M"], high: Int[Array, "B M"]) -> Int[Array, "B M"]:
    """Slots of the spans up to each, itself included, in the order of the spans' first ones.

    By comparison: one kernel, where a sort and a cumulative sum are several.
    """
    before = low[:, None] <= low[:, :, None]
    return jnp.sum(jnp.where(before, (high - low)[:, None], 0), axis=-1)


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
    pages_BE = most_voted(named, kept)
    centres_BE = jnp.where(pages_BE < 0, -1, pages_BE * page + page // 2)
    low_BE, high_BE = spans_around(centres_BE, span, first, stop)
    ends_BE = jnp.where(high_BE > low_BE, upto(low_BE, high_BE), -1)
    place_C, first_B1 = jnp.arange(size), jnp.minimum(length, first)[:, None]
    inner_BC = place_C - first_B1
    # What takes a place to its slot: that of the first span that ends behind it, and they ascend
    # with the spans.
    behind_BCE = ends_BE[:, None] > inner_BC[:, :, None]
    shift_BC = jnp.min((high_BE - ends_BE)[:, None], 2, where=behind_BCE, initial=_LAST)
    near_B1 = jnp.sum(high_BE - low_BE, axis=-1, keepdims=True)
    slot_BC = inner_BC - near_B1 + stop[:, None]
    slot_BC = jnp.where(inner_BC < near_B1, inner_BC + shift_BC, slot_BC)
    slot_BC = jnp.where(inner_BC < 0, place_C, slot_BC)
    number_B = (first_B1 + near_B1)[:, 0] + jnp.maximum(length - stop, 0)
    return jnp.where(place_C < number_B[:, None], slot_BC, -1), number_B
