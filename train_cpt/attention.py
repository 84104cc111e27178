"""The attention that continued pretraining runs: causal, or RefreshKV's pattern at the end.

Xu et al. 2025, "RefreshKV", section 6, train a model for decoding over a partial cache, with texts
of L + S tokens in which

1. the first L tokens attend all tokens before them;
2. the last S attend the K tokens that the L-th token's attention selects (for each layer and kv
   head on its own), and the tokens before them among the last S,

as in decoding after a prompt of L tokens without a full step. Inference selects with the same
functions. No gradient flows through the selection, only through the selected keys and values. With
S = 0 all attention is causal: the control.

The first L rows are flash attention with gradients (`causal_attention`), in memory linear in the
sequence; the S rows have S (K + S) scores a head. No array has L x L or S x L elements.

With a text sharded over mesh axis `seq`, each device has the queries, keys and values of a run of
its tokens. Keys and values are gathered for the layer and its gradient, and so are the last S + 1
queries. No device holds all queries, hidden states or logits.
"""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from jax_longctx.contract import LayerContext
from jax_longctx.errors import ConfigError
from jax_longctx.models.config import ModelConfig
from jax_longctx.models.llama import Attend
from jax_longctx.models.params import check_mesh
from jax_longctx.parts.partial import pooled_scores
from jax_longctx.settings import at_least
from jax_longctx.sharding import logical_spec, on_devices
from pallas_kernels import dispatch
from pallas_kernels.common import MASKED, group_heads, merge, ungroup_heads
from pallas_kernels.decode_attention import decode_logits
from pallas_kernels.prefill_attention import cache_attention, gpu
from pallas_kernels.prefill_attention import causal_attention as streamed
from pallas_kernels.select_large_k import select_large_k

# Queries and keys of a block of the gradient: its scores take 1 MB for each row and head.
BLOCK = 512


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pattern:
    """What the last tokens of a text attend.

    Attributes:
      tail: S, the tokens that attend sparsely; 0 is causal attention throughout.
      budget: K, tokens of the first part that each kv head selects for them.
      kernel, over_group, force_self: how they are selected, as in `RefreshKV`.
    """

    tail: int = 0
    budget: int = 2048
    kernel: int = 7
    over_group: Literal["max", "mean", "first"] = "max"
    force_self: bool = True

    def __post_init__(self) -> None:
        at_least(0, self, "tail", within="pattern: ")
        at_least(1, self, "budget", within="pattern: ")
        if self.over_group not in ("max", "mean", "first"):
            raise ConfigError(
                f"pattern: over_group must be max, mean or first, got {self.over_group!r}"
            )
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ConfigError(f"pattern: kernel must be odd and at least 1, got {self.kernel}")


def check_attention(config: ModelConfig, mesh: Mesh, pattern: Pattern, length: int) -> None:
    """Raises ConfigError where the model, mesh and pattern do not fit texts of `length` tokens."""
    check_mesh(config, mesh)
    windows = [window for window in config.windows if window is not None]
    if windows:
        raise ConfigError(
            f"training: this model has layers with a sliding window of {min(windows)} tokens, "
            "which training does not support; choose another model"
        )
    if config.unrotated:
        raise ConfigError("training: layers without rotary embedding are not implemented")
    if config.experts is not None:
        raise ConfigError(
            f"training does not take models with experts (family {config.family!r}); train one "
            f"whose layers have an MLP"
        )
    if config.sinks or config.attention_cap is not None:
        raise ConfigError("training: attention sinks and soft caps are not implemented")
    if (config.logits_divisor, config.logits_multiplier, config.logits_cap) != (None, None, None):
        raise ConfigError("training: scaled and capped logits are not implemented")
    if length % mesh.shape["seq"]:
        raise ConfigError(
            f"texts of {length} tokens do not divide over mesh axis seq={mesh.shape['seq']}; "
            f"choose another length or put the devices on data or tensor"
        )
    if pattern.tail >= length:
        raise ConfigError(
            f"pattern: tail={pattern.tail} leaves none of a text's {length} tokens to choose from"
        )


