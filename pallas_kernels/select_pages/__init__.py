"""The best pages of a cache for each query head, by digests of their keys."""

from pallas_kernels.page_scores import Best, Digests, SharedPages
from pallas_kernels.select_pages.api import select_pages

__all__ = ["Best", "Digests", "SharedPages", "select_pages"]
