"""Attention of one query to chosen pages of a cache, per kv head, query head or a flat list."""

from pallas_kernels.sparse_decode_attention.api import (
    flat_sparse_decode_attention,
    sparse_decode_attention,
)

__all__ = ["flat_sparse_decode_attention", "sparse_decode_attention"]
