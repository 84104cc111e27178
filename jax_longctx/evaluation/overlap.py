"""Whether a text and an instruction look at the same tokens: CItruS, section 3 and Fig. 3.

A first context is followed, in one forward pass each, by another piece of text or by an
instruction of as many tokens. In every layer a token of the first context is as important as the
attention that it receives, averaged over heads and the tokens of what follows. The intersection
ratio is |A ∩ B| / k of the k most important tokens to either follower (appendix A; the paper's
text does not give k). Chance is k over the tokens of the first context.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from jax_longctx.engine import Engine
from jax_longctx.errors import InputError
from jax_longctx.evaluation.agreement import top_tokens
from jax_longctx.evaluation.recorder import queries_and_keys

__all__ = ["importance", "intersections"]


def importance(
    engine: Engine, context: Sequence[int], follower: Sequence[int]
) -> Float[np.ndarray, "L C"]:
    """Mean attention of the follower's tokens on each of the context's, in every layer.

    Raises:
      InputError: one of them is empty.
    """
    if not len(context) or not len(follower):
        raise InputError(
            f"a context of {len(context)} tokens and {len(follower)} behind it: "
            f"both need at least one"
        )
    first, rows = len(context), []
    for q_NTH, k_KTH in queries_and_keys(engine, [*context, *follower]):
        keys_NTH = np.repeat(k_KTH, len(q_NTH) // len(k_KTH), axis=0)
        logits_NQT = np.einsum("nqh,nth->nqt", q_NTH[:, first:], keys_NTH) * q_NTH.shape[-1] ** -0.5
        after = np.arange(keys_NTH.shape[1]) > np.arange(first, keys_NTH.shape[1])[:, None]
        logits_NQT = np.where(after, -np.inf, logits_NQT)
        weights_NQT = np.exp(logits_NQT - logits_NQT.max(-1, keepdims=True))
        weights_NQT /= weights_NQT.sum(-1, keepdims=True)
        rows.append(weights_NQT[..., :first].mean((0, 1)))
    return np.stack(rows)


def intersections(
    one: Float[np.ndarray, "L C"], other: Float[np.ndarray, "L C"], count: int
) -> Float[np.ndarray, " L"]:
    """|A ∩ B| / k in every layer, of the k = `count` most important tokens of either.

    Raises:
      InputError: there are not that many tokens.
    """
    if not 1 <= count <= one.shape[-1]:
        raise InputError(
            f"the best {count} of {one.shape[-1]} tokens: ask for from 1 to {one.shape[-1]}"
        )
    return np.sum(top_tokens(one, count) & top_tokens(other, count), axis=-1) / count
