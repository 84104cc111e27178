"""Dense attention of a chunk of queries, to itself and to a cache."""

from pallas_kernels.prefill_attention.api import cache_attention, causal_attention

__all__ = ["cache_attention", "causal_attention"]
