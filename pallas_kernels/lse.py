"""Merge partial attentions over disjoint keys by their log-sum-exp.

A partial attention over a subset of the keys is (out, lse): the softmax-weighted mean of its
values and the natural log of its softmax's denominator, -inf where a query saw no key. Parts over
disjoint subsets merge exactly: m = max lse_i, w_i = exp(lse_i - m), out = sum w_i out_i / sum w_i,
lse = m + log sum w_i, in float32. XLA fuses it into one pass over the parts.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float


def merge(
    parts: Sequence[tuple[Float[Array, "*B H"], Float[Array, "*B"]]],
) -> tuple[Float[Array, "*B H"], Float[Array, "*B"]]:
    """The attention over all parts' keys; `out` in the first part's dtype, `lse` in float32.

    A part whose lse is -inf has no weight, whatever its out holds; where every part is empty the
    result is out 0 and lse -inf.
    """
    if not parts:
        raise ValueError("merge: no parts to merge; expected at least one (out, lse)")
    lses = [lse.astype(jnp.float32) for _, lse in parts]
    top = lses[0]
    for lse in lses[1:]:
        top = jnp.maximum(top, lse)
    empty = jnp.isneginf(top)
    base = jnp.where(empty, 0.0, top)  # -inf - -inf would be NaN
    weights = [jnp.exp(lse - base) for lse in lses]
    total = sum(weights)
    out = sum(
        # An empty part may carry garbage, and 0 x NaN is NaN.
        jnp.where(weight[..., None] > 0, weight[..., None] * part.astype(jnp.float32), 0.0)
        for weight, (part, _) in zip(weights, parts, strict=True)
    )
    total = jnp.where(empty, 1.0, total)
    out = out / total[..., None]
    return out.astype(parts[0][0].dtype), jnp.where(empty, -jnp.inf, base + jnp.log(total))


def side_by_side(
    *parts: tuple[Float[Array, "B _ N H"], Float[Array, "B _ N"]],
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """The attention of queries that follow each other, put together in their order."""
    outs, lses = zip(*parts, strict=True)
    return jnp.concatenate(outs, axis=1), jnp.concatenate(lses, axis=1)
