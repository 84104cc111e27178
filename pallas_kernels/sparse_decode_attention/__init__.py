"""Attention of one query to chosen pages of a cache, per kv head, query head or a flat list."""

from pallas_kernels.sparse_decode_attention.api import (
    sparse_decode_attention,
    takes_around,
    takes_shared,
)
from pallas_kernels.sparse_decode_attention.lists import Around, Pages, Shared

__all__ = ["Around", "Pages", "Shared", "sparse_decode_attention", "takes_around", "takes_shared"]
