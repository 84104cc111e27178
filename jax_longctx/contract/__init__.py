"""The contract between the engine and a method (see `jax_longctx.contract.method`)."""

from jax_longctx.contract.context import LayerContext
from jax_longctx.contract.merging import QKV, Attended
from jax_longctx.contract.method import (
    Bounded,
    CacheShape,
    Method,
    Scheduled,
    reach,
    step_variant,
)
from jax_longctx.contract.registered import REGISTERED, MethodInfo, Phase, Registered, method
from jax_longctx.contract.segments import (
    CHUNK_ROWS,
    ENDS,
    INSTRUCTION_ROWS,
    Prompt,
    Role,
    RowGroup,
    Segment,
    Stage,
    beside,
    chunk_segments,
    decode_segment,
    make_segment,
    mark_ends,
    spread_segment,
    tail_size,
)

__all__ = [
    "CHUNK_ROWS",
    "ENDS",
    "INSTRUCTION_ROWS",
    "QKV",
    "REGISTERED",
    "Attended",
    "Bounded",
    "CacheShape",
    "LayerContext",
    "Method",
    "MethodInfo",
    "Phase",
    "Prompt",
    "Registered",
    "Role",
    "RowGroup",
    "Scheduled",
    "Segment",
    "Stage",
    "beside",
    "chunk_segments",
    "decode_segment",
    "make_segment",
    "mark_ends",
    "method",
    "reach",
    "spread_segment",
    "step_variant",
    "tail_size",
]
