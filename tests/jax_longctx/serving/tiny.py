"""Limits that fit the tests' tiny model."""

from jax_longctx.serving.prompts import Lengths

LENGTHS = Lengths(whole=512, question=128, answer=64, keep_from=32, share_from=64)
