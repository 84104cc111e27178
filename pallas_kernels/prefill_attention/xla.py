"""Attention of a chunk in plain XLA, streaming over blocks of keys with an online softmax.

Each block of queries goes over the blocks of keys. It keeps a running maximum, sum and output in
float32 (Milakov & Gimelshein's online softmax, as in FlashAttention). The largest temporary is one
block of scores, whatever T and S are. The loop runs from the first key block that a query can see
to the last that a row fills, so empty capacity and keys outside a window cost nothing. Matmuls take
the input dtype and accumulate in float32. Keys and values in 8 bits become floats
a block at a time. k and v are never repeated for grouped heads.

Roofline: 4 T S N H operations (half when causal). On a Zen 5 core of 4.1 GHz (peak 265 GFLOP/s in
float32, 225 in a plain matmul) 512 queries against 3072 slots, 9 heads of 64, take 23 ms of
processor time (155 GFLOP/s). The exponentials take most of the rest.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.common import (
    MASKED,
    Attended,
    Capped,
    Chunk,
    PerRow,
    Queries,
    Scale,
    Stored,
    Window,
    block_of,
    capped,
    factor_of,
    group_heads,
    quotient,
    ungroup_heads,
)
from pallas_kernels.dispatch import platform

# Keys in a block, and how many bytes of float32 scores one block of queries and keys may have. On a
# CPU 8 MiB stay in its caches. There smaller blocks fit the triangle of causal attention better: of
# 512 queries, 256 keys take 0.65 times the processor time of 512. An accelerator gets fewer and
# larger blocks.
_KEY_BLOCK, _CPU_CAUSAL_BLOCK = 512, 256
_SCORE_BYTES, _CPU_SCORE_BYTES = 16 * 2**20, 8 * 2**20


@dataclass(frozen=True)
class _Plan:
    """Sizes of blocks, the mask, and the blocks to visit.

    Attributes:
      lengths: of the rows, [B]; None where all slots hold finite values.
      visible: of slots [C] and indices of queries [t], [B or 1, t or 1, C].
      blocks: of a block's first query, the key blocks that it has to visit: the first, the first
        from which on slots may be hidden, and the last + 1.
    """

    key_block: int
    query_block: int
    scale: Scale
    lengths: Array | None
    visible: Callable[[Array, Array], Array]
    blocks: Callable[[Array], tuple[Array | int, Array | int, Array | int]]


def causal_attention(
    q: Queries, k: Chunk, v: Chunk, *, scale: Scale, window: int | None = None
) -> Attended:
    """Token t sees the tokens j <= t, and with a window those with t - j < window."""
    key_block = min(_CPU_CAUSAL_BLOCK if platform() == "cpu" else _KEY_BLOCK, q.shape[1])
    # Of more queries than keys the first ones would see little of their last blocks.
    query_block = min(_query_block(q.shape, key_block), key_block)

    def visible(slots_C: Array, queries_T: Array) -> Array:
        back_TC = queries_T[:, None] - slots_C
        seen_TC = back_TC >= 0
        return (seen_TC if window is None else seen_TC & (back_TC < window))[None]

    def blocks(start: Array) -> tuple[Array | int, Array, Array]:
        last = quotient(start + query_block - 1, key_block) + 1
        if window is None:
            return 0, quotient(start + 1, key_block), last
        first = quotient(jnp.maximum(start - window + 1, 0), key_block)
        return first, first, last

    k_BKTH, v_BKTH = jnp.moveaxis(k, 1, 2), jnp.moveaxis(v, 1, 2)
    return _stream(q, k_BKTH, v_BKTH, _Plan(key_block, query_block, scale, None, visible, blocks))


def cache_attention(
    q: Queries, k: Stored, v: Stored, lengths: PerRow, *, scale: Scale, window: Window | None = None
) -> Attended:
    """Every query of row b sees the slots below lengths[b], within the window if there is one."""
    key_block = min(_KEY_BLOCK, k.shape[2])
    query_block = _query_block(q.shape, key_block)
    whole = quotient(jnp.min(lengths), key_block)
    last = quotient(jnp.max(lengths) + key_block - 1, key_block)

    def visible(slots_C: Array, queries_T: Array) -> Array:
        held_B1C = (slots_C < lengths[:, None])[:, None]
        if window is None:
            return held_B1C
        return held_B1C & window.sees(slots_C, queries_T)

    def blocks(start: Array) -> tuple[Array | int, Array, Array]:
        if window is None:
            return 0, whole, last
        oldest = jnp.min(window.query_start) + start - window.size + 1 - window.slot_start
        first = quotient(jnp.maximum(oldest, 0), key_block)
        return first, first, last

    return _stream(q, k, v, _Plan(key_block, query_block, scale, lengths, visible, blocks))


def _query_block(q_shape: tuple[int, ...], key_block: int) -> int:
    """Queries in a block: a power of two that keeps one block of scores within its bytes."""
    b, t, n, _ = q_shape
    most = _CPU_SCORE_BYTES if platform() == "cpu" else _SCORE_BYTES
    fits = max(16, most // (4 * b * n * key_block))
    return min(t, 2 ** (fits.bit_length() - 1))


def _stream(q: Array, k: Stored, v: Stored, plan: _Plan) -> tuple[Array, Array]:
    """Attend q [B,T,N,H] to k and v [B,K,S,H] block by block; see the module's docstring."""
    if factor_of(plan.scale) <= 0:  # the running maximum is of the scores before they are scaled
        raise ValueError(f"attention: scale is {plan.scale}; expected a number above 0")
    q_BKGTH = group_heads(q, k.shape[1])
    queries, query_block = q.shape[1], plan.query_block

    def attend(i: Array | int, results: tuple[Array, Array]) -> tuple[Array, Array]:
        # The last block is moved back to end with T: its overlap is computed twice, alike.
        start = jnp.minimum(i * query_block, queries - query_block)
        q_block = lax.dynamic_slice_in_dim(q_BKGTH, start, query_block, axis=3)
        out, lse = _attend_keys(q_block, k, v, start, plan)
        outs, lses = results
        outs = lax.dynamic_update_slice_in_dim(outs, out.astype(q.dtype), start, axis=3)
        return outs, lax.dynamic_update_slice_in_dim(lses, lse, start, axis=3)

    results = jnp.zeros_like(q_BKGTH), jnp.zeros(q_BKGTH.shape[:-1], jnp.float32)
    out, lse = lax.fori_loop(0, -(-queries // query_block), attend, results)
    return ungroup_heads(out), ungroup_heads(lse)


def _attend_keys(
    q: Array, k: Stored, v: Stored, first_query: Array, plan: _Plan
) -> tuple[Array, Array]:
    """Online softmax of one query block [B,K,G,t,H] over the key blocks that it visits."""
    slots, key_block, scale = k.shape[2], plan.key_block, plan.scale
    # Capped scores are scaled before their maximum is known.
    factor = 1.0 if isinstance(scale, Capped) else scale
    queries_T = first_query + jnp.arange(q.shape[3])
    first, whole, last = plan.blocks(first_query)
    # Groups and queries as one axis: with two, XLA on CPU transposes k in memory for float32.
    q_BKRH = q.reshape(*q.shape[:2], -1, q.shape[4])

    def step(j: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, acc = carry
        # The last block is moved back to end with S; what the one before had is masked.
        start = jnp.minimum(j * key_block, slots - key_block)
        k_BKCH = block_of(k, start, key_block)
        v_BKCH = block_of(v, start, key_block)
        scores = jnp.einsum("BKRH,BKCH->BKRC", q_BKRH, k_BKCH, preferred_element_type=jnp.float32)
        if isinstance(scale, Capped):
            scores = capped(scale.factor * scores, scale)

        def hide(_: Any, given: tuple[Array, Array]) -> tuple[Array, Array]:
            scores, v_BKCH = given
            slots_C = start + jnp.arange(key_block)
            if plan.lengths is not None:  # beyond a row's length lies garbage, and 0 x NaN is NaN
                held_BC = slots_C < plan.lengths[:, None]
                v_BKCH = jnp.where(held_BC[:, None, :, None], v_BKCH, 0)
            seen_BTC = plan.visible(slots_C, queries_T) & (slots_C >= j * key_block)
            apart = scores.reshape(*q.shape[:-1], key_block)
            return jnp.where(seen_BTC[:, None, None], apart, MASKED).reshape(scores.shape), v_BKCH

        if platform() == "cpu":
            # Few blocks hide a slot, and a mask is one more pass over the scores. A loop of one
            # turn or none leaves them in place; a conditional copies what it returns unchanged.
            turns = (j >= whole).astype(jnp.int32)
            scores, v_BKCH = lax.fori_loop(0, turns, hide, (scores, v_BKCH))
        else:
            scores, v_BKCH = hide(0, (scores, v_BKCH))
        # One axis of rows: XLA on CPU divides the first axes alone among its threads.
        scores = scores.reshape(-1, key_block)
        new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
        weights = jnp.exp(factor * (scores - new_top[:, None]))
        decay = jnp.exp(factor * (top - new_top))
        part = jnp.einsum(
            "BKRC,BKCH->BKRH",
            weights.reshape(*q_BKRH.shape[:3], key_block).astype(v.dtype),
            v_BKCH,
            preferred_element_type=jnp.float32,
        )
        acc = acc * decay[:, None] + part.reshape(acc.shape)
        return new_top, total * decay + jnp.sum(weights, -1), acc

    rows = q.shape[:-1]
    count = math.prod(rows)
    empty = (
        jnp.full((count,), MASKED, jnp.float32),
        jnp.zeros((count,), jnp.float32),
        jnp.zeros((count, q.shape[4]), jnp.float32),
    )
    top, total, acc = lax.fori_loop(first, last, step, empty)
    # A row that has seen nothing still has top == MASKED, and weights exp(0) of masked slots.
    some = top > MASKED
    total = jnp.where(some, total, 1.0)
    out = jnp.where(some[:, None], acc / total[:, None], 0.0)
    lse = jnp.where(some, factor * top + jnp.log(total), -jnp.inf)
    return out.reshape(q.shape), lse.reshape(rows)
