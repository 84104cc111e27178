"""The chosen slots once the border is known, for a GPU: bits of words, counted and looked up.

Which keys lie above the border and which equal it is written as bits, 32 slots a word; from there
on everything is a 32nd of the scores. The bits are counted in words and blocks of words, and how
many lie before each is summed up: of a word's equal ones as many are chosen as the quota leaves.
The slot of every place is then found from above: its block, its word, its bit. No scatter, no sort,
no loop: three small reductions and the lookup.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Int, UInt32

_LANES = 32  # slots of a word
_BLOCK = 64  # words of a block


class _Words(NamedTuple):
    """Bits of R rows in V blocks of I words, and what lies before each, in numbers of bits.

    Attributes:
      above, equal: the words.
      inner: above and, 16 bits higher, equal ones before a word within its block.
      outer_above, outer_equal: those before a block.
      quota: how many of the equal ones are chosen.
      total: how many are chosen in all.
    """

    above: UInt32[Array, "R V I"]
    equal: UInt32[Array, "R V I"]
    inner: UInt32[Array, "R V I"]
    outer_above: Int[Array, "R V"]
    outer_equal: Int[Array, "R V"]
    quota: Int[Array, " R"]
    total: Int[Array, " R"]


def mask_above(
    key: UInt32[Array, "R S"], border: UInt32[Array, " R"], k: Int[Array, " R"]
) -> Bool[Array, "R S"]:
    """Whether a slot is among the k with the highest keys but 0, of equal ones the lowest slots.

    Args:
      border: a number that at most k keys pass and, where there are so many, at least k reach.
    """
    words = _words(key, border, k)
    before_RVI = words.outer_equal[..., None] + (words.inner >> 16).astype(jnp.int32)
    room_RVI = words.quota[:, None, None] - before_RVI
    chosen_RVI = words.above | _lowest(words.equal, room_RVI)
    bits = (chosen_RVI[..., None] >> jnp.arange(_LANES, dtype=jnp.uint32)) & 1
    return bits.reshape(key.shape[0], -1)[:, : key.shape[1]] > 0  # [R, S]


def slots_above(
    key: UInt32[Array, "R S"], border: UInt32[Array, " R"], k: Int[Array, " R"], size: int
) -> Int[Array, "R C"]:
    """The slots of `mask_above`, ascending, then -1 up to C = size."""
    words = _words(key, border, k)
    rows, blocks, _ = words.above.shape
    quota_R1 = words.quota[:, None]
    place_RC = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), (rows, size))

    def before_block(block_RC: Array) -> tuple[Array, Array]:
        return _at(words.outer_above, block_RC), _at(words.outer_equal, block_RC)

    block_RC = _last(
        lambda i: _chosen(*before_block(i), quota_R1) <= place_RC, blocks, place_RC.shape
    )
    above_RC, equal_RC = before_block(block_RC)

    def before_word(word_RC: Array) -> tuple[Array, Array]:
        inner_RC = _at(words.inner.reshape(rows, -1), block_RC * _BLOCK + word_RC)
        inner_above, inner_equal = inner_RC & 0xFFFF, inner_RC >> 16
        return above_RC + inner_above.astype(jnp.int32), equal_RC + inner_equal.astype(jnp.int32)

    word_RC = _last(
        lambda i: _chosen(*before_word(i), quota_R1) <= place_RC, _BLOCK, place_RC.shape
    )
    before_above_RC, before_equal_RC = before_word(word_RC)
    number_RC = block_RC * _BLOCK + word_RC
    bits_RC = _at(words.above.reshape(rows, -1), number_RC) | _lowest(
        _at(words.equal.reshape(rows, -1), number_RC), quota_R1 - before_equal_RC
    )
    rest_RC = place_RC - _chosen(before_above_RC, before_equal_RC, quota_R1)
    slot_RC = number_RC * _LANES + _place_of(bits_RC, rest_RC).astype(jnp.int32)
    return jnp.where(place_RC < words.total[:, None], slot_RC, -1)


def _words(key: UInt32[Array, "R S"], border: UInt32[Array, " R"], k: Int[Array, " R"]) -> _Words:
    spare = -key.shape[1] % (_LANES * _BLOCK)
    key = jnp.pad(key, ((0, 0), (0, spare)))
    key_RVIL = key.reshape(key.shape[0], -1, _BLOCK, _LANES)
    border_R111 = border[:, None, None, None]
    above = _bits(key_RVIL > border_R111)
    equal = _bits((key_RVIL == border_R111) & (key_RVIL > 0))
    counts_RVI = lax.population_count(above) | (lax.population_count(equal) << 16)
    before_IJ = jnp.arange(_BLOCK) < jnp.arange(_BLOCK)[:, None]
    inner = _sum(jnp.where(before_IJ, counts_RVI[:, :, None], jnp.uint32(0)))
    blocks_RV = inner[..., -1] + counts_RVI[..., -1]
    each = [x.astype(jnp.int32) for x in (blocks_RV & 0xFFFF, blocks_RV >> 16)]
    index_V = jnp.arange(key_RVIL.shape[1])
    before_VU = index_V < index_V[:, None]
    outer_above, outer_equal = (_sum(jnp.where(before_VU, x[:, None], 0)) for x in each)
    all_above, all_equal = (
        outer[:, -1] + x[:, -1] for outer, x in zip((outer_above, outer_equal), each, strict=True)
    )
    quota = jnp.maximum(k - all_above, 0)
    total = _chosen(all_above, all_equal, quota)
    return _Words(above, equal, inner, outer_above, outer_equal, quota, total)


def _sum(x: Array) -> Array:
    return jnp.sum(x, axis=-1, dtype=x.dtype)


def _bits(mask: Bool[Array, "R V I L"]) -> UInt32[Array, "R V I"]:
    lane = jnp.uint32(1) << jnp.arange(_LANES, dtype=jnp.uint32)
    return _sum(jnp.where(mask, lane, jnp.uint32(0)))


def _chosen(above: Array, equal: Array, quota: Array) -> Array:
    return above + jnp.minimum(equal, quota)


def _at(x: Array, index: Array) -> Array:
    """x[r, index[r, c]]; the callers' indices are within x."""
    return jnp.take_along_axis(x, index, axis=1, mode="promise_in_bounds")


