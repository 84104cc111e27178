"""H2O: the newest tokens, and the heavy hitters among the others.

Zhang et al. 2023, section 4 (algorithm 1). Each kv head keeps its own `budget` tokens: the newest
`recent`, and of those before them the ones that have received the most attention so far. For a
slot s and the queries i of a segment (P are probabilities of the attention just computed)

    acc[s] += mean over the kv head's query heads of sum_i P[i, s]

Tokens join with the mass that they receive in their own segment, and then the lowest `acc` leave:
in decode one token a step. Cost: attention over the budget, and one more product of queries and
keys for the sums.

Differences from the authors' code, which drops once after the whole prompt: prefill goes in
chunks, so that memory is bounded, and every query counts; sums are kept per kv head under grouped
queries and per row of a batch. As a baseline of CItruS (`protocol=citrus`, `positions=shifted`)
the chunk is the recent window: `recent` counts within the tokens before it and is 0 by default. The
question's mass is added before the eviction that it causes, and none after it: nothing leaves then.
"""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_longctx.contract import method
from jax_longctx.parts.evicting import Evicting, Look


@method(source="Zhang et al. 2023, section 4")
class H2O(Evicting):
    """The newest tokens and those that drew the most attention, per kv head.

    Attributes:
      recent: newest tokens that never leave; None is half the budget (under `citrus` none).
      over_group: how the query heads of a kv head share a score, `mean` or `max`.
      positions: `true` (the authors' eviction class) or `shifted` (their streaming class).
    """

    recent: int | None = None
    over_group: Literal["mean", "max"] = "mean"

    num_sums = 1

    def __post_init__(self) -> None:
        self.at_least(0, "recent")
        super().__post_init__()

    @property
    def window(self) -> int:
        """Newest tokens that never leave."""
        if self.recent is None:
            return self.budget // 2 if self.protocol == "own" else 0
        return self.recent

    @property
    def kept(self) -> int:
        return max(self.window, 1)

    def gained(self, seen: Look) -> Float[Array, "B K U 1"]:
        if self.over_group == "max":
            return seen.mass(over_group="max")[..., None]
        return (seen.mass() / (seen.q.shape[2] // seen.k.shape[2]))[..., None]

    def rank(self, seen: Look) -> Float[Array, "B K U"]:
        scores_BKU, valid_B11 = seen.sums[..., 0], seen.valid[:, None, None]
        # Under `citrus` the segment's tokens never compete: the window lies before them.
        end_B11 = seen.length + (valid_B11 if self.protocol == "own" else 0)
        return jnp.where(seen.order >= end_B11 - self.window, jnp.inf, scores_BKU)
