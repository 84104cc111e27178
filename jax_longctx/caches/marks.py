"""Marks in place of values: what a method's attention reads of which part of the text.

Attention is linear in the values. Where the value of each token of the text is a mark, a unit
vector that stands for the token's part of the text, the output of a query is the weight that it
gives to each part: by the method's own keys, positions and selection, whatever these are.

A cache that knows which token of the text lies in which slot defines `marked`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Int

from jax_longctx.contract import LayerContext
from pallas_kernels.plane import part_of

# Marks for values [B, K, S, H], in their form, of slots that hold these tokens of the text.
Mark = Callable[[Any, Int[Array, "#B #K S"]], Any]


def with_marks(cache: Any, mark: Mark, ctx: LayerContext) -> Any:
    """A layer's cache with marks in place of its values; None where it names no tokens."""
    found = []

    def marked(node: Any) -> Any:
        if hasattr(node, "marked"):
            found.append(node)
            return node.marked(mark, ctx)
        parts = {x.name: getattr(node, x.name) for x in dataclasses.fields(node)}
        parts = {name: marked(x) for name, x in parts.items() if dataclasses.is_dataclass(x)}
        return dataclasses.replace(node, **parts)

    made = marked(part_of(cache))
    return made if found else None
