"""Attention of a few queries to a cache by its definition; for tests only."""

from pallas_kernels.prefill_attention.reference import cache_attention as decode_attention

__all__ = ["decode_attention"]
