"""Scores of a cache's pages against a query: Quest's bounds, ArkVale's digests."""

from pallas_kernels.page_scores.api import page_scores

__all__ = ["page_scores"]
