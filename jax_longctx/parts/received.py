"""What tokens receive from the queries within whose window they stand, by query head.

InfLLM ranks the tokens of a unit by it (section 3.2). Two amounts, both summed over queries:

- `mass`, what the authors' code takes: attention probability, of the softmax over all that the
  query saw, from queries 0 .. window - 1 behind the token;
- `logit`, the paper's formula: dot product, from queries 1 .. window behind it. The sum over
  queries is taken first, so that each key meets one vector.

Entry i of a run stands back[b, i] tokens before the first new token; see `window`.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.attention_mass import attention_mass
from pallas_kernels.common import group_heads

__all__ = ["logit_of_chunk", "logit_of_token", "mass_of_chunk", "mass_of_token"]


def mass_of_token(
    logits: Float[Array, "B N X"],
    lse: Float[Array, "B 1 N"],
    back: Int[Array, "B X"],
    window: int,
) -> Float[Array, "B N X"]:
    """Probabilities of a lone token's logits; -inf where it is no key or the token does not count.

    The token itself is the entry with back 0.
    """
    counts = (logits > -jnp.inf) & (back < window)[:, None]
    return jnp.exp(jnp.where(counts, logits - jnp.swapaxes(lse, 1, 2), -jnp.inf))


def logit_of_token(logits: Float[Array, "B N X"], back: Int[Array, "B X"]) -> Float[Array, "B N X"]:
    """The logits themselves, but the token's own."""
    counts = (logits > -jnp.inf) & (back > 0)[:, None]
    return jnp.where(counts, logits, 0.0)


def mass_of_chunk(
    q: Float[Array, "B T N H"],
    lse: Float[Array, "B T N"],
    near: Float[Array, "B K X H"],
    back: Int[Array, "B X"],
    own: Float[Array, "B K T H"],
    valid: Int[Array, " B"],
    window: int,
    scale: float,
) -> tuple[Float[Array, "B N X"], Float[Array, "B N T"]]:
    """Of the run's tokens and of the chunk's own; entries that are no keys get anything.

    Args:
      q, near, own: rotated.
      lse: of the whole attention.
    """
    queries, size = q.shape[1], near.shape[2]
    everything = jnp.full_like(valid, size)
    # The window's edge is a causal mask in reversed order, where padding is what comes first.
    counted_BT1 = (jnp.arange(queries) < valid[:, None])[..., None]
    lse = jnp.where(counted_BT1, lse, -jnp.inf)
    edge_B = window - 1 - queries + size - back[:, 0]
    reversed_q, reversed_lse = jnp.flip(q, axis=1), jnp.flip(lse, axis=1)
    seen = _by_head(reversed_q, jnp.flip(near, axis=2), reversed_lse, everything, edge_B, scale)
    new = _by_head(q, own, lse, valid, jnp.zeros_like(valid), scale)
    return jnp.flip(seen, axis=2), new


def _by_head(
    q: Array, k: Array, lse: Array, lengths: Array, causal_start: Array, scale: float
) -> Float[Array, "B N S"]:
    """`attention_mass` of every query head alone."""
    grouped = group_heads(q, k.shape[1]), group_heads(lse[..., None], k.shape[1])
    heads_G = tuple(jnp.moveaxis(x, 2, 0) for x in grouped)  # [G, B, K, T, H], [G, B, K, T, 1]

    def one(head: tuple[Array, Array]) -> Array:
        q_BTKH, lse_BTK1 = (jnp.swapaxes(x, 1, 2) for x in head)
        how = {"scale": scale, "causal_start": causal_start}
        return attention_mass(q_BTKH, k, lse_BTK1[..., 0], lengths, **how)

    mass_BKGS = jnp.moveaxis(jax.lax.map(one, heads_G), 0, 2)
    return mass_BKGS.reshape(k.shape[0], -1, k.shape[2])


def logit_of_chunk(
    q: Float[Array, "B T N H"],
    near: Float[Array, "B K X H"],
    back: Int[Array, "B X"],
    own: Float[Array, "B K T H"],
    valid: Int[Array, " B"],
    window: int,
    scale: float,
) -> tuple[Float[Array, "B N X"], Float[Array, "B N T"]]:
    """`mass_of_chunk` for dot products."""
    queries = q.shape[1]
    counted_BT11 = (jnp.arange(queries) < valid[:, None])[..., None, None]
    sums_BTNH = jnp.cumsum(jnp.where(counted_BT11, q.astype(jnp.float32), 0.0), axis=1)
    total_B1NH = sums_BTNH[:, -1:]
    # Only the window's oldest tokens, as many as there are queries, leave it meanwhile.
    edge = min(queries, near.shape[2])
    last_BE = jnp.clip(window - back[:, :edge], 0, queries - 1)
    edge_BENH = jnp.take_along_axis(sums_BTNH, last_BE[..., None, None], axis=1)
    seen = [_dots(edge_BENH, near[:, :, :edge]), _dots(total_B1NH, near[:, :, edge:])]
    new = _dots(total_B1NH - sums_BTNH, own)
    return scale * jnp.concatenate(seen, axis=2), scale * new


def _dots(q: Float[Array, "B X N H"], k: Float[Array, "B K E H"]) -> Float[Array, "B N E"]:
    """Entry e of every head with query e, or with the only one."""
    grouped = group_heads(q, k.shape[1])  # [B, K, G, X, H]
    dots = jnp.sum(grouped * k.astype(jnp.float32)[:, :, None], axis=-1)
    return dots.reshape(k.shape[0], -1, k.shape[2])
