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
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import dispatch
from pallas_kernels.common import group_heads, ungroup_heads
from pallas_kernels.prefill_attention import causal_attention as streamed
from pallas_kernels.prefill_attention import gpu

__all__ = ["causal_attention"]

# Queries and keys of a block: its scores take 1 MB for each row and head.
BLOCK = 512


def causal_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    *,
    scale: float,
    block: int = BLOCK,
) -> Float[Array, "B T N H"]:
    """Token t attends the tokens j <= t; differentiable in q, k and v.

    Args:
      block: queries and keys of one block of the gradient, where cuDNN does not run.
    """
    if dispatch.platform() == "gpu" and gpu.unsupported_causal(q) is None:
        return jax.nn.dot_product_attention(
            q, k, v, scale=scale, is_causal=True, implementation="cudnn"
        )
    return _attention(q, k, v, scale, min(block, q.shape[1]))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _attention(q: Array, k: Array, v: Array, scale: float, block: int) -> Array:
    return streamed(q, k, v, scale=scale)[0]


def _forward(q: Array, k: Array, v: Array, scale: float, block: int) -> tuple[Array, Any]:
    out, lse = streamed(q, k, v, scale=scale)
    return out, (q, k, v, out, lse)


def _backward(
    scale: float, block: int, kept: tuple[Array, ...], dout: Array
) -> tuple[Array, Array, Array]:
    q, k, v, out, lse = kept
    length, kv_heads = q.shape[1], k.shape[2]
    delta = jnp.sum(dout.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    # Rows that fill the last block up have dout 0: they add nothing to any gradient.
    q, dout, lse, delta, k, v = (_fill(x, block) for x in (q, dout, lse, delta, k, v))
    queries = tuple(group_heads(x, kv_heads) for x in (q, dout))
    rows = tuple(group_heads(x[..., None], kv_heads)[..., 0] for x in (lse, delta))
    keys = (jnp.moveaxis(k, 1, 2), jnp.moveaxis(v, 1, 2))
    zeros = jnp.zeros(keys[0].shape, jnp.float32)

    def of_queries(sums: tuple[Array, Array], i: Array) -> tuple[tuple[Array, Array], Array]:
        here = tuple(_block(x, i, block, 3) for x in (*queries, *rows))

        def of_keys(j: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            dq, dk, dv = carry
            pair = tuple(_block(x, j, block, 2) for x in keys)
            parts = _block_gradient(here, pair, (i - j) * block, scale)
            return dq + parts[0], _add(dk, parts[1], j), _add(dv, parts[2], j)

        dq = jnp.zeros(here[0].shape, jnp.float32)
        dq, dk, dv = jax.lax.fori_loop(0, i + 1, of_keys, (dq, *sums))
        return (dk, dv), dq.astype(q.dtype)

    numbers = jnp.arange(q.shape[1] // block)
    (dk, dv), dq = jax.lax.scan(of_queries, (zeros, zeros), numbers)
    dq = jnp.moveaxis(dq, 0, 3).reshape(queries[0].shape)  # [B, K, G, blocks, block, H]
    dq = ungroup_heads(dq)[:, :length]
    dk, dv = (jnp.moveaxis(x, 2, 1)[:, :length].astype(q.dtype) for x in (dk, dv))
    return dq, dk, dv


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
