"""The product of a few rows with a matrix, read once: what decoding does with every weight."""

from pallas_kernels.row_matmul.api import MAX_ROWS, MAX_SOURCE_ROWS, row_matmul, row_sums
from pallas_kernels.row_matmul.sources import Gated, Scaled, Source, Sums

__all__ = [
    "MAX_ROWS",
    "MAX_SOURCE_ROWS",
    "Gated",
    "Scaled",
    "Source",
    "Sums",
    "row_matmul",
    "row_sums",
]
