"""A mixture of experts: which ones a token goes to, and what they make of it.

A router gives each token a number for each expert. It goes through the best X of E, each a gated
MLP, and their outputs are added up by weights, a softmax over these numbers.

Only experts that some token chose are read, in one of two ways:

- Few rows, as in a decode step: each chosen expert multiplies all rows. That costs no more than to
  read it, and a row's weight of an expert that it did not choose is 0.
- More rows are put beside one another by expert, in blocks of rows of one expert. The last block of
  an expert is filled up.

Letters: R rows (tokens), X chosen experts of a token, E experts, U blocks, P = R X pairs of a row
and an expert.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jax_longctx.models.mixture import Mixture
from pallas_kernels.expert_matmul import MAX_ROWS, expert_matmul
from pallas_kernels.plane import Plane, is_plane

# Rows of a block, where an expert has so many rows on average.
BLOCKS = (MAX_ROWS, 64, 128)

# (gate, up) -> what `down` multiplies.
Gated = Callable[[Array, Array], Array]


def choose(
    mixture: Mixture, logits: Float[Array, "*B E"]
) -> tuple[Float[Array, "*B X"], Int[Array, "*B X"]]:
    """The weights of each token's experts, in float32, and the experts; of ties the first."""
    logits = logits.astype(jnp.float32)
    if mixture.normed:
        best, chosen = jax.lax.top_k(logits, mixture.chosen)
        return jax.nn.softmax(best, axis=-1), chosen
    best, chosen = jax.lax.top_k(jax.nn.softmax(logits, axis=-1), mixture.chosen)
    return best, chosen


def shares(
    mixture: Mixture, weights: Float[Array, "*B X"], chosen: Int[Array, "*B X"]
) -> Float[Array, "*B E"]:
    """The weights of all experts: 0 of those that were not chosen."""
    return jnp.sum(weights[..., None] * jax.nn.one_hot(chosen, mixture.count), axis=-2)


def clamped_swiglu(mixture: Mixture, gate: Array, up: Array) -> Array:
    """gpt-oss' gate: of clamped numbers, a sigmoid of its own slope, and 1 added to `up`."""
    assert mixture.alpha is not None and mixture.limit is not None
    gate = jnp.minimum(gate, mixture.limit)
    up = jnp.clip(up, -mixture.limit, mixture.limit)
    return gate * jax.nn.sigmoid(gate * mixture.alpha) * (up + 1)


def through_experts(
    gated: Gated,
    x: Float[Array, "R D"],
    weights: Float[Array, "R X"],
    chosen: Int[Array, "R X"],
    params: Mapping[str, Any],
) -> Float[Array, "R D"]:
    """The weighted sum of what each row's experts make of it.

    Args:
      params: `down` [E,F,D], `gate` and `up` [E,D,F] or `gate_up` [E,2,D,F], as arrays or `Plane`s;
        and `gate_bias` and `up_bias` [E,F] where there are any.
    """
    if len(x) <= MAX_ROWS:
        return _few_rows(gated, x, weights, chosen, params)
    return _by_expert(gated, x, weights, chosen, params)


def _few_rows(gated: Gated, x: Array, weights: Array, chosen: Array, params: Any) -> Array:
    experts = params["down"].shape[0]
    if len(x) == 1:
        blocks_U, used = chosen[0], jnp.int32(chosen.shape[1])
    else:
        any_E = jnp.zeros(experts, bool).at[chosen].set(True)
        blocks_U = jnp.nonzero(any_E, size=min(experts, chosen.size), fill_value=experts)[0]
        used = jnp.sum(any_E, dtype=jnp.int32)
    weights_UR = jnp.sum(jnp.where(chosen == blocks_U[:, None, None], weights, 0), axis=-1)
    out_URD = _multiplied(gated, x[None], jnp.minimum(blocks_U, experts - 1), used, params)
    # Neither a block without an expert nor a row that did not choose it need hold numbers.
    parts_URD = jnp.where(weights_UR[..., None] == 0, 0, out_URD.astype(jnp.float32))
    return jnp.einsum("URD,UR->RD", parts_URD, weights_UR).astype(x.dtype)


def _by_expert(gated: Gated, x: Array, weights: Array, chosen: Array, params: Any) -> Array:
    experts, pairs = params["down"].shape[0], chosen.size
    size = max(n for n in BLOCKS if n == BLOCKS[0] or n * experts <= pairs)
    # Whatever experts are chosen.
    most = (pairs + min(experts, pairs) * (size - 1)) // size
    expert_P = chosen.reshape(-1)
    order_P = jnp.argsort(expert_P, stable=True)
    rows_E = jnp.bincount(expert_P, length=experts)
    ends_E = jnp.cumsum(-(-rows_E // size))
    # Of a pair in order: its number within its expert, and its place in the blocks.
    sorted_P = expert_P[order_P]
    within_P = jnp.arange(pairs) - (jnp.cumsum(rows_E) - rows_E)[sorted_P]
    place_P = (ends_E - -(-rows_E // size))[sorted_P] * size + within_P
    row_of = jnp.zeros(most * size, jnp.int32).at[place_P].set(order_P // chosen.shape[1])
    blocks_U = jnp.searchsorted(ends_E, jnp.arange(most), side="right").astype(jnp.int32)
    x_UCD = x[row_of].reshape(most, size, -1)
    out_UCD = _multiplied(
        gated, x_UCD, jnp.minimum(blocks_U, experts - 1), ends_E[-1].astype(jnp.int32), params
    )
    places_RX = jnp.zeros(pairs, jnp.int32).at[order_P].set(place_P).reshape(chosen.shape)
    out_RXD = out_UCD.reshape(most * size, -1)[places_RX].astype(jnp.float32)
    return jnp.einsum("RXD,RX->RD", out_RXD, weights).astype(x.dtype)


def _multiplied(gated: Gated, x: Array, blocks: Array, used: Array, params: Any) -> Array:
    """What each block's expert makes of its rows, [U, R, D]."""
    if "gate_up" in params:
        both = jax.tree.map(_flat, params["gate_up"], is_leaf=is_plane)
        if len(x) == 1:
            pairs = (2 * blocks[:, None] + jnp.arange(2)).reshape(-1)
            both_CRF = expert_matmul(x, both, pairs, 2 * used)
            gate, up = both_CRF[::2], both_CRF[1::2]
        else:
            gate, up = (expert_matmul(x, both, 2 * blocks + i, used) for i in range(2))
    else:
        gate, up = (expert_matmul(x, params[name], blocks, used) for name in ("gate", "up"))
    if "gate_bias" in params:
        gate = gate + params["gate_bias"][blocks][:, None]
        up = up + params["up_bias"][blocks][:, None]
    return expert_matmul(gated(gate, up).astype(x.dtype), params["down"], blocks, used)


def _flat(w: Any) -> Any:
    """Gates and ups of all experts in turn, [2 E, D, F]."""
    if isinstance(w, Plane):
        return Plane(_flat(w.whole), w.layer)
    return w.reshape(*w.shape[:-4], -1, *w.shape[-2:])
