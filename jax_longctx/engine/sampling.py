"""Choosing the next token: greedy, temperature, top-k, top-p, repetition penalty.

Order and definitions are transformers': penalty, temperature, top-k, top-p.

Draws belong to the request. Each row has a key of its own, made from the request's seed, or from
one seed and the request's place in the input (see `Sampling.seed`). A draw adds Gumbel noise to the
logits; the noise follows from the row's key, the index of the token in the answer and the token's
id, and from nothing else: not from the row's place in a batch, its neighbours, the mesh or the
block of the decode loop. The same logits give the same tokens. Logits that differ by rounding, as
those of two batch shapes do, give the same tokens but where two candidates are that close.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from jax_longctx.settings import Sampling

__all__ = ["Sampling", "choose", "row_keys", "sampling_values"]


def row_keys(sampling: Sampling, rows: int) -> UInt32[np.ndarray, " W"]:
    """Each row's key of two words, of `rows` rows; those that pad the batch get zeros."""
    assert isinstance(sampling.seed, tuple)
    keys = np.zeros((rows, 2), np.uint32)
    keys[: len(sampling.seed)] = [(seed >> 32, seed % 2**32) for seed in map(int, sampling.seed)]
    return keys.reshape(-1)


def sampling_values(sampling: Sampling) -> Float[Array, " 3"]:
    """What the program takes as numbers: temperature, top_p, repetition_penalty.

    Within float32's normal numbers: others would be infinite, or zero to processors that flush.
    """
    given = [sampling.temperature, sampling.top_p, sampling.repetition_penalty]
    limits = np.finfo(np.float32)
    return jnp.asarray(np.clip(given, limits.tiny, limits.max).astype(np.float32))


def choose(
    logits: Float[Array, "B V"],
    seen: Bool[Array, "B V"] | None,
    keys: UInt32[Array, " W"],
    count: Int[Array, " B"],
    values: Float[Array, " 3"],
    static: tuple[bool, int, bool, bool],
) -> Int[Array, " B"]:
    """The next token of each row.

    Args:
      seen: tokens under the repetition penalty; None when it is off.
      keys: from `row_keys`.
      count: tokens the row has generated so far (part of its random key).
      values, static: from `sampling_values` and `Sampling.static`.
    """
    greedy, top_k, uses_top_p, penalised = static
    temperature, top_p, penalty = values
    if penalised:
        assert seen is not None
        lowered = jnp.where(logits > 0, logits / penalty, logits * penalty)
        logits = jnp.where(seen, lowered, logits)
    if greedy:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    # From the largest: a small temperature takes the others to -inf, and none to +inf.
    logits = (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature
    vocabulary = logits.shape[-1]

    def noise(key: Array, index: Array) -> Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(key, impl="threefry2x32"), index)
        return jax.random.gumbel(key, (vocabulary,), jnp.float32)

    noise_BV = jax.vmap(noise)(keys.reshape(-1, 2), count)
    if not top_k and not uses_top_p:
        return jnp.argmax(logits + noise_BV, axis=-1).astype(jnp.int32)
    ranked, tokens = jax.lax.top_k(logits, min(top_k, vocabulary) if top_k else vocabulary)
    if uses_top_p:
        probability = jax.nn.softmax(ranked, axis=-1)
        before = jnp.cumsum(probability, axis=-1) - probability
        ranked = jnp.where(before < top_p, ranked, -jnp.inf)
    # Noise goes with the token, not with its rank, which rounding may change.
    pick_B = jnp.argmax(ranked + jnp.take_along_axis(noise_BV, tokens, axis=-1), axis=-1)
    return jnp.take_along_axis(tokens, pick_B[:, None], axis=-1)[:, 0].astype(jnp.int32)
