"""The largest difference between two scores that a ranking takes for a tie.

A key before rotary embedding does not depend on its position. In the first layer it depends on its
token alone, so equal tokens have equal keys. Their computed keys differ by rounding: a matmul adds
in another order for another chunk length, batch or shard. If the higher of two such scores came
first, rounding would decide what a query attends to. Therefore methods that rank keys before rotary
embedding take scores this close for equal, and the lower slot comes first.

The tolerance is relative to the usual score of unrelated vectors, |q| |k| / sqrt(H), because the
rounding errors of a key's H numbers are independent. There are two kinds of errors:

- The key's float32 sums. On a CPU, scores of equal tokens differed by up to 2^-18.6 of a usual
  score for models of 2048 dimensions, and by 2^-17.4 where two numbers of the key dominate.
- Storing the key in 16 bits. A sum near the middle of two numbers is rounded to either of them.
  Where this happens to one of H numbers, the score changes by up to eps / sqrt(H).

The tolerance is several times larger. The 4 best of 100,000 random scores are that close by chance
for one of 100 queries in float32 and one of 7 in bfloat16; they tie, too.

Rounding still decides in two cases: an unrelated score differs by just the tolerance, or scores
form a chain (see `pallas_kernels.topk_scores.merge`). The 4 best of 100,000 random scores form one
for less than one of 1,000 queries in float32 and one of 100 in bfloat16.
"""

import jax.numpy as jnp

__all__ = ["tolerance"]


def tolerance(dtype: jnp.dtype) -> float:
    """The largest difference that is a tie, for keys of that dtype, in usual scores."""
    return max(2.0**-12, float(jnp.finfo(dtype).eps) / 2)
