"""The k best of S scores without a sort, in plain XLA: bisection on the scores' bits.

A float's bits map to an unsigned integer of the same order (negative numbers complemented, the
sign bit set on the others). The k-th best key is found bit by bit from the highest: a bit stays set
while at least k keys are not below the candidate, 32 passes that only count. Every key above it is
chosen, and of its equals the lowest slots: the slot below which just enough of them lie is found
bit by bit too, ceil(log2 S) passes. The chosen slots are then numbered by a running sum and put in
ascending order: by a scatter on CPU; elsewhere, where a scatter of S single elements is slow, by
looking up for every output the slot at which the running sum reaches it (binary search).

On a GPU a pass is launches: one decides four bits at once, its 15 counts taken in one reading, and
`words` does the rest in a few more, ties included.

Work: (32 + log2 S) passes over 4 S bytes a row, on a GPU 8. Temporaries: keys, running sum (with
its partial sums), places and slots, 17 bytes a score on CPU. Source: ours; the radix descent is the
known one of GPU top-k.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Bool, Float, Int, UInt32

from pallas_kernels import dispatch
from pallas_kernels.select_large_k import words

_NEVER = np.uint32(0)  # the key of -inf and NaN: below every other
_SIGN = np.uint32(1 << 31)
_INFINITY = np.uint32(0x7F800000)
_LANES = 128
_DIGIT = 4  # bits that one pass decides on a GPU
_RUN = 256  # keys that one warp counts there


def select_mask(scores: Float[Array, "*R S"], k: Int[Array, "*R"]) -> Bool[Array, "*R S"]:
    """See `api.select_mask`."""
    key_RS = ordered(scores)
    if dispatch.platform() == "gpu":
        return by_words(key_RS, kth_best_by_digits, k, None)
    k_R = jnp.minimum(k, _count(key_RS > _NEVER))
    border_R = _kth_best(key_RS, k_R)
    above_RS = key_RS > border_R[..., None]
    equal_RS = key_RS == border_R[..., None]
    end_R = _end_of_first(equal_RS, k_R - _count(above_RS))
    return above_RS | (equal_RS & (jnp.arange(scores.shape[-1]) < end_R[..., None]))


def select_large_k(
    scores: Float[Array, "*R S"], k: Int[Array, "*R"], *, size: int
) -> Int[Array, "*R C"]:
    """See `api.select_large_k`; k at most size."""
    if dispatch.platform() == "gpu":
        return by_words(ordered(scores), kth_best_by_digits, k, size)
    mask_RS = select_mask(scores, k)
    compact = _by_scatter if dispatch.platform() == "cpu" else _by_search
    return compact(mask_RS, size)


def by_words(
    key: UInt32[Array, "*R S"],
    kth_best: Callable[[Array, Array], Array],
    k: Int[Array, "*R"],
    size: int | None,
) -> Array:
    """What is chosen, as GPUs find it.

    Args:
      kth_best: the border of k of the keys [R,S], any that `words` takes.
      size: how many slots; None for the mask over all slots.
    """
    key_RS, k_R = key.reshape(-1, key.shape[-1]), k.reshape(-1)
    border_R = kth_best(key_RS, k_R)
    if size is None:
        return words.mask_above(key_RS, border_R, k_R).reshape(key.shape)
    return words.slots_above(key_RS, border_R, k_R, size).reshape(*k.shape, size)


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


def kth_best_by_digits(
    key: UInt32[Array, "R S"], k: Int[Array, " R"], digit: int = _DIGIT
) -> UInt32[Array, " R"]:
    """The k-th best key, found digit by digit, all values of a digit in one pass.

    On a GPU a pass is launches, and a turn of a loop waits for the host: few, and unrolled.

    Args:
      digit: bits of a pass.
    """
    found_R = jnp.zeros(k.shape, jnp.uint32)
    for shift in reversed(range(0, 32, digit)):
        values = range(1, 1 << min(digit, 32 - shift))
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
