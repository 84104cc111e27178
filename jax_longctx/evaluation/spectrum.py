"""How nearly attention logits are of rank one: RESA, section 3.2, Figs. 2 and 4.

The logits M = Q K^T / sqrt(H) of a text, T x T without the causal mask, have at most H singular
values. They are those of R_q R_k^T, an H x H matrix, with Q = U_q R_q and K = U_k R_k: no T x T
matrix is made. RESA's prior is the mean query's logits, mu_q K^T; the paper claims that it lies
along the first right singular vector.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from jax_longctx.engine import Engine
from jax_longctx.evaluation.recorder import queries_and_keys

__all__ = ["spectrum"]


def spectrum(engine: Engine, text: Sequence[int]) -> dict[str, Float[np.ndarray, "L N"]]:
    """Of every layer and query head under full attention.

    Returns:
      `first`, the largest singular value; `share`, its part of their sum; `prior`, the cosine
      (without sign) between the first right singular vector and the mean query's logits.
    """
    found: dict[str, list[list[float]]] = {"first": [], "share": [], "prior": []}
    for q_NTH, k_KTH in queries_and_keys(engine, text):
        group = len(q_NTH) // len(k_KTH)
        rows = [_head(q_TH, k_KTH[head // group]) for head, q_TH in enumerate(q_NTH)]
        for name, values in zip(found, zip(*rows, strict=True), strict=True):
            found[name].append(list(values))
    return {name: np.array(rows) for name, rows in found.items()}


def _head(q_TH: np.ndarray, k_TH: np.ndarray) -> tuple[float, float, float]:
    q_TH, k_TH = q_TH.astype(np.float64), k_TH.astype(np.float64)
    _, r_q = np.linalg.qr(q_TH)
    basis, r_k = np.linalg.qr(k_TH)
    _, values, right = np.linalg.svd(r_q @ r_k.T * q_TH.shape[1] ** -0.5)
    prior = k_TH @ q_TH.mean(0)
    cosine = abs(prior @ (basis @ right[0])) / np.linalg.norm(prior)
    return float(values[0]), float(values[0] / values.sum()), float(cosine)
