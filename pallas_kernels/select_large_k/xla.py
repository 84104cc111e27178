"""The k best of S scores without a sort, in plain XLA: bisection on the scores' bits.

A float's bits map to an unsigned integer of the same order (negative numbers complemented, the
sign bit set on the others). The k-th best key is found bit by bit from the highest: a bit stays set
while at least k keys reach the candidate; 32 passes that only count. Every key above the k-th best
is chosen, and of those equal to it the lowest slots: the slot below which just enough of them lie
is found bit by bit too, in ceil(log2 S) passes. The chosen slots are then numbered by a running sum
and put in ascending order. On CPU a scatter does it. Elsewhere a scatter of S single elements is
slow; there a binary search finds for every output the slot where the running sum reaches it.

On a GPU each pass costs launches. So a pass decides four bits at once from 15 counts, taken in one
reading. Then bits are written, 32 slots a word: which keys lie above the border, and which equal
it. All that follows has a 32nd of the scores' size. The bits are counted in words and in blocks of
words, and those before each are summed up. The quota that is left says how many of a word's equal
ones are chosen. The slot of every place is found by its block, then its word, then its bit: three
small reductions and the lookup, without scatter, sort or loop.

Work: (32 + log2 S) passes over 4 S bytes a row, on a GPU 8. Temporaries: keys, running sum (with
its partial sums), places and slots, 17 bytes a score on CPU. Source: ours; the radix descent is the
known one of GPU top-k.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Bool, Float, Int, UInt32

from pallas_kernels import dispatch

_NEVER = np.uint32(0)  # the key of -inf and NaN: below every other
_SIGN = np.uint32(1 << 31)
_INFINITY = np.uint32(0x7F800000)
_LANES = 128
_DIGIT = 4  # bits that one pass decides on a GPU
_RUN = 256  # keys that one warp counts there
_BITS = 32  # slots of a word
_BLOCK = 64  # words of a block


def select(scores: Float[Array, "*R S"], k: Int[Array, "*R"], size: int | None) -> Array:
    """The slots [*R,C] of the k best, as `api.select_large_k` has them; if size is None their mask.

    Args:
      k: at most size.
    """
    on, key_RS = dispatch.platform(), ordered(scores)
    if on == "gpu":
        return chosen_by(kth_best_by_digits, key_RS, k, size)
    k_R = jnp.minimum(k, _count(key_RS > _NEVER))
    border_R = _kth_best(key_RS, k_R)
    above_RS = key_RS > border_R[..., None]
    equal_RS = key_RS == border_R[..., None]
    end_R = _end_of_first(equal_RS, k_R - _count(above_RS))
    mask_RS = above_RS | (equal_RS & (jnp.arange(scores.shape[-1]) < end_R[..., None]))
    if size is None:
        return mask_RS
    return (_by_scatter if on == "cpu" else _by_search)(mask_RS, size)


def chosen_by(
    kth_best: Callable[[Array, Array], Array],
    key: UInt32[Array, "*R S"],
    k: Int[Array, "*R"],
    size: int | None,
) -> Array:
    """What `select` returns, as GPUs find it.

    Args:
      kth_best: gives a border of k [R] of the keys [R,S]: a number that at most k of them pass and
        at least k reach, where there are k.
    """
    key_RS, k_R = key.reshape(-1, key.shape[-1]), k.reshape(-1)
    words = _words(key_RS, kth_best(key_RS, k_R), k_R)
    if size is None:
        return (_mask(words)[:, : key.shape[-1]] > 0).reshape(key.shape)
    return _slots(words, size).reshape(*k.shape, size)


def ordered(scores: Float[Array, "*R S"]) -> UInt32[Array, "*R S"]:
    """Unsigned integers in the scores' order; -0.0 equals 0.0, and -inf and NaN give _NEVER.

    All on bits: comparisons of floats may take the smallest (subnormal) numbers for zeros.
    """
    bits = lax.bitcast_convert_type(scores.astype(jnp.float32), jnp.uint32)
    magnitude = bits & ~_SIGN
    negative = (bits >= _SIGN) & (magnitude > 0)
    key = jnp.where(negative, ~bits, magnitude | _SIGN)
    never = (magnitude > _INFINITY) | (negative & (magnitude == _INFINITY))
    return jnp.where(never, _NEVER, key)


def _count(mask: Bool[Array, "*R S"]) -> Int[Array, "*R"]:
    return jnp.sum(mask, axis=-1, dtype=jnp.int32)


def _kth_best(key: UInt32[Array, "*R S"], k: Int[Array, "*R"]) -> UInt32[Array, "*R"]:
    """The largest number that at least k keys reach: the k-th best, and the maximum below k = 1."""

    def reached(border_R: UInt32[Array, "*R"]) -> Bool[Array, "*R"]:
        return _count(key >= border_R[..., None]) >= k

    return _largest(reached, 32, k.shape)


def _end_of_first(mask: Bool[Array, "*R S"], quota: Int[Array, "*R"]) -> Int[Array, "*R"]:
    """An end below which as many of the mask's lowest slots lie as `quota` allows."""
    slots_S = jnp.arange(mask.shape[-1], dtype=jnp.uint32)

    def fits(end_R: UInt32[Array, "*R"]) -> Bool[Array, "*R"]:
        return _count(mask & (slots_S < end_R[..., None])) <= quota

    return _largest(fits, mask.shape[-1].bit_length(), quota.shape).astype(jnp.int32)


