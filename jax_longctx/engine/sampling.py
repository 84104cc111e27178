"""Choosing the next token: greedy, temperature, top-k, top-p, repetition penalty.

Order and definitions are transformers': penalty, temperature, top-k, top-p. Each row draws from
its own key, folded from the seed, the row and the index of the token, so that a row's draw does
not depend on how many tokens a block of the decode loop holds.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from jax_longctx.errors import InputError

__all__ = ["Sampling", "choose", "sampling_values"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn.

    Attributes:
      temperature: divides the logits; 0 is greedy (and ignores top_k, top_p and seed).
      top_k: only the k most likely tokens; 0 is all.
      top_p: only the smallest set of most likely tokens whose probability reaches p; 1 is all.
      repetition_penalty: divides positive and multiplies negative logits of tokens that the
        prompt or the answer already holds (Keskar et al. 2019, section 4.1); 1 is off.
      seed: of the random draws.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        checks = {
            "temperature": (self.temperature >= 0, "at least 0"),
            "top_k": (self.top_k >= 0, "at least 0 (0 is off)"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "repetition_penalty": (self.repetition_penalty > 0, "above 0"),
            "seed": (0 <= self.seed < 2**32, "from 0 to 2^32 - 1"),
        }
        for name, (good, expected) in checks.items():
            if not good:
                raise InputError(f"{name} must be {expected}, got {getattr(self, name)}")

    @property
    def penalised(self) -> bool:
        return self.repetition_penalty != 1.0

    def static(self) -> tuple[bool, int, bool, bool]:
        """What decides the program: (greedy, top_k, uses top_p, uses the penalty)."""
        return self.temperature == 0, self.top_k, self.top_p < 1, self.penalised


def sampling_values(sampling: Sampling) -> Float[Array, " 3"]:
    """What the program takes as numbers: temperature, top_p, repetition_penalty."""
    return jnp.array(
        [sampling.temperature, sampling.top_p, sampling.repetition_penalty], jnp.float32
    )


def choose(
    logits: Float[Array, "B V"],
    seen: Bool[Array, "B V"] | None,
    seed: UInt32[Array, ""],
    count: Int[Array, " B"],
    values: Float[Array, " 3"],
    static: tuple[bool, int, bool, bool],
) -> Int[Array, " B"]:
    """The next token of each row.

    Args:
      seen: tokens under the repetition penalty; None when it is off.
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
    logits = logits / temperature

    def draw(row: Array, row_logits: Array, index: Array) -> Array:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), row), index)
        return jax.random.categorical(key, row_logits).astype(jnp.int32)

    rows_B = jnp.arange(logits.shape[0])
    if not top_k and not uses_top_p:
        return jax.vmap(draw)(rows_B, logits, count)
    vocabulary = logits.shape[-1]
    ranked, tokens = jax.lax.top_k(logits, min(top_k, vocabulary) if top_k else vocabulary)
    if uses_top_p:
        probability = jax.nn.softmax(ranked, axis=-1)
        before = jnp.cumsum(probability, axis=-1) - probability
        ranked = jnp.where(before < top_p, ranked, -jnp.inf)
    pick_B = jax.vmap(draw)(rows_B, ranked, count)
    return jnp.take_along_axis(tokens, pick_B[:, None], axis=-1)[:, 0].astype(jnp.int32)
