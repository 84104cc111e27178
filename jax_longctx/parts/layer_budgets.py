"""Budgets that differ from layer to layer.

PyramidKV (Cai et al. 2024, "PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information
Funneling", section 3.2): lower layers attend widely and upper ones to few tokens. So budgets fall
in equal steps from the first layer to the last, which has the beta-th part of their mean. The mean
stays the budget; a share of the text that would pass 1 stays at it, and the last layer gets more.
All layers of the model count, also those with a sliding window, which keep that. A layer keeps no
fewer tokens than its method needs.

Of texts shorter than the first layer's budget the last layers keep no more: their memory is theirs.
The authors' code levels such budgets out. Layers of other sizes are other programs: a loop over
layers becomes one program for each of them, which compiles as many times as long.
"""

import dataclasses
from typing import Literal

from jax_longctx.parts.appending import Appending


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budgeted(Appending):
    """A method that keeps `budget` tokens.

    Attributes:
      budget: tokens that each kv head keeps, on average over the layers.
      over_layers: `uniform`, or `pyramid`: more in lower layers (PyramidKV).
      beta: a pyramid's last layer has the budget divided by it.
    """

    budget: int = 1024
    over_layers: Literal["uniform", "pyramid"] = "uniform"
    beta: float = 20.0

    def __post_init__(self) -> None:
        if self.beta < 1:
            raise self.refused(f"beta must be at least 1, got {self.beta}")

    @property
    def least(self) -> int:
        """The smallest budget of a layer."""
        return 1

    def of_layer(self, layer: int, layers: int) -> "Budgeted":
        if self.over_layers == "uniform":
            return self
        return dataclasses.replace(self, over_layers="uniform", **self.own_budget(layer, layers))

    def own_budget(self, layer: int, layers: int) -> dict[str, float]:
        """The settings that are a layer's own."""
        own = stepped(self.budget, self.budget * (2 - 1 / self.beta), layer, layers)
        return {"budget": max(round(own), self.least)}


def stepped(mean: float, most: float, layer: int, layers: int) -> float:
    """A layer's part of numbers that fall from `most` in equal steps, with that mean."""
    return most - 2 * (most - mean) * layer / max(layers - 1, 1)
