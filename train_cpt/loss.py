"""Cross-entropy of hidden states against a large vocabulary, without the logits ever being whole.

Logits of 8K tokens over 128K words are 4 GB in float32, their gradient as much again. Here the
tokens pass in chunks: a chunk's logits, its loss, and at once its gradients with respect to the
hidden states and the output table (the loss is a scalar, so that they only need scaling later).
Logits are computed once, not again for the gradient: 6 T D V operations in all. What is kept from
the forward pass is the gradients themselves: `[T, D]`, and `[V, D]` in float32.

Each device runs this on its own tokens and its own part of the vocabulary, inside a `shard_map`
manual over every axis: the table's gradient is summed over the devices once, not once a chunk.
Softmax and sums are float32; matmuls take the hidden states' dtype.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from jax_longctx.sharding import logical_spec

__all__ = ["cross_entropy"]


def cross_entropy(
    hidden: Float[Array, "B T D"],
    table: Float[Array, "V D"],
    targets: Int[Array, "B T"],
    weights: Float[Array, "B T"],
    *,
    mesh: Mesh,
    chunk: int,
) -> Float[Array, ""]:
    """Sum over all tokens of weight times -log softmax(table . hidden)[target], in nats.

    Differentiable in `hidden` and `table`; the weights count as constants.

    Args:
      table: the output embedding in any float dtype; its gradient is summed in float32.
      chunk: tokens whose logits `[chunk, V]` each device holds at a time.
    """
    return _cross_entropy(mesh, chunk, hidden, table, targets, weights)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _cross_entropy(
    mesh: Mesh, chunk: int, hidden: Array, table: Array, targets: Array, weights: Array
) -> Array:
    return _sharded(mesh, chunk, False, hidden, table, targets, weights)[0]


def _forward(
    mesh: Mesh, chunk: int, hidden: Array, table: Array, targets: Array, weights: Array
) -> tuple[Array, Any]:
    loss, *gradients = _sharded(mesh, chunk, True, hidden, table, targets, weights)
    return loss, gradients


def _backward(mesh: Mesh, chunk: int, gradients: Any, scale: Array) -> tuple[Any, ...]:
    dhidden, dtable = gradients
    return (
        (scale * dhidden).astype(dhidden.dtype),
        (scale * dtable).astype(dtable.dtype),
        None,
        None,
    )


_cross_entropy.defvjp(_forward, _backward)


def _sharded(mesh: Mesh, chunk: int, differentiate: bool, *arrays: Array) -> tuple[Array, ...]:
    rows, vocabulary = logical_spec(("batch", "tokens")), logical_spec(("vocab", "embed"))
    hidden = logical_spec(("batch", "tokens", "embed"))
    outs = (PartitionSpec(), hidden, vocabulary) if differentiate else (PartitionSpec(),)
    run = jax.shard_map(
        functools.partial(_local, chunk, differentiate),
        mesh=mesh,
        in_specs=(hidden, vocabulary, rows, rows),
        out_specs=outs,
        check_vma=False,
    )
    return run(*arrays)


def _local(
    chunk: int,
    differentiate: bool,
    hidden: Float[Array, "B T D"],
    table: Float[Array, "V D"],
    targets: Int[Array, "B T"],
    weights: Float[Array, "B T"],
) -> tuple[Array, ...]:
    """The loss, and if asked for its gradients, of this device's tokens and words."""
    table_VD = table.astype(hidden.dtype)
    # Of this device's words, which one is the target; out of range where it is another device's.
    targets = targets - jax.lax.axis_index("tensor") * table.shape[0]
    count = targets.size
    chunk = min(chunk, count)
    pieces = tuple(
        jnp.pad(x, ((0, -count % chunk), *((0, 0),) * (x.ndim - 1))).reshape(
            -1, chunk, *x.shape[1:]
        )
        for x in (hidden.reshape(count, -1), targets.reshape(-1), weights.reshape(-1))
    )

    def step(carry: tuple[Array, ...], piece: tuple[Array, ...]) -> tuple[Any, Any]:
        loss, *sums = carry
        part, d_CV = _chunk_loss(table_VD, *piece)
        if not differentiate:
            return (loss + part,), None
        f32 = {"preferred_element_type": jnp.float32}
        d_CD = jax.lax.psum(jnp.einsum("CV,VD->CD", d_CV, table_VD, **f32), "tensor")
        dtable = sums[0] + jnp.einsum("CV,CD->VD", d_CV, piece[0], **f32)
        return (loss + part, dtable), d_CD.astype(hidden.dtype)

    zero = jnp.float32(0)
    start = (zero, jnp.zeros(table.shape, jnp.float32)) if differentiate else (zero,)
    (loss, *dtable), d = jax.lax.scan(step, start, pieces)
    loss = jax.lax.psum(loss, ("data", "seq"))
    if not differentiate:
        return (loss,)
    dhidden = d.reshape(-1, hidden.shape[2])[:count].reshape(hidden.shape)
    return loss, dhidden, jax.lax.psum(dtable[0], ("data", "seq")).astype(table.dtype)


def _chunk_loss(
    table: Float[Array, "V D"],
    hidden: Float[Array, "C D"],
    targets: Int[Array, " C"],
    weights: Float[Array, " C"],
) -> tuple[Float[Array, ""], Float[Array, "C V"]]:
    """The chunk's loss, the same on all shards of the vocabulary, and its gradient by logits."""
    logits = jnp.einsum("CD,VD->CV", hidden, table, preferred_element_type=jnp.float32)
    target = targets[:, None] == jnp.arange(table.shape[0])
    top_C = jax.lax.pmax(jnp.max(logits, axis=1), "tensor")
    # One collective for both sums.
    exp_CV = jnp.exp(logits - top_C[:, None])
    of_target = jnp.sum(jnp.where(target, logits, 0.0), axis=1)
    total_C, of_target_C = jax.lax.psum((jnp.sum(exp_CV, axis=1), of_target), "tensor")
    loss = jnp.sum(weights * (top_C + jnp.log(total_C) - of_target_C))
    gradient = weights[:, None] * (exp_CV / total_C[:, None] - target)
    return loss, gradient.astype(hidden.dtype)
