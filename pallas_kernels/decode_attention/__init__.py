"""Dense attention of one or a few queries to a long cache, whole or with its logits kept."""

from pallas_kernels.decode_attention.api import (
    attend_with_logits,
    decode_attention,
    decode_logits,
    shared_decode_attention,
    weighted_values,
)

__all__ = [
    "attend_with_logits",
    "decode_attention",
    "decode_logits",
    "shared_decode_attention",
    "weighted_values",
]
