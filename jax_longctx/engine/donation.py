"""Programs that update what they are given where it lies."""

import functools

import jax

__all__ = ["in_place"]

# `jax.jit` of a function that gives back every donated argument, updated, in the order they came.
#
# JAX pairs donated leaves with outputs by shape, in their order. A leaf left out as unused would
# move all that follow: one leaf is then returned in another's buffer, which XLA's GPU compiler
# overwrites before it has read it (jax-ml/jax#39625). With none left out each keeps its own.
in_place = functools.partial(jax.jit, keep_unused=True)
