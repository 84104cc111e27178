"""Short lists of the best, one for every place of an array in registers, kept sorted."""

import jax.numpy as jnp
from jax import Array


def insert(
    lists: list[tuple[Array, Array]], value: Array, number: Array, tolerance: Array
) -> list[tuple[Array, Array]]:
    """Put (value, number) behind the last listed one that it does not beat by the tolerance.

    Compares and selects alone: the time does not depend on the data. NaN is not put anywhere.
    """
    value_less = value - tolerance
    better = [value_less > listed for listed, _ in lists]
    # A listed value may be above the one before it, by at most the tolerance.
    for j in reversed(range(len(lists) - 1)):
        better[j] &= better[j + 1]
    result = []
    for j, (listed, its_number) in enumerate(lists):
        new_value, new_number = value, number
        if j:
            new_value = jnp.where(better[j - 1], lists[j - 1][0], value)
            new_number = jnp.where(better[j - 1], lists[j - 1][1], number)
        result.append(
            (
                jnp.where(better[j], new_value, listed),
                jnp.where(better[j], new_number, its_number),
            )
        )
    return result
