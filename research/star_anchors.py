"""Star Attention with the anchors of section 4.2 (Table 3), which differ from block to block.

An anchor is read before every block. Its content is `constant`, `random`, `shuffled`, or the block
before's (`previous`). Its positions are `previous` (the block before's) or `random` (drawn below
the block, ascending).
"""

import random
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jax_longctx.contract import method
from jax_longctx.methods.star import Star
from jax_longctx.models.config import ModelConfig


@method(source="Acharya et al. 2024, section 4.2")
class StarAnchors(Star):
    """Star Attention with anchors of other content or at other positions.

    Attributes:
      content, positions: of the anchor; `first` is Star Attention.
      constant: the token of content=constant.
      seed: of the random and shuffled anchors.
    """

    content: Literal["first", "previous", "constant", "random", "shuffled"] = "first"
    positions: Literal["first", "previous", "random"] = "first"
    constant: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.anchor_kv == "broadcast" and not self.one_anchor:
            raise self.refused(
                "anchor_kv=broadcast sends the first block's own keys; with other content or "
                "positions set anchor_kv=recompute"
            )

    @property
    def one_anchor(self) -> bool:
        """Whether all blocks share one anchor."""
        return self.content == "first" and self.positions == "first"

    def validate(self, config: ModelConfig) -> None:
        super().validate(config)
        if self.content == "constant" and not 0 <= self.constant < config.vocab_size:
            raise self.refused(
                f"constant is a token from 0 to {config.vocab_size - 1}, got {self.constant}"
            )

    def anchor_tokens(self, row: Sequence[int], start: int, vocab_size: int) -> list[int]:
        size, draw = self.anchor_size, random.Random(f"{self.seed}/{start}")
        if self.content == "constant":
            return [self.constant] * size
        if self.content == "random":
            return [draw.randrange(vocab_size) for _ in range(size)]
        if self.content == "previous":
            return list(row[start - self.block : start - self.block + size])
        first = super().anchor_tokens(row, start, vocab_size)
        if self.content == "shuffled":
            draw.shuffle(first)
        return first

    def anchor_positions(
        self, index: Int[Array, "B T"], block: Int[Array, " B"], longest: int
    ) -> Int[Array, "B T"]:
        if self.positions == "first":
            return index
        if self.positions == "previous":
            return (block[:, None] - 1) * self.block + index

        # Ascending, no position twice, below the block: the same draw in every layer.
        def draw(block: Array) -> Array:
            key = jax.random.fold_in(jax.random.key(self.seed), block)
            weight_S = jax.random.uniform(key, (longest,))
            below_S = jnp.where(jnp.arange(longest) < block * self.block, weight_S, -1.0)
            return jnp.sort(jax.lax.top_k(below_S, self.anchor_size)[1])

        drawn_BA = jax.vmap(draw)(block)
        return jnp.take_along_axis(drawn_BA, jnp.minimum(index, self.anchor_size - 1), axis=1)
