"""The softmax mass that every key of a cache receives from queries of known log-sum-exp."""

from pallas_kernels.attention_mass.api import attention_mass

__all__ = ["attention_mass"]
