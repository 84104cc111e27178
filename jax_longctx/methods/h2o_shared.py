"""H2O with CItruS's shared cache: heavy hitters are the tokens that the instruction attends to.

Bai et al. 2024 (CItruS), section 5.2, "H2O + Shared Cache"; H2O is Zhang et al. 2023. As `h2o` in
CItruS's setting (section 4.3), each kv head ranks its own tokens by accumulated attention mass.
Tokens cached before a chunk may leave, down to `budget - chunk`, and the chunk joins. A chunk of v
tokens, with an instruction of n tokens beside it (`by_instruction`), adds to every cached token

    acc += v / n * mass of the instruction

averaged over the query heads of the kv head; v / n counts it as often as the chunk's rows. A
chunk's tokens join with nothing: no instruction has seen them yet. After the context the
instruction is its own chunk: its mass is added, it evicts once more, is read, and the answer grows
the cache. Cost: as `citrus`.

The code behind the authors' script is not published: the sum, its scale and its scope (a kv head)
are this library's reading.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_longctx.contract import method
from jax_longctx.parts.by_instruction import ByInstruction
from jax_longctx.parts.evicting import Look


@method(source="Bai et al. 2024 (CItruS), section 5.2")
class H2OShared(ByInstruction):
    """The tokens that drew the most attention from the instruction, per kv head."""

    num_sums = 1

    def gained(self, seen: Look) -> Float[Array, "B K U 1"]:
        """Mass of slots and tokens from the instruction, averaged over the group."""
        probe, group = seen.instruction, seen.q.shape[2] // seen.k.shape[2]
        if probe is None:
            return (seen.mass() / group)[..., None]
        scale_B = seen.valid / jnp.maximum(probe.valid, 1)
        mass_BKU = seen.with_tokens(probe.mass_on_cache()) * scale_B[:, None, None]
        return (mass_BKU / group)[..., None]

    def rank(self, seen: Look) -> Float[Array, "B K U"]:
        return seen.sums[..., 0]