def attend_with(config: ModelConfig, mesh: Mesh, pattern: Pattern) -> Attend:
    """The model's `attend` under a pattern, manual over every mesh axis; no layer has a cache."""
    heads = logical_spec(("batch", "tokens", "heads", None))
    kv_heads = logical_spec(("batch", "tokens", "kv_heads", None))
    shards = mesh.shape["seq"]

    def attend(q: Array, k: Array, v: Array, cache: None) -> tuple[Array, None]:
        def local(q: Array, k: Array, v: Array) -> Array:
            batch, length = q.shape[:2]
            ctx = LayerContext(
                scale=config.softmax_scale,
                window=None,
                rope=config.rope,
                total=jnp.full((batch,), length * shards, jnp.int32),
            )
            ahead = jax.lax.axis_index("seq") * length
            at_BT = jnp.broadcast_to(ahead + jnp.arange(length), (batch, length))
            q, k = ctx.rotate_queries(q, at_BT), ctx.rotate(k, at_BT)
            own = ahead if shards > 1 else None
            return pattern_attention(pattern, q, k, v, scale=config.softmax_scale, ahead=own)

        return on_devices(mesh, local, (heads, kv_heads, kv_heads), heads)(q, k, v), cache

    return attend


def pattern_attention(
    pattern: Pattern,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    *,
    scale: float,
    ahead: Int[Array, ""] | None = None,
) -> Float[Array, "B T N H"]:
    """Attention of rotated queries and keys under the pattern.

    Args:
      ahead: tokens before this device's own, where a text is sharded over mesh axis `seq`.
    """
    own = q.shape[1]
    if ahead is None:
        prefix = own - pattern.tail
        first = causal_attention(q[:, :prefix], k[:, :prefix], v[:, :prefix], scale=scale)
    else:
        k, v = (jax.lax.all_gather(x, "seq", axis=1, tiled=True) for x in (k, v))
        prefix = k.shape[1] - pattern.tail
        # The last rows included: most devices have none of them, and all run one program.
        first = causal_attention(q, k, v, scale=scale, ahead=ahead)
    if pattern.tail == 0:
        return first
    rows = q[:, prefix - 1 :]
    if ahead is not None:
        at_T = prefix - 1 - ahead + jnp.arange(pattern.tail + 1)
        mine_T = (at_T >= 0) & (at_T < own)
        rows = jnp.take(q, jnp.clip(at_T, 0, own - 1), axis=1)
        # One device has each row; its gradient sums over the outputs of all devices.
        rows = jax.lax.psum(jnp.where(mine_T[:, None, None], rows, 0), "seq")
    k_BKTH, v_BKTH = jnp.moveaxis(k, 1, 2), jnp.moveaxis(v, 1, 2)
    chosen_BKC = _choose(pattern, rows[:, :1], k_BKTH[:, :, :prefix], scale)
    last = _tail(rows[:, 1:], k_BKTH, v_BKTH, chosen_BKC, scale)
    if ahead is None:
        return jnp.concatenate([first, last], axis=1)
    of_T = ahead + jnp.arange(own) - prefix
    taken = jnp.take(last, jnp.maximum(of_T, 0), axis=1)
    return jnp.where((of_T >= 0)[:, None, None], taken, first)


def _choose(
    pattern: Pattern, q: Float[Array, "B 1 N H"], k: Float[Array, "B K L H"], scale: float
) -> Int[Array, "B K C"]:
    """The tokens that the last query of the prefix selects, ascending."""
    q, k = jax.lax.stop_gradient((q, k))
    batch, kv_heads, prefix, _ = k.shape
    length_B = jnp.full((batch,), prefix, jnp.int32)
    p_BNL = jax.nn.softmax(decode_logits(q, k, length_B, scale=scale), axis=-1)
    p_BKGL = p_BNL.reshape(batch, kv_heads, -1, prefix)
    over = {"max": jnp.max, "mean": jnp.mean, "first": lambda p, axis: p[:, :, 0]}
    mass_BKL = over[pattern.over_group](p_BKGL, axis=2)
    own = 1 if pattern.force_self else 0
    scores_BKL = pooled_scores(mass_BKL, length_B, own, pattern.kernel, "max")
    budget = min(pattern.budget, prefix)
    return select_large_k(scores_BKL, budget, size=budget)


