"""Attention mass in plain XLA, streaming over blocks of keys and of queries.

The log-sum-exp of every query is known, so one sweep over the keys is enough. A block of logits
becomes probabilities and is reduced over queries at once; only the sums of a block of C keys,
[B,K,G,C], are kept. Queries that do not count (padding, or that saw no key) get a log-sum-exp of
+inf, so that their probabilities are 0. Slots beyond a row's length are computed with the rest and
set to 0 in the reduced block. The loop over keys ends at the last block that any row fills and any
query sees; with causal queries the loop over queries begins at the first that sees the block. One
query (decode) needs no loop: its logits are small beside the cache. Keys in 8 bits become floats a
block at a time.

Temporaries: a block of float32 logits of at most `_LOGIT_BYTES`, and copies of q. Roofline:
2 T S N H operations, half of attention's; with one query the bytes of k over the bandwidth.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from pallas_kernels.attention_mass.reference import Masses, Reduction
from pallas_kernels.common import (
    PerQuery,
    PerRow,
    Queries,
    Stored,
    block_of,
    capped,
    factor_of,
    group_heads,
    quotient,
)
from pallas_kernels.dispatch import read_as_written
from pallas_kernels.quantised import Quantised

# Float32 logits of a block; 4 to 64 MB and 256 to 2048 keys differ less than two runs on a CPU.
_LOGIT_BYTES = 16 * 2**20
_MIN_KEYS = 128
_MAX_KEYS = 4096  # with few queries a block of keys, which the loop copies, outgrows its logits


def attention_mass(q: Queries, k: Stored, lse: PerQuery, lengths: PerRow, how: Reduction) -> Masses:
    """See `api.attention_mass`; lengths within 0..S."""
    queries, slots = q.shape[1], k.shape[2]
    counted_BT1 = (jnp.arange(queries) < how.valid[:, None])[..., None]
    lse = jnp.where(counted_BT1 & (lse > -jnp.inf), lse, jnp.inf)
    q = jnp.where(counted_BT1[..., None], q, 0)
    if how.causal_start is not None:
        lengths = jnp.clip(how.causal_start + how.valid, 0, lengths)
    q_BKGTH = group_heads(q, k.shape[1])
    lse_BKGT = group_heads(lse[..., None], k.shape[1])[..., 0]
    if how.over_group == "first":
        q_BKGTH, lse_BKGT = q_BKGTH[:, :, :1], lse_BKGT[:, :, :1]
    if queries == 1 and not isinstance(k, Quantised):
        k = read_as_written(k)
        p_BKGTS = _probabilities(how, q_BKGTH, lse_BKGT, k)
        if how.causal_start is not None:
            p_BKGTS = _causal(p_BKGTS, jnp.arange(1), jnp.arange(slots), how.causal_start)
        sums = _over_queries(how, p_BKGTS)
    else:
        sums = _stream(how, q_BKGTH, lse_BKGT, k, jnp.max(lengths))
    held_B1S = (jnp.arange(slots) < lengths[:, None])[:, None]
    # Of the first heads alone there is one.
    over_group = jnp.max if how.over_group == "max" else jnp.sum
    mass_BKS = jnp.where(held_B1S, over_group(sums[0], axis=2), 0.0)
    return mass_BKS, jnp.where(held_B1S, sums[1], 0.0) if how.squares else None


def _probabilities(
    how: Reduction,
    q: Float[Array, "B K G T H"],
    lse: Float[Array, "B K G T"],
    k: Any,
) -> Float[Array, "B K G T C"]:
    # Groups and queries as one axis: with two, XLA on CPU transposes k in memory for float32.
    q_BKRH = q.reshape(*k.shape[:2], -1, k.shape[3])
    logits_BKRC = jnp.einsum("BKRH,BKCH->BKRC", q_BKRH, k, preferred_element_type=jnp.float32)
    logits_BKGTC = factor_of(how.scale) * logits_BKRC.reshape(*q.shape[:4], k.shape[2])
    logits_BKGTC = capped(logits_BKGTC, how.scale)
    return jnp.exp(logits_BKGTC - lse[..., None])


def _causal(
    p: Float[Array, "B K G T C"],
    queries: Int[Array, " T"],
    slots: Int[Array, " C"],
    causal_start: PerRow,
) -> Float[Array, "B K G T C"]:
    seen_BTC = slots <= (causal_start[:, None] + queries)[..., None]
    return jnp.where(seen_BTC[:, None, None], p, 0.0)


def _over_queries(how: Reduction, p: Float[Array, "B K G T C"]) -> tuple[Array, ...]:
    """Sums over the queries: [B,K,G,C] of probabilities and, with squares, [B,K,C] of these."""
    per_head_BKGC = jnp.sum(p, axis=3)
    if not how.squares:
        return (per_head_BKGC,)
    return per_head_BKGC, jnp.sum(jnp.square(jnp.mean(p, axis=2)), axis=2)


def _blocks(rows: int, queries: int, slots: int) -> tuple[int, int]:
    """Queries and keys of a block with `rows` = B x N logits for each pair.

    All queries at once and as many keys as fit; where even _MIN_KEYS are too many, fewer queries.
    Powers of two, unless there are fewer than that.
    """
    pairs = max(_LOGIT_BYTES // (4 * rows), 1)
    keys = max(_MIN_KEYS, min(_power_below(max(pairs // queries, 1)), _MAX_KEYS))
    return min(queries, _power_below(max(pairs // keys, 1))), min(keys, slots)


def _power_below(number: int) -> int:
    return 2 ** (number.bit_length() - 1)


def _stream(
    how: Reduction,
    q: Float[Array, "B K G T H"],
    lse: Float[Array, "B K G T"],
    k: Stored,
    filled: Int[Array, ""],
) -> tuple[Array, ...]:
    """Sums [B,K,G,S] and [B,K,S] over the queries, block by block, of the first `filled` slots."""
    (b, kv_heads, groups, queries, _), slots = q.shape, k.shape[2]
    query_block, key_block = _blocks(b * kv_heads * groups, queries, slots)
    empty = [jnp.zeros((b, kv_heads, groups, slots), jnp.float32)]
    empty += [jnp.zeros((b, kv_heads, slots), jnp.float32)] * how.squares

    def keys(j: Array, totals: tuple[Array, ...]) -> tuple[Array, ...]:
        # The last block is moved back to end with S: its overlap is computed twice, alike.
        key_start = jnp.minimum(j * key_block, slots - key_block)
        k_BKCH = block_of(k, key_start, key_block)
        slots_C = key_start + jnp.arange(key_block)

        def some_queries(i: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
            # The last block is moved back to end with T; queries of the one before do not count.
            start = jnp.minimum(i * query_block, queries - query_block)
            queries_T = start + jnp.arange(query_block)
            lse_BKGT = lax.dynamic_slice_in_dim(lse, start, query_block, axis=3)
            lse_BKGT = jnp.where(queries_T >= i * query_block, lse_BKGT, jnp.inf)
            q_BKGTH = lax.dynamic_slice_in_dim(q, start, query_block, axis=3)
            p_BKGTC = _probabilities(how, q_BKGTH, lse_BKGT, k_BKCH)
            if how.causal_start is not None:
                p_BKGTC = _causal(p_BKGTC, queries_T, slots_C, how.causal_start)
            return tuple(map(jnp.add, sums, _over_queries(how, p_BKGTC)))

        first: Array | int = 0
        if how.causal_start is not None:
            first = quotient(jnp.maximum(key_start - jnp.max(how.causal_start), 0), query_block)
        nothing = tuple(jnp.zeros((*x.shape[:-1], key_block), jnp.float32) for x in totals)
        sums = lax.fori_loop(first, -(-queries // query_block), some_queries, nothing)
        return tuple(
            lax.dynamic_update_slice_in_dim(total, x, key_start, axis=-1)
            for total, x in zip(totals, sums, strict=True)
        )

    return lax.fori_loop(0, quotient(filled + key_block - 1, key_block), keys, tuple(empty))
