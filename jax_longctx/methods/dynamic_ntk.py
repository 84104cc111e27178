"""Dynamic NTK: full attention under a rotary base that grows with the length.

For a row of total length n > n0 (the trained length) the base is multiplied by
(f * n / n0 - (f - 1)) ** (H / (H - 2)), the formula that transformers calls `dynamic`; ReAttention
(section 4.1) uses it as a baseline with f = 4. The total is known before the row's first chunk, so
all keys are rotated with one base, and chunked prefill equals whole prefill. Implementations that
change the base in decode, over keys rotated with older ones, compute something else.
"""

import dataclasses
from typing import Any

from jax_longctx.contract import QKV, LayerContext, Segment, WithCache, method
from jax_longctx.models.config import ModelConfig
from jax_longctx.parts.appending import Appending


@method(source="NTK-aware scaling; a baseline of ReAttention, section 4.1")
class DynamicNTK(Appending):
    """Exact attention, rotary base stretched beyond the trained length.

    Attributes:
      factor: f of the formula; a larger one makes the base grow faster.
    """

    factor: float = 4.0

    phase = "both"
    own_tokens = 0

    def __post_init__(self) -> None:
        self.at_least(1, "factor")

    @property
    def cannot_read_blocks(self) -> str | None:
        return None  # it reads exactly, at other angles

    def validate(self, config: ModelConfig) -> None:
        if config.rope.kind != "default":
            raise self.refused(
                f"it would replace the checkpoint's own rope scaling {config.rope.kind!r}; "
                "use --method full with such a model"
            )

    def reach(self, config: ModelConfig, tokens: int) -> int:
        # Not for checkpoints with a rope scaling of their own, which `validate` refuses.
        return min(tokens, config.max_position) if config.rope.kind == "default" else tokens

    def attend(self, new: QKV, cache: Any, segment: Segment, ctx: LayerContext) -> WithCache:
        rope = dataclasses.replace(ctx.rope, kind="dynamic", factor=self.factor)
        return super().attend(new, cache, segment, dataclasses.replace(ctx, rope=rope))
