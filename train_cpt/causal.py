"""Causal attention with gradients, in memory linear in the sequence.

On NVIDIA GPUs this is cuDNN's flash attention, forward and backward, through
`jax.nn.dot_product_attention`. Elsewhere the forward pass is the library's own
`pallas_kernels.prefill_attention.causal_attention`, which streams over blocks and cannot be
differentiated; its gradient is written out here, as in FlashAttention-2 (Dao 2023, algorithm 2).
With the log-sum-exp of every row kept from the forward pass, the probabilities of one block of
queries and one block of keys are made again,

    P = exp(scale Q K^T - lse)    D = rowsum(dO * O)    dS = P * (dO V^T - D)
    dV += P^T dO                  dQ += scale dS K      dK += scale dS^T Q

and forgotten. Blocks above the diagonal are not visited. Temporaries: four blocks of scores, and
dK and dV in float32; 10 L^2 N H operations (half of it, causal), 5/2 of the forward pass.

Where a text lies over several devices (mesh axis `seq`), each has a run of its queries and,
gathered for the layer, all of its keys; `ahead` is how many tokens stand before the run. The
forward pass merges the run's own attention with that to the keys before it; the gradient is the one
above, on GPUs too. The last device of a text has the most to do, twice the average.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import dispatch
from pallas_kernels.common import group_heads, ungroup_heads
from pallas_kernels.lse import merge
from pallas_kernels.prefill_attention import cache_attention, gpu
from pallas_kernels.prefill_attention import causal_attention as streamed

__all__ = ["causal_attention"]

# Queries and keys of a block: its scores take 1 MB for each row and head.
BLOCK = 512


def causal_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    *,
    scale: float,
    block: int = BLOCK,
    ahead: Int[Array, ""] | None = None,
) -> Float[Array, "B T N H"]:
    """Token t attends the tokens j <= t; differentiable in q, k and v.

    Args:
      block: queries and keys of one block of the gradient, where cuDNN does not run.
      ahead: the queries' first is token `ahead` of the keys', of which there are more.
    """
    if ahead is not None:
        return _attention(q, k, v, ahead, scale, min(block, q.shape[1]))
    if dispatch.platform() == "gpu" and gpu.unsupported_causal(q) is None:
        return jax.nn.dot_product_attention(
            q, k, v, scale=scale, is_causal=True, implementation="cudnn"
        )
    return _attention(q, k, v, jnp.int32(0), scale, min(block, q.shape[1]))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _attention(q: Array, k: Array, v: Array, ahead: Array, scale: float, block: int) -> Array:
    return _forward(q, k, v, ahead, scale, block)[0]


def _forward(
    q: Array, k: Array, v: Array, ahead: Array, scale: float, block: int
) -> tuple[Array, Any]:
    if q.shape[1] == k.shape[1]:
        out, lse = streamed(q, k, v, scale=scale)
    else:
        own_k, own_v = (jax.lax.dynamic_slice_in_dim(x, ahead, q.shape[1], 1) for x in (k, v))
        k_BKSH, v_BKSH = jnp.moveaxis(k, 1, 2), jnp.moveaxis(v, 1, 2)
        ahead_B = jnp.full((q.shape[0],), ahead, jnp.int32)
        before = cache_attention(q, k_BKSH, v_BKSH, ahead_B, scale=scale)
        out, lse = merge([streamed(q, own_k, own_v, scale=scale), before])
    return out, (q, k, v, ahead, out, lse)


def _backward(
    scale: float, block: int, kept: tuple[Any, ...], dout: Array
) -> tuple[Array | None, ...]:
    q, k, v, ahead, out, lse = kept
    length, keys_length, kv_heads = q.shape[1], k.shape[1], k.shape[2]
    delta = jnp.sum(dout.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    # Rows that fill the last block up have dout 0: they add nothing to any gradient.
    q, dout, lse, delta, k, v = (_fill(x, block) for x in (q, dout, lse, delta, k, v))
    queries = tuple(group_heads(x, kv_heads) for x in (q, dout))
    rows = tuple(group_heads(x[..., None], kv_heads)[..., 0] for x in (lse, delta))
    keys = (jnp.moveaxis(k, 1, 2), jnp.moveaxis(v, 1, 2))
    zeros = jnp.zeros(keys[0].shape, jnp.float32)
    blocks = k.shape[1] // block
    # Of keys, that the first block of queries sees; each next one sees one more.
    seen = (ahead + 2 * block - 1) // block

    def of_queries(sums: tuple[Array, Array], i: Array) -> tuple[tuple[Array, Array], Array]:
        here = tuple(_block(x, i, block, 3) for x in (*queries, *rows))

        def of_keys(j: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            dq, dk, dv = carry
            pair = tuple(_block(x, j, block, 2) for x in keys)
            parts = _block_gradient(here, pair, ahead + (i - j) * block, scale)
            return dq + parts[0], _add(dk, parts[1], j), _add(dv, parts[2], j)

        dq = jnp.zeros(here[0].shape, jnp.float32)
        stop = jnp.minimum(i + seen, blocks)
        dq, dk, dv = jax.lax.fori_loop(0, stop, of_keys, (dq, *sums))
        return (dk, dv), dq.astype(q.dtype)

    numbers = jnp.arange(q.shape[1] // block)
    (dk, dv), dq = jax.lax.scan(of_queries, (zeros, zeros), numbers)
    dq = jnp.moveaxis(dq, 0, 3).reshape(queries[0].shape)  # [B, K, G, blocks, block, H]
    dq = ungroup_heads(dq)[:, :length]
    dk, dv = (jnp.moveaxis(x, 2, 1)[:, :keys_length].astype(q.dtype) for x in (dk, dv))
    return dq, dk, dv, None


_attention.defvjp(_forward, _backward)


def _block_gradient(
    queries: tuple[Array, ...], keys: tuple[Array, ...], ahead: Array, scale: float
) -> tuple[Array, Array, Array]:
    """What one block of queries and one of keys add to dq, dk and dv, in float32.

    `ahead` is how many tokens the first query stands behind the first key.
    """
    q, dout, lse, delta = queries
    k, v = keys
    f32 = {"preferred_element_type": jnp.float32}
    block_T = jnp.arange(k.shape[2])
    seen_TC = block_T[:, None] + ahead >= block_T
    scores = scale * jnp.einsum("BKGTH,BKCH->BKGTC", q, k, **f32)
    p = jnp.where(seen_TC, jnp.exp(scores - lse[..., None]), 0.0)
    dp = jnp.einsum("BKGTH,BKCH->BKGTC", dout, v, **f32)
    ds = (scale * p * (dp - delta[..., None])).astype(q.dtype)
    return (
        jnp.einsum("BKGTC,BKCH->BKGTH", ds, k, **f32),
        jnp.einsum("BKGTC,BKGTH->BKCH", ds, q, **f32),
        jnp.einsum("BKGTC,BKGTH->BKCH", p.astype(v.dtype), dout, **f32),
    )


def _add(x: Float[Array, "B K T H"], part: Float[Array, "B K C H"], number: Array) -> Array:
    """`x` with `part` added to its block of that number."""
    block = part.shape[2]
    total = _block(x, number, block, 2) + part
    return jax.lax.dynamic_update_slice_in_dim(x, total, number * block, axis=2)


def _fill(x: Array, block: int) -> Array:
    """`[B, T, ...]` with zeros up to a whole number of blocks."""
    more = -x.shape[1] % block
    return jnp.pad(x, ((0, 0), (0, more), *((0, 0),) * (x.ndim - 2)))


def _block(x: Array, number: Array, block: int, axis: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, number * block, block, axis)
