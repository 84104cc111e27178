"""Blocks of rows times matrices that each block chooses."""

from pallas_kernels.expert_matmul.api import MAX_ROWS, expert_matmul

__all__ = ["MAX_ROWS", "expert_matmul"]