@jax.checkpoint
def _tail(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B K T H"],
    v: Float[Array, "B K T H"],
    chosen: Int[Array, "B K C"],
    scale: float | Array,
) -> Float[Array, "B S N H"]:
    """The last S queries over the selected tokens, and causally over the last S.

    The scores are computed again for the gradient.
    """
    queries, budget = q.shape[1], chosen.shape[2]
    own_S = jnp.arange(k.shape[2] - queries, k.shape[2])
    own_BKS = jnp.broadcast_to(own_S, (*chosen.shape[:2], queries))
    slots_BKZ1 = jnp.concatenate([chosen, own_BKS], axis=2)[..., None]
    k_BKZH = jnp.take_along_axis(k, slots_BKZ1, axis=2)
    v_BKZH = jnp.take_along_axis(v, slots_BKZ1, axis=2)
    seen_SZ = jnp.arange(budget + queries) - budget <= jnp.arange(queries)[:, None]
    scores = scale * jnp.einsum(
        "BKGSH,BKZH->BKGSZ",
        group_heads(q, k.shape[1]),
        k_BKZH,
        preferred_element_type=jnp.float32,
    )
    p = jax.nn.softmax(jnp.where(seen_SZ, scores, MASKED), axis=-1)
    out = jnp.einsum(
        "BKGSZ,BKZH->BKGSH", p.astype(v.dtype), v_BKZH, preferred_element_type=jnp.float32
    )
    return ungroup_heads(out.astype(q.dtype))


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

    On NVIDIA GPUs this is cuDNN's flash attention, forward and backward, through
    `jax.nn.dot_product_attention`. Elsewhere the forward pass is
    `pallas_kernels.prefill_attention.causal_attention`, which streams over blocks and has no
    gradient. The gradient is written out here, as in FlashAttention-2 (Dao 2023, algorithm 2). The
    forward pass stores the log-sum-exp of each row. From it, the backward pass computes the
    probabilities of one block of queries and one block of keys at a time:

        P = exp(scale Q K^T - lse)    D = rowsum(dO * O)    dS = P * (dO V^T - D)
        dV += P^T dO                  dQ += scale dS K      dK += scale dS^T Q

    Blocks above the diagonal are skipped. Temporaries: four blocks of scores, and dK and dV in
    float32. Operations: 10 L^2 N H, half of it where causal, 5/2 of the forward pass.

    With a text sharded over mesh axis `seq`, each device has a run of its queries and, gathered for
    the layer, all of its keys. The forward pass merges attention to the run's own keys with
    attention to the keys before it. The gradient is the one above, on GPUs too. The last device of
    a text does the most work, twice the average.

    Args:
      block: queries and keys of one block of the gradient, where cuDNN does not run.
      ahead: tokens before the first query, where there are more keys than queries.
    """
    cudnn = dispatch.platform() == "gpu" and gpu.unsupported_causal(q) is None
    if ahead is None and cudnn:
        return jax.nn.dot_product_attention(
            q, k, v, scale=scale, is_causal=True, implementation="cudnn"
        )
    ahead = jnp.int32(0) if ahead is None else ahead
    return _attention(q, k, v, ahead, scale, min(block, q.shape[1]))


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
    # The padding of the last block has dout 0, so it adds nothing to any gradient.
    q, dout, lse, delta, k, v = (_fill(x, block) for x in (q, dout, lse, delta, k, v))
    queries = tuple(group_heads(x, kv_heads) for x in (q, dout))
    rows = tuple(group_heads(x[..., None], kv_heads)[..., 0] for x in (lse, delta))
    keys = (jnp.moveaxis(k, 1, 2), jnp.moveaxis(v, 1, 2))
    zeros = jnp.zeros(keys[0].shape, jnp.float32)
    blocks = k.shape[1] // block
    # Blocks of keys that the first block of queries sees; each next one sees one more.
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
    """The terms of one block of queries and one of keys in dq, dk and dv, in float32.

    The first query is `ahead` tokens behind the first key.
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
    """`x` with `part` added to block `number`."""
    block = part.shape[2]
    total = _block(x, number, block, 2) + part
    return jax.lax.dynamic_update_slice_in_dim(x, total, number * block, axis=2)


def _fill(x: Array, block: int) -> Array:
    """`[B, T, ...]` padded with zeros to a whole number of blocks."""
    more = -x.shape[1] % block
    return jnp.pad(x, ((0, 0), (0, more), *((0, 0),) * (x.ndim - 2)))


def _block(x: Array, number: Array, block: int, axis: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, number * block, block, axis)
