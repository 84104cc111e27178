"""H2O with CItruS's shared cache: heavy hitters are the tokens that the instruction attends to.

Bai et al. 2024 (CItruS), section 5.2, "H2O + Shared Cache"; H2O is Zhang et al. 2023. As `h2o` in
CItruS's setting (section 4.3), each kv head ranks its own tokens by accumulated attention mass.
Tokens cached before a chunk may leave, down to `budget - chunk`, and the chunk joins. A chunk of v
tokens, with an instruction of n tokens beside it (`by_instruction`), adds to every cached token

    acc += (1 - alpha) * mass of the chunk + alpha * v / n * mass of the instruction

each averaged over the query heads of the kv head; v / n brings both to the same scale. A chunk's
tokens join with (1 - alpha) times the mass that they get within the chunk: no instruction has seen
them yet. With `acc_kind=mean` tokens are ranked by acc over the number of rows that added to it, so
old tokens have no advantage. After the context the instruction is its own chunk: its mass is added,
it evicts once more, is read, and the answer grows the cache. Cost: as `citrus`, and one more
product for the chunk's mass when alpha < 1.

The authors' script names alpha `query_alpha`, 1 by default. The code behind it is not published:
the sum, its scale and its scope (a kv head) are this library's reading.
"""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_longctx.contract import method
from jax_longctx.parts.by_instruction import ByInstruction
from jax_longctx.parts.evicting import Look


@method(source="Bai et al. 2024 (CItruS), section 5.2")
class H2OShared(ByInstruction):
    """The tokens that drew the most attention from the instruction, per kv head.

    Attributes:
      alpha: share of the instruction in what is accumulated; with 0 it is H2O in CItruS's setting.
      acc_kind: rank by the sum, or by its mean over the rows that attended.
    """

    alpha: float = 1.0
    acc_kind: Literal["sum", "mean"] = "sum"

    def __post_init__(self) -> None:
        self.fraction("alpha")
        super().__post_init__()

    @property
    def num_sums(self) -> int:
        return 2 if self.acc_kind == "mean" else 1

    def gained(self, seen: Look) -> Float[Array, "B K U M"]:
        """Mass over the group and, for a mean, the number of rows that gave it."""
        mass_BKU = self._mass(seen) / (seen.q.shape[2] // seen.k.shape[2])
        if self.acc_kind == "sum":
            return mass_BKU[..., None]
        # The chunk's rows count among its own tokens by their weight.
        own = 1.0 if seen.instruction is None else 1 - self.alpha
        within_U = jnp.where(jnp.arange(mass_BKU.shape[2]) < seen.past_k.shape[2], 1.0, own)
        rows_BKU = jnp.broadcast_to(within_U * seen.onlookers, mass_BKU.shape)
        return jnp.stack([mass_BKU, rows_BKU], axis=-1)

    def _mass(self, seen: Look) -> Float[Array, "B K U"]:
        """Mass of slots and tokens from the chunk and the instruction, summed over the group."""
        probe = seen.instruction
        if probe is None:
            return seen.mass()
        scale_B = self.alpha * seen.valid / jnp.maximum(probe.valid, 1)
        gained_BKU = seen.with_tokens(probe.mass_on_cache()) * scale_B[:, None, None]
        if self.alpha == 1:
            return gained_BKU
        return gained_BKU + (1 - self.alpha) * seen.mass()

    def rank(self, seen: Look) -> Float[Array, "B K U"]:
        if self.acc_kind == "sum":
            return seen.sums[..., 0]
        total, rows = jnp.moveaxis(seen.sums, -1, 0)
        # Tokens that have just joined have neither rows nor mass.
        return total / jnp.where(rows > 0, rows, 1.0)
