"""Arrays in the host's memory, in pages, and what moves their parts to a device and back.

The host's pages are [B, P, K, page / lines, lines, H]; the pool on the device is [B, K, R, H].

Compilers decide the form of the host's arrays. A page is fetched by one index along one axis: a TPU
slices no two axes of a host's array at places that it cannot know to be aligned. The last axes but
one have 16 slots at most: a TPU would copy an array in 8 bits to give it larger tiles. Scales of 8
bits stay on the device, as they are small.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from jax_longctx.contract import resized
from pallas_kernels.plane import each_array, layer_of, rows_of, with_rows

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
# Slots of the last axis but one of the host's arrays.
_LINES = 16


def page_shape(page: int) -> tuple[int, int]:
    """The axes of a page's slots in the host's arrays."""
    lines = math.gcd(page, _LINES)
    return page // lines, lines


def with_slots(x: Any, slots: int) -> Any:
    """Keys or values with `slots` slots."""
    return jax.tree.map(lambda part: resized(part, 2, slots), x)


def shifted(x: Any, by: Int[Array, " B"]) -> Any:
    """Each row's slots moved down by by[b]; the last ones are garbage."""
    roll = jax.vmap(lambda row, count: jnp.roll(row, -count, axis=1))
    return jax.tree.map(lambda part: roll(part, by), x)


def joined(first: Any, second: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=2), first, second)


def write_at(x: Any, part: Any, slot: Any, row: Any = 0, head: Any = 0) -> Any:
    """`x` with `part`, [rows, heads, slots, ...], written from (row, head, slot) on."""

    def write(old: Any, new: Array) -> Any:
        rows, first = rows_of(old)
        place = (first + row, head, slot, *(0 for _ in rows.shape[3:]))
        return with_rows(old, jax.lax.dynamic_update_slice(rows, new.astype(rows.dtype), place))

    return each_array(write, x, part)


def row_of(x: Any, row: Any, slot: Any, size: int, head: Any = None) -> Any:
    """`size` slots of one row from `slot` on, [1, K, size, ...], of all heads or of one."""

    def of(part: Any) -> Array:
        rows, first = rows_of(part)
        begin, heads = (0, rows.shape[1]) if head is None else (head, 1)
        place = (first + row, begin, slot, *(0 for _ in rows.shape[3:]))
        return jax.lax.dynamic_slice(rows, place, (1, heads, size, *rows.shape[3:]))

    return each_array(of, x)


def to_host(host: Any, numbers: Array, place: tuple[Any, Any], run: int) -> Any:
    """The host's pages with `run` of them from `place` (row, page) on, of [1, K, slots, H]."""
    rows, first = rows_of(host)
    _, pages, heads, *lines = rows.shape
    new = jnp.swapaxes(numbers.reshape(heads, run, *lines), 0, 1)
    flat = rows.reshape(-1, heads, *lines)
    at = (first + place[0]) * pages + place[1]
    new = jax.device_put(new, HOST)
    flat = jax.lax.dynamic_update_slice(flat, new, (at, *(0 for _ in new.shape[1:])))
    return with_rows(host, flat.reshape(rows.shape))


def rows_to_host(host: Any, numbers: Array, row: Any, page: int) -> Any:
    """The host's pages with the rows from `row` on replaced by [B, K, S, H]."""
    rows, first = rows_of(host)
    _, pages, heads, *lines = rows.shape
    new = numbers[:, :, : pages * page].reshape(-1, heads, pages, *lines)
    new = jax.device_put(jnp.swapaxes(new, 1, 2), HOST)
    rows = jax.lax.dynamic_update_slice(rows, new, (first + row, *(0 for _ in new.shape[1:])))
    return with_rows(host, rows)


def to_device(host: Any, place: tuple[Any, Any], head: Any) -> Shaped[Array, "1 K Z H"]:
    """One page of all heads, or of one."""
    rows, first = rows_of(host)
    _, pages, heads, *lines = rows.shape
    at = (first + place[0]) * pages + place[1]
    flat = rows.reshape(-1, heads, *lines)
    if head is not None:
        flat, at = rows.reshape(-1, 1, *lines), at * heads + head
    found = jax.lax.dynamic_index_in_dim(flat, at, 0, keepdims=True)
    found = jax.device_put(found, DEVICE)
    return found.reshape(1, flat.shape[1], -1, lines[-1])


def whole_on_device(host: Any) -> Shaped[Array, "B K S H"]:
    """A layer's pages on the device, as slots."""
    found = jnp.swapaxes(jax.device_put(layer_of(host), DEVICE), 1, 2)
    return found.reshape(*found.shape[:2], -1, found.shape[-1])