def _last(holds: Callable[[Array], Array], count: int, shape: tuple[int, ...]) -> Int[Array, "R C"]:
    """The last index below `count` for which `holds`, which holds for 0 and all before it."""
    found = jnp.zeros(shape, jnp.int32)
    for bit in reversed(range((count - 1).bit_length())):
        candidate = found + (1 << bit)
        within = jnp.minimum(candidate, count - 1)
        found = jnp.where((candidate < count) & holds(within), candidate, found)
    return found


def _place_of(word: UInt32[Array, "..."], n: Int[Array, "..."]) -> UInt32[Array, "..."]:
    """Where the bit stands before which n are set, from the lowest."""
    place = jnp.zeros(word.shape, jnp.uint32)
    for width in (16, 8, 4, 2, 1):
        part = (word >> place) & jnp.uint32((1 << width) - 1)
        count = lax.population_count(part).astype(jnp.int32)
        beyond = n >= count
        n = jnp.where(beyond, n - count, n)
        place = jnp.where(beyond, place + width, place)
    return place


def _lowest(word: UInt32[Array, "..."], n: Int[Array, "..."]) -> UInt32[Array, "..."]:
    """The n lowest bits set, or all where there are no more; none for n below 0."""
    all_of_it = n >= lax.population_count(word).astype(jnp.int32)
    n = jnp.maximum(n, 0)
    # Where not all of it is wanted, bit n is there and at most at place 31.
    below = (jnp.uint32(1) << jnp.minimum(_place_of(word, n), 31)) - 1
    return jnp.where(all_of_it, word, word & below)
