"""Attention of a chunk of queries to some blocks of a cache."""

from pallas_kernels.sparse_prefill_attention.api import block_masses, sparse_prefill_attention
from pallas_kernels.sparse_prefill_attention.reference import BLOCK, Blocks

__all__ = ["BLOCK", "Blocks", "block_masses", "sparse_prefill_attention"]
