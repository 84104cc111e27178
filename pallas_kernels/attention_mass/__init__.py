"""The softmax mass that every key of a cache receives."""

from pallas_kernels.attention_mass.api import attention_mass
from pallas_kernels.attention_mass.reference import Reduction

__all__ = ["Reduction", "attention_mass"]