def _largest(
    holds: Callable[[Array], Array], bits: int, shape: tuple[int, ...]
) -> UInt32[Array, "*R"]:
    """The largest number of `bits` bits that `holds`, which holds for all below it too."""

    def set_bit(i: Array | int, found_R: Array) -> Array:
        candidate_R = found_R | (jnp.uint32(1) << (bits - 1 - jnp.uint32(i)))
        return jnp.where(holds(candidate_R), candidate_R, found_R)

    return lax.fori_loop(0, bits, set_bit, jnp.zeros(shape, jnp.uint32))


def kth_best_by_digits(key: UInt32[Array, "R S"], k: Int[Array, " R"]) -> UInt32[Array, " R"]:
    """The k-th best key, found digit by digit, all values of a digit in one pass.

    On a GPU every pass is some launches, and a loop's turn waits for the host. So passes are few
    and unrolled.
    """
    found_R = jnp.zeros(k.shape, jnp.uint32)
    for shift in reversed(range(0, 32, _DIGIT)):
        values = range(1, 1 << _DIGIT)
        borders = [found_R | (jnp.uint32(value) << shift) for value in values]
        reached = [count_R >= k for count_R in _counts_from(key, borders)]
        found_R |= jnp.sum(jnp.stack(reached), axis=0, dtype=jnp.uint32) << shift
    return found_R


def _counts_from(key: UInt32[Array, "R S"], borders: list[Array]) -> tuple[Int[Array, " R"], ...]:
    """How many keys reach each border, in one reading: two reductions of as many operands."""
    key_RPZ = jnp.pad(key, ((0, 0), (0, -key.shape[1] % _RUN))).reshape(len(key), -1, _RUN)
    counts = tuple((key_RPZ >= border_R[:, None, None]).astype(jnp.int32) for border_R in borders)
    for axis in (2, 1):
        zeros = tuple(jnp.int32(0) for _ in counts)
        counts = tuple(lax.reduce(counts, zeros, _add_each, (axis,)))
    return counts


def _add_each(one: tuple[Array, ...], other: tuple[Array, ...]) -> tuple[Array, ...]:
    return tuple(x + y for x, y in zip(one, other, strict=True))


def _by_scatter(mask: Bool[Array, "*R S"], size: int) -> Int[Array, "*R C"]:
    """Write every chosen slot to its place; the others go beyond the end and are dropped."""

    def row(mask_S: Array) -> Array:
        place_S = jnp.where(mask_S, jnp.cumsum(mask_S, dtype=jnp.int32) - 1, size)
        slots_S = jnp.arange(mask_S.shape[0], dtype=jnp.int32)
        return jnp.full((size,), -1, jnp.int32).at[place_S].set(slots_S, mode="drop")

    return _rows(row, mask)


