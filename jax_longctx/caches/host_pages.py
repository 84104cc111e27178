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
from pallas_kernels.plane import Plane
from pallas_kernels.quantised import Quantised

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


def rows_of(x: Any) -> tuple[Array, Any]:
    """The rows of an array, of all layers for a plane, and this layer's first row."""
    return x.rows() if isinstance(x, Plane) else (x, 0)


def write_at(x: Any, part: Any, slot: Any, row: Any = 0, head: Any = 0) -> Any:
    """`x` with `part`, [rows, heads, slots, ...], written from (row, head, slot) on."""
    if isinstance(x, Quantised):
        return x.map(lambda old, new: write_at(old, new, slot, row, head), part)
    rows, first = rows_of(x)
    place = (first + row, head, slot, *(0 for _ in rows.shape[3:]))
    rows = jax.lax.dynamic_update_slice(rows, part.astype(rows.dtype), place)
    return x.with_rows(rows) if isinstance(x, Plane) else rows


def row_of(x: Any, row: Any, slot: Any, size: int) -> Any:
    """`size` slots of one row from `slot` on, [K, size, ...]."""
    if isinstance(x, Quantised):
        return x.map(lambda part: row_of(part, row, slot, size))
    rows, first = rows_of(x)
    place = (first + row, 0, slot, *(0 for _ in rows.shape[3:]))
    return jax.lax.dynamic_slice(rows, place, (1, rows.shape[1], size, *rows.shape[3:]))[0]


def to_host(host: Any, part: Any, place: tuple[Any, Any], run: int) -> Any:
    """The host's pages with `run` of them from `place` (row, page) on, of `part` [K, slots, H]."""
    values = part.values if isinstance(part, Quantised) else part
    rows, first = rows_of(host)
    _, pages, heads, *lines = rows.shape
    new = jnp.swapaxes(values.reshape(heads, run, *lines), 0, 1)
    flat = rows.reshape(-1, heads, *lines)
    at = (first + place[0]) * pages + place[1]
    new = jax.device_put(new, HOST)
    flat = jax.lax.dynamic_update_slice(flat, new, (at, *(0 for _ in new.shape[1:])))
    flat = flat.reshape(rows.shape)
    return host.with_rows(flat) if isinstance(host, Plane) else flat


def rows_to_host(host: Any, x: Any, row: Any, page: int) -> Any:
    """The host's pages with the rows from `row` on replaced by `x`, [B, K, S, H]."""
    values = x.values if isinstance(x, Quantised) else x
    rows, first = rows_of(host)
    _, pages, heads, *lines = rows.shape
    new = values[:, :, : pages * page].reshape(-1, heads, pages, *lines)
    new = jax.device_put(jnp.swapaxes(new, 1, 2), HOST)
    rows = jax.lax.dynamic_update_slice(rows, new, (first + row, *(0 for _ in new.shape[1:])))
    return host.with_rows(rows) if isinstance(host, Plane) else rows


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
    found = host
    if isinstance(host, Plane):
        found = jax.lax.dynamic_index_in_dim(host.whole, host.layer, 0, keepdims=False)
    found = jnp.swapaxes(jax.device_put(found, DEVICE), 1, 2)
    return found.reshape(*found.shape[:2], -1, found.shape[-1])
