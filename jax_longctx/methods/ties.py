"""How far rounding parts scores that would be equal: what a ranking takes for a tie.

A key before rotary embedding knows no position. In the first layer it follows from its token alone:
a text repeats its tokens, and equal tokens have equal keys. Computed keys of equal tokens differ by
rounding, for the sums of a matmul run in another order in a long chunk and in a short one, for
another batch or on a shard. If the higher of two such scores came first, rounding would decide what
a query attends to. So rankings before rotary embedding take scores that are this close for equal;
then the lower slot comes first.

The unit is the usual score of unrelated vectors, |q| |k| / sqrt(H). The errors of a key's numbers
are independent, and so add up to its size times their relative error. They are of two kinds:

- a key's sums in float32. Equal tokens' scores were up to 2^-18.6 apart on a CPU for models of 2048
  dimensions (2^-17.4 where two numbers of a key outweigh the others);
- storing the key in 16 bits. A sum near the middle between two numbers goes to either: in one of H
  numbers, that is up to eps / sqrt(H), more where that number outweighs the others.

The tolerance is many times that, and the 4 best of 100,000 random scores are as close by chance in
one of 100 queries (float32), one of 7 (bfloat16). Those are ties too, of scores that rounding in
the layers before could turn around as well.

What this does not cover: an unrelated score that is by chance a tolerance away from another one, to
within rounding, and scores that form chains (`pallas_kernels.topk_scores.merge`), may still be
ranked by rounding. They are rarer than one of 1,000 queries in float32, and than one of
100 in bfloat16.
"""

import jax.numpy as jnp

__all__ = ["tolerance"]


def tolerance(dtype: jnp.dtype) -> float:
    """The largest difference that is a tie between keys of that dtype, in usual scores."""
    return max(2.0**-12, float(jnp.finfo(dtype).eps) / 2)
