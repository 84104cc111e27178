"""The attention that continued pretraining runs: causal, or RefreshKV's pattern at the end.

Xu et al. 2025, "RefreshKV", section 6: a model is trained for decoding over a partial cache by
texts of L + S tokens in which

1. the first L tokens attend all tokens before them;
2. the last S attend the K tokens that the L-th one's attention would choose (for each layer and kv
   head on its own), and among themselves those before them,

as if they had been decoded after a prompt of L tokens without a full step. The choice is made by
the functions that inference chooses with; no gradient flows through it, but through the chosen
keys and values. With S = 0 all is causal: the control.

The first L rows are flash attention (`train_cpt.causal`); the S rows have S (K + S) scores a head.
No array has L x L or S x L elements.

Over mesh axis `seq` each device has a run of a text's tokens: their queries, keys and values of the
layer. Keys and values are gathered for the layer and its gradient, the last S + 1 queries too; no
device holds all queries, hidden states or logits.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from jax_longctx.contract import LayerContext
from jax_longctx.errors import ConfigError
from jax_longctx.models.config import ModelConfig
from jax_longctx.models.llama import Attend, check_mesh
from jax_longctx.parts.appending import refuse_windows
from jax_longctx.parts.partial import check_kernel, pooled_scores
from jax_longctx.sharding import logical_spec
from pallas_kernels.common import MASKED, group_heads, ungroup_heads
from pallas_kernels.decode_attention import decode_logits
from pallas_kernels.select_large_k import select_large_k
from train_cpt.causal import causal_attention

__all__ = ["Pattern", "attend_with", "check_attention"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pattern:
    """What the last tokens of a text attend.

    Attributes:
      tail: S, the tokens that attend sparsely; 0 is causal attention throughout.
      budget: K, tokens of the first part that each kv head keeps for them.
      kernel, over_group, force_self: how they are chosen, as in `RefreshKV`.
    """

    tail: int = 0
    budget: int = 2048
    kernel: int = 7
    over_group: Literal["max", "mean", "first"] = "max"
    force_self: bool = True

    def __post_init__(self) -> None:
        if self.tail < 0:
            raise ConfigError(f"pattern: tail must be at least 0, got {self.tail}")
        if self.budget < 1:
            raise ConfigError(f"pattern: budget must be at least 1, got {self.budget}")
        if self.over_group not in ("max", "mean", "first"):
            raise ConfigError(
                f"pattern: over_group must be max, mean or first, got {self.over_group!r}"
            )
        check_kernel("pattern", self.kernel)


def check_attention(config: ModelConfig, mesh: Mesh, pattern: Pattern, length: int) -> None:
    """Raises ConfigError unless texts of `length` tokens can be trained on like this."""
    check_mesh(config, mesh)
    refuse_windows("training", config)
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

    def attend(layer: int, q: Array, k: Array, v: Array, cache: None) -> tuple[Array, None]:
        def local(q: Array, k: Array, v: Array) -> Array:
            batch, length = q.shape[:2]
            ctx = LayerContext(
                scale=config.head_dim**-0.5,
                window=None,
                rope=config.rope,
                total=jnp.full((batch,), length * shards, jnp.int32),
            )
            ahead = jax.lax.axis_index("seq") * length
            at_BT = jnp.broadcast_to(ahead + jnp.arange(length), (batch, length))
            q, k = ctx.rotate(q, at_BT), ctx.rotate(k, at_BT)
            if shards == 1:
                return pattern_attention(pattern, q, k, v, scale=ctx.scale)
            return _sharded_attention(pattern, q, k, v, ahead, ctx.scale)

        # The replication check stays off, as in inference: kernels carry no proof of it.
        run = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(heads, kv_heads, kv_heads),
            out_specs=heads,
            check_vma=False,
        )
        return run(q, k, v), cache

    return attend


def pattern_attention(
    pattern: Pattern,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    *,
    scale: float,
) -> Float[Array, "B T N H"]:
    """Attention of rotated queries and keys under the pattern."""
    prefix = q.shape[1] - pattern.tail
    first = causal_attention(q[:, :prefix], k[:, :prefix], v[:, :prefix], scale=scale)
    if pattern.tail == 0:
        return first
    k_BKTH, v_BKTH = jnp.moveaxis(k, 1, 2), jnp.moveaxis(v, 1, 2)
    k_BKLH = k_BKTH[:, :, :prefix]
    chosen_BKC = _choose(pattern, q[:, prefix - 1 : prefix], k_BKLH, scale)
    last = _tail(q[:, prefix:], k_BKTH, v_BKTH, chosen_BKC, scale)
    return jnp.concatenate([first, last], axis=1)


def _sharded_attention(
    pattern: Pattern,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    ahead: Int[Array, ""],
    scale: float,
) -> Float[Array, "B T N H"]:
    """`pattern_attention` of a device's own tokens, of which the first is the text's `ahead`-th."""
    k, v = (jax.lax.all_gather(x, "seq", axis=1, tiled=True) for x in (k, v))
    # The last rows too: on most devices there are none, and all run one program.
    first = causal_attention(q, k, v, scale=scale, ahead=ahead)
    if pattern.tail == 0:
        return first
    prefix, own = k.shape[1] - pattern.tail, q.shape[1]
    at_T = prefix - 1 - ahead + jnp.arange(pattern.tail + 1)
    mine_T = (at_T >= 0) & (at_T < own)
    rows = jnp.take(q, jnp.clip(at_T, 0, own - 1), axis=1)
    # Each row is one device's; its gradient is what all devices' outputs give it.
    rows = jax.lax.psum(jnp.where(mine_T[:, None, None], rows, 0), "seq")
    k_BKTH, v_BKTH = jnp.moveaxis(k, 1, 2), jnp.moveaxis(v, 1, 2)
    chosen_BKC = _choose(pattern, rows[:, :1], k_BKTH[:, :, :prefix], scale)
    last = _tail(rows[:, 1:], k_BKTH, v_BKTH, chosen_BKC, scale)
    of_T = ahead + jnp.arange(own) - prefix
    taken = jnp.take(last, jnp.maximum(of_T, 0), axis=1)
    return jnp.where((of_T >= 0)[:, None, None], taken, first)


def _choose(
    pattern: Pattern, q: Float[Array, "B 1 N H"], k: Float[Array, "B K L H"], scale: float
) -> Int[Array, "B K C"]:
    """The tokens that the prefix's last query chooses (spec: `build_partial`), ascending."""
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
    """The last S queries over the chosen tokens, and causally over their own.

    The scores are made again for the gradient.
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
