"""The product of a few rows with a matrix, read once: what decoding does with every weight."""

from pallas_kernels.row_matmul.api import MAX_ROWS, row_matmul

__all__ = ["MAX_ROWS", "row_matmul"]
