"""Choosing the next token: greedy, temperature, top-k, top-p, repetition penalty.

Order and definitions are transformers': penalty, temperature, top-k, top-p.

Draws belong to the request. Each row has a key of its own, made from the request's seed, or from
one seed and the request's place in the input (see `Sampling.seed`). A draw adds Gumbel noise to the
logits; the noise follows from the row's key, the index of the token in the answer and the token's
id, and from nothing else: not from the row's place in a batch, its neighbours, the mesh or the
block of the decode loop. The same logits give the same tokens. Logits that differ by rounding, as
those of two batch shapes do, give the same tokens but where two candidates are that close.
"""

import dataclasses
import math
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from jax_longctx.errors import InputError

__all__ = ["Sampling", "choose", "row_keys", "sampling_values"]

# Beyond it a product with a logit could leave float32's range.
MOST_PENALTY = 1e6
SEEDS = 2**64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn.

    Attributes:
      temperature: divides the logits; 0 is greedy (and ignores top_k, top_p and seed).
      top_k: only the k most likely tokens; 0 is all.
      top_p: only the smallest set of most likely tokens whose probability reaches p; 1 is all.
      repetition_penalty: divides positive and multiplies negative logits of tokens that the
        prompt or the answer already holds (Keskar et al. 2019, section 4.1); 1 is off.
      seed: of the random draws. One seed for all rows: each row draws by its place, equal prompts
        draw differently. A tuple with a seed for each row: a row draws by its own seed alone,
        wherever it stands.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int | tuple[int, ...] = 0

    def __post_init__(self) -> None:
        seeds = self.seed if isinstance(self.seed, tuple) else (self.seed,)
        least, most = 1 / MOST_PENALTY, MOST_PENALTY
        # NaN fails every comparison.
        checks = {
            "temperature": (0 <= self.temperature < math.inf, "at least 0 and finite"),
            "top_k": (self.top_k >= 0, "at least 0 (0 is off)"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "repetition_penalty": (
                least <= self.repetition_penalty <= most,
                f"from {least:g} to {most:,.0f}",
            ),
            "seed": (
                len(seeds) > 0 and all(0 <= seed < SEEDS for seed in seeds),
                "from 0 to 2^64 - 1, or a tuple with one for each row",
            ),
        }
        for name, (good, expected) in checks.items():
            if not good:
                raise InputError(f"{name} must be {expected}, got {getattr(self, name)}")

    @property
    def penalised(self) -> bool:
        return self.repetition_penalty != 1.0

    def at(self, places: Iterable[tuple[int, ...]]) -> "Sampling":
        """The same sampling for rows that stand at these places of the input.

        A place is the index of the input's row and, where it holds several, of the question:
        (row,) and (row, 0) are one place. The rows of a call stand at (0,), (1,) ... unless told.
        """
        if isinstance(self.seed, tuple):
            raise InputError("every row has a seed of its own already; give one seed or places")
        return dataclasses.replace(self, seed=tuple(_derived(self.seed, at) for at in places))

    def of_rows(self, rows: int) -> "Sampling":
        """The same sampling with a seed for each of `rows` rows.

        Raises:
          InputError: it has seeds already, and not as many.
        """
        if not isinstance(self.seed, tuple):
            return self.at((row,) for row in range(rows))
        if len(self.seed) != rows:
            raise InputError(
                f"{rows} rows need as many seeds, {len(self.seed)} given; or give one for all"
            )
        return self

    def static(self) -> tuple[bool, int, bool, bool]:
        """What decides the program: (greedy, top_k, uses top_p, uses the penalty)."""
        # A p that rounds to 1 in float32 leaves nothing out.
        return self.temperature == 0, self.top_k, bool(np.float32(self.top_p) < 1), self.penalised


def _derived(seed: int, place: tuple[int, ...]) -> int:
    """The seed of the request at `place`: 64 bits, so that equal ones need billions of requests."""
    index, question = (*place, 0)[:2]
    words = (seed % 2**32, seed >> 32, index % 2**32, index >> 32, question)
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0])


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
