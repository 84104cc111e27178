"""The k best of many scores, for k in the thousands."""

from pallas_kernels.select_large_k.api import in_one_launch, select_large_k, select_mask

__all__ = ["in_one_launch", "select_large_k", "select_mask"]
