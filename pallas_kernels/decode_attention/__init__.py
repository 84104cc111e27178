"""Dense attention of one or a few queries to a long cache."""

from pallas_kernels.decode_attention.api import decode_attention

__all__ = ["decode_attention"]
