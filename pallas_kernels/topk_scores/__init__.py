"""The best keys of every query by dot product, exact, without a T x S matrix of scores."""

from pallas_kernels.topk_scores.api import topk_scores
from pallas_kernels.topk_scores.merge import merge_topk, tied_top_k

__all__ = [
    "merge_topk",
    "tied_top_k",
    "topk_scores",
]
