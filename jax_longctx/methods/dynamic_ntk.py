"""Dynamic NTK: full attention under a rotary base that grows with the length.

Extrapolates a model beyond its trained length without training. For a row of total length
n > n0 (the trained length) the rotary base becomes

    base' = base * (f * n / n0 - (f - 1)) ** (H / (H - 2))

with factor f (ReAttention, section 4.1, uses it as a baseline with f = 4; the formula is the one
transformers calls `dynamic`). Up to n0 it is full attention.

The row's total is fixed before its first chunk, so that every key of a row is rotated with one
base and chunked prefill equals whole prefill; on one forward without cache it agrees with
transformers. Implementations that let the base move while they decode over cached keys (rotated
with older bases) compute something else.
"""

import dataclasses
from typing import Any

from jax_longctx.contract import QKV, Attended, LayerContext, Registered, Segment, method
from jax_longctx.errors import ConfigError
from jax_longctx.models.config import ModelConfig
from jax_longctx.parts.appending import Appending

__all__ = ["DynamicNTK"]


@method(source="NTK-aware scaling; a baseline of ReAttention, section 4.1")
class DynamicNTK(Registered):
    """Exact attention, rotary base stretched beyond the trained length.

    `factor` is f above: how many times the trained length the formula is centred on.
    """

    factor: float = 4.0

    keeps_all = True
    append_only = True

    def __post_init__(self) -> None:
        if not self.factor >= 1.0:
            raise ConfigError(f"dynamic-ntk: factor must be at least 1, got {self.factor}")

    def validate(self, config: ModelConfig) -> None:
        if config.rope.kind != "default":
            raise ConfigError(
                f"dynamic-ntk would replace the checkpoint's own rope scaling "
                f"{config.rope.kind!r}; use --method full with such a model"
            )

    def reach(self, config: ModelConfig, tokens: int) -> int:
        # The base follows the text, but not in place of a scaling that the checkpoint has.
        return min(tokens, config.max_position) if config.rope.kind == "default" else tokens

    def attend(
        self, new: QKV, cache: Any, segment: Segment, ctx: LayerContext
    ) -> tuple[Attended, Any]:
        rope = dataclasses.replace(ctx.rope, kind="dynamic", factor=self.factor)
        return Appending().attend(new, cache, segment, ctx.replace_rope(rope))

    # Everything but the rotary embedding is full attention's.
    init_cache = Appending.init_cache
    segments = Appending.segments
    finish = Appending.finish
    fork = Appending.fork
    read_bytes = Appending.read_bytes
