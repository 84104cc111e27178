"""The best pages of a cache for each query head, by digests of their keys."""

from pallas_kernels.page_scores import SharedPages
from pallas_kernels.select_pages.api import select_pages

__all__ = ["SharedPages", "select_pages"]