def _by_search(mask: Bool[Array, "*R S"], size: int) -> Int[Array, "*R C"]:
    """Find for every place the first slot whose running sum reaches it."""

    def row(sums_S: Array) -> Array:
        places_C = jnp.arange(1, size + 1, dtype=jnp.int32)
        slots_C = jnp.searchsorted(sums_S, places_C, side="left", method="scan")
        return jnp.where(places_C <= sums_S[-1], slots_C, -1).astype(jnp.int32)

    return _rows(row, _running_sum(mask))


def _running_sum(mask: Bool[Array, "*R S"]) -> Int[Array, "*R S"]:
    """`cumsum` whose inner part, within blocks of 128 slots, is a matmul with a triangle of ones.

    For v5e and 131,072 slots it compiles in a third of cumsum's time (1.1 s, not 3.1) to a program
    that moves half the bytes; a program holds one for each layer. Counts up to 128 are exact.
    """
    *rows, slots = mask.shape
    padded = jnp.pad(mask, [(0, 0)] * len(rows) + [(0, -slots % _LANES)])
    blocks_RPZ = padded.reshape(*rows, -1, _LANES).astype(jnp.bfloat16)
    triangle_ZZ = jnp.triu(jnp.ones((_LANES, _LANES), jnp.bfloat16))
    inner_RPZ = jnp.matmul(blocks_RPZ, triangle_ZZ, preferred_element_type=jnp.float32)
    inner_RPZ = inner_RPZ.astype(jnp.int32)
    counts_RP = inner_RPZ[..., -1]
    before_RP = jnp.cumsum(counts_RP, axis=-1) - counts_RP
    return (inner_RPZ + before_RP[..., None]).reshape(*rows, -1)[..., :slots]  # [R, S]


def _rows(row: Callable[[Array], Array], x: Array) -> Array:
    """`row` mapped over all leading axes."""
    flat = jax.vmap(row)(x.reshape(-1, x.shape[-1]))  # [R, S]
    return flat.reshape(*x.shape[:-1], flat.shape[-1])


class _Words(NamedTuple):
    """Bits of R rows in V blocks of I words, and how many set bits come before each.

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


def _mask(words: _Words) -> UInt32[Array, "R S"]:
    """1 for the k slots with the highest nonzero keys; among equals the lowest slots."""
    before_RVI = words.outer_equal[..., None] + (words.inner >> 16).astype(jnp.int32)
    room_RVI = words.quota[:, None, None] - before_RVI
    chosen_RVI = words.above | _lowest(words.equal, room_RVI)
    bits = (chosen_RVI[..., None] >> jnp.arange(_BITS, dtype=jnp.uint32)) & 1
    return bits.reshape(len(bits), -1)


def _slots(words: _Words, size: int) -> Int[Array, "R C"]:
    """The slots of `_mask`, ascending, then -1 up to C = size."""
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
    slot_RC = number_RC * _BITS + _place_of(bits_RC, rest_RC).astype(jnp.int32)
    return jnp.where(place_RC < words.total[:, None], slot_RC, -1)


def _words(key: UInt32[Array, "R S"], border: UInt32[Array, " R"], k: Int[Array, " R"]) -> _Words:
    spare = -key.shape[1] % (_BITS * _BLOCK)
    key = jnp.pad(key, ((0, 0), (0, spare)))
    key_RVIL = key.reshape(key.shape[0], -1, _BLOCK, _BITS)
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
    lane = jnp.uint32(1) << jnp.arange(_BITS, dtype=jnp.uint32)
    return _sum(jnp.where(mask, lane, jnp.uint32(0)))


def _chosen(above: Array, equal: Array, quota: Array) -> Array:
    return above + jnp.minimum(equal, quota)


def _at(x: Array, index: Array) -> Array:
    """x[r, index[r, c]]; the callers' indices are within x."""
    return jnp.take_along_axis(x, index, axis=1, mode="promise_in_bounds")


def _last(holds: Callable[[Array], Array], count: int, shape: tuple[int, ...]) -> Int[Array, "R C"]:
    """The last index below `count` where `holds` is true; it is true up to there."""
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
