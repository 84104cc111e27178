"""What reading a text costs, as `jax-longctx plan` asks of a method."""

import dataclasses
from typing import Protocol, runtime_checkable

from jax_longctx.contract.segments import Prompt

__all__ = ["Planned", "PrefillWork"]


@dataclasses.dataclass(frozen=True)
class PrefillWork:
    """Of one row, on the shard of the slots that has the most to do.

    Attributes:
      tokens: that pass through projections and MLP.
      pairs: of query and key that are attended, in a layer without a sliding window.
      received: tokens whose keys and values come from other shards, in a layer.
      collectives: how many bring them, in a layer.
      passes: segments, each of which reads all weights.
    """

    tokens: float
    pairs: float
    received: float = 0.0
    collectives: int = 0
    passes: int = 1


@runtime_checkable
class Planned(Protocol):
    """A method whose prefill is not told by its segments and by what a decode step reads."""

    def prefill_work(self, prompt: Prompt) -> PrefillWork:
        """Of the one row of a prompt at stage `context`; only its length counts."""
        ...
