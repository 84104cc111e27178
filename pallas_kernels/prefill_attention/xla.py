"""Attention of a chunk in plain XLA, streaming over blocks of keys with an online softmax.

Each block of queries goes over the blocks of keys. It keeps a running maximum, sum and output in
float32 (Milakov & Gimelshein's online softmax, as in FlashAttention). The largest temporary is one
block of scores, whatever T and S are. The loop runs from the first key block that a query can see
to the last that a row fills, so empty capacity and keys outside a window cost nothing. Matmuls take
the input dtype and accumulate in float32. Keys and values in 8 bits become floats
a block at a time. k and v are never repeated for grouped heads.

Roofline: 4 T S N H operations (half when causal). On a 2-core AVX-512 machine (297 GFLOP/s in a
2048^3 matmul) 512 queries against 8192 slots, 9 heads of 64 in float32, take 66 ms (147 GFLOP/s).
Einsum, softmax, einsum take 594 ms there, since their 151 MB of scores go through memory.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.common import (
    MASKED,
    Attended,
    Chunk,
    PerRow,
    Queries,
    Stored,
    Window,
    block_of,
    group_heads,
    ungroup_heads,
)
from pallas_kernels.dispatch import platform

# Keys in a block, and how many bytes of float32 scores one block of queries and keys may have.
# Measured on a CPU (512 queries, 10,000 keys): 4 MiB stay in its caches, and take 0.7 times the
# processor time of 16 MiB. An accelerator gets fewer and larger blocks.
_KEY_BLOCK = 512
_SCORE_BYTES, _CPU_SCORE_BYTES = 16 * 2**20, 4 * 2**20


@dataclass(frozen=True)
class _Job:
    """Sizes of blocks, what is seen, and what has to be visited.

    Attributes:
      lengths: of the rows, [B]; None where all slots hold finite values.
      visible: of slots [C] and indices of queries [t], [B or 1, t or 1, C].
      blocks: of a block's first query, the first key block that it has to visit and the last + 1.
    """

    key_block: int
    query_block: int
    scale: float
    lengths: Array | None
    visible: Callable[[Array, Array], Array]
    blocks: Callable[[Array], tuple[Array | int, Array | int]]


def causal_attention(
    q: Queries, k: Chunk, v: Chunk, *, scale: float, window: int | None = None
) -> Attended:
    """Token t sees the tokens j <= t, and with a window those with t - j < window."""
    key_block = min(_KEY_BLOCK, q.shape[1])
    query_block = _query_block(q.shape, key_block)

    def visible(slots_C: Array, queries_T: Array) -> Array:
        back_TC = queries_T[:, None] - slots_C
        seen_TC = back_TC >= 0
        return (seen_TC if window is None else seen_TC & (back_TC < window))[None]

    def blocks(start: Array) -> tuple[Array | int, Array]:
        first = 0 if window is None else jnp.maximum(start - window + 1, 0) // key_block
        return first, (start + query_block - 1) // key_block + 1

    k_BKTH, v_BKTH = jnp.moveaxis(k, 1, 2), jnp.moveaxis(v, 1, 2)
    return _stream(q, k_BKTH, v_BKTH, _Job(key_block, query_block, scale, None, visible, blocks))


def cache_attention(
    q: Queries, k: Stored, v: Stored, lengths: PerRow, *, scale: float, window: Window | None = None
) -> Attended:
    """Every query of row b sees the slots below lengths[b], within the window if there is one."""
    key_block = min(_KEY_BLOCK, k.shape[2])
    query_block = _query_block(q.shape, key_block)
    last = (jnp.max(lengths) + key_block - 1) // key_block

    def visible(slots_C: Array, queries_T: Array) -> Array:
        held_B1C = (slots_C < lengths[:, None])[:, None]
        if window is None:
            return held_B1C
        return held_B1C & window.sees(slots_C, queries_T)

    def blocks(start: Array) -> tuple[Array | int, Array]:
        if window is None:
            return 0, last
        oldest = jnp.min(window.query_start) + start - window.size + 1 - window.slot_start
        return jnp.maximum(oldest, 0) // key_block, last

    return _stream(q, k, v, _Job(key_block, query_block, scale, lengths, visible, blocks))


def _query_block(q_shape: tuple[int, ...], key_block: int) -> int:
    """Queries in a block: a power of two that keeps one block of scores within its bytes."""
    b, t, n, _ = q_shape
    most = _CPU_SCORE_BYTES if platform() == "cpu" else _SCORE_BYTES
    fits = max(16, most // (4 * b * n * key_block))
    return min(t, 2 ** (fits.bit_length() - 1))


def _stream(q: Array, k: Stored, v: Stored, job: _Job) -> tuple[Array, Array]:
    """Attend q [B,T,N,H] to k and v [B,K,S,H] block by block; see the module's docstring."""
    q_BKGTH = group_heads(q, k.shape[1])
    queries, query_block = q.shape[1], job.query_block

    def attend(i: Array | int, results: tuple[Array, Array]) -> tuple[Array, Array]:
        # The last block is moved back to end with T: its overlap is computed twice, alike.
        start = jnp.minimum(i * query_block, queries - query_block)
        q_block = lax.dynamic_slice_in_dim(q_BKGTH, start, query_block, axis=3)
        out, lse = _attend_keys(q_block, k, v, start, job)
        outs, lses = results
        outs = lax.dynamic_update_slice_in_dim(outs, out.astype(q.dtype), start, axis=3)
        return outs, lax.dynamic_update_slice_in_dim(lses, lse, start, axis=3)

    results = jnp.zeros_like(q_BKGTH), jnp.zeros(q_BKGTH.shape[:-1], jnp.float32)
    out, lse = lax.fori_loop(0, -(-queries // query_block), attend, results)
    return ungroup_heads(out), ungroup_heads(lse)


def _attend_keys(
    q: Array, k: Stored, v: Stored, first_query: Array, job: _Job
) -> tuple[Array, Array]:
    """Online softmax of one query block [B,K,G,t,H] over the key blocks that it visits."""
    slots, key_block = k.shape[2], job.key_block
    queries_T = first_query + jnp.arange(q.shape[3])

    def step(j: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, acc = carry
        # The last block is moved back to end with S; what the one before had is masked.
        start = jnp.minimum(j * key_block, slots - key_block)
        slots_C = start + jnp.arange(key_block)
        k_BKCH = block_of(k, start, key_block)
        v_BKCH = block_of(v, start, key_block)
        if job.lengths is not None:  # beyond a row's length lies garbage, and 0 x NaN is NaN
            held_BC = slots_C < job.lengths[:, None]
            v_BKCH = jnp.where(held_BC[:, None, :, None], v_BKCH, 0)
        scores = job.scale * jnp.einsum(
            "BKGTH,BKCH->BKGTC", q, k_BKCH, preferred_element_type=jnp.float32
        )
        seen_BTC = job.visible(slots_C, queries_T) & (slots_C >= j * key_block)
        scores = jnp.where(seen_BTC[:, None, None], scores, MASKED)
        new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
        weights = jnp.exp(scores - new_top[..., None])
        decay = jnp.exp(top - new_top)
        part = jnp.einsum(
            "BKGTC,BKCH->BKGTH",
            weights.astype(v.dtype),
            v_BKCH,
            preferred_element_type=jnp.float32,
        )
        return new_top, total * decay + jnp.sum(weights, -1), acc * decay[..., None] + part

    rows = q.shape[:-1]
    empty = (
        jnp.full(rows, MASKED, jnp.float32),
        jnp.zeros(rows, jnp.float32),
        jnp.zeros(q.shape, jnp.float32),
    )
    top, total, acc = lax.fori_loop(*job.blocks(first_query), step, empty)
    # A row that has seen nothing still has top == MASKED, and weights exp(0) of masked slots.
    some = top > MASKED
    total = jnp.where(some, total, 1.0)
    out = jnp.where(some[..., None], acc / total[..., None], 0.0)
    return out, jnp.where(some, top + jnp.log(total), -jnp.inf)
