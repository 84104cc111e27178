"""Measurements of full attention: CItruS's overlap of selections, RESA's singular values.

Do a text and an instruction attend to the same tokens (CItruS, section 3 and Fig. 3)? A context is
followed, in one forward pass each, by another piece of text or by an instruction of as many tokens.
In every layer the importance of a context token is the attention that it receives, averaged over
heads and the tokens of the follower. The intersection ratio is |A ∩ B| / k of the k most important
tokens to either follower (appendix A; the paper's text does not give k). Chance is k over the
tokens of the context.

Are attention logits nearly of rank one (RESA, section 3.2, Figs. 2 and 4)? The logits
M = Q K^T / sqrt(H) of a text, T x T without the causal mask, have at most H singular values. They
are those of the H x H matrix R_q R_k^T, with Q = U_q R_q and K = U_k R_k, so no T x T matrix is
made. RESA's prior is the mean query's logits, mu_q K^T; the paper claims that it lies along the
first right singular vector.

Both use the queries and keys that `Recorder`, full attention with its queries cached, keeps.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jax_longctx.caches import AppendCache, Rewinding, write_run
from jax_longctx.contract import QKV, CacheShape, LayerContext, Segment, WithCache
from jax_longctx.engine import Engine
from jax_longctx.engine.distributed import to_host
from jax_longctx.engine.runs import each_layer
from jax_longctx.errors import ConfigError, InputError
from jax_longctx.evaluation.agreement import top_tokens
from jax_longctx.parts.appending import Appending
from jax_longctx.run_spec import ON_DEVICES
from jax_longctx.sharding import axes_field


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Recorded(Rewinding):
    """Full attention's cache and the rotated query of every token."""

    store: AppendCache
    queries: Float[Array, "B N S H"] = axes_field("batch", "heads", "slots", None)


@dataclasses.dataclass(frozen=True)
class Recorder(Appending):
    """Full attention that keeps its queries."""

    # The host reads the arrays in the text's order.
    stripes = False

    def init_cache(self, shape: CacheShape) -> Recorded:
        size = (shape.batch, shape.num_heads, shape.slots, shape.head_dim)
        return Recorded(super().init_cache(shape), jnp.zeros(size, shape.dtype))

    def attend(self, new: QKV, cache: Any, segment: Segment, ctx: LayerContext) -> WithCache:
        q = new[0]
        positions_BT = cache.store.position[:, None] + jnp.arange(q.shape[1])
        valid_B = segment.valid_of()
        rotated = ctx.rotate_queries(q, positions_BT)
        queries: Any = write_run(cache.queries, rotated, cache.store.length, valid_B, ctx)
        part, store = super().attend(new, cache.store, segment, ctx)
        return part, Recorded(store, queries)

    def read_bytes(self, cache: Recorded, length: int) -> int:
        return super().read_bytes(cache.store, length)


def queries_and_keys(
    engine: Engine, text: Sequence[int]
) -> list[tuple[Float[np.ndarray, "N T H"], Float[np.ndarray, "K T H"]]]:
    """Every layer's rotated queries and keys of a text under full attention, float32.

    The engine gives model and mesh; its method does not matter.
    """
    recorder = engine.under(Recorder(), kv=None, **ON_DEVICES)
    context = recorder.prefill([text], reserve=0)
    found = []
    for cache in each_layer(context.usable_caches()):
        arrays = cache.queries, cache.store.k
        q, k = (to_host(x[0, :, : len(text)].astype(jnp.float32)) for x in arrays)
        found.append((q, k))
    return found


def importance(
    engine: Engine, context: Sequence[int], follower: Sequence[int]
) -> Float[np.ndarray, "L C"]:
    """Mean attention of the follower's tokens on each of the context's, in every layer.

    Raises:
      ConfigError: a model with sliding windows, sinks or soft caps, of which this knows nothing.
      InputError: one of them is empty.
    """
    config = engine.config
    if any(config.windows) or config.sinks or config.attention_cap is not None:
        raise ConfigError(f"no importance of tokens in a {config.family}: windows, sinks or caps")
    if not len(context) or not len(follower):
        raise InputError(
            f"a context of {len(context)} tokens and {len(follower)} behind it: "
            f"both need at least one"
        )
    first, rows = len(context), []
    for q_NTH, k_KTH in queries_and_keys(engine, [*context, *follower]):
        keys_NTH = np.repeat(k_KTH, len(q_NTH) // len(k_KTH), axis=0)
        logits_NQT = np.einsum("nqh,nth->nqt", q_NTH[:, first:], keys_NTH) * config.softmax_scale
        after = np.arange(keys_NTH.shape[1]) > np.arange(first, keys_NTH.shape[1])[:, None]
        logits_NQT = np.where(after, -np.inf, logits_NQT)
        weights_NQT = np.exp(logits_NQT - logits_NQT.max(-1, keepdims=True))
        weights_NQT /= weights_NQT.sum(-1, keepdims=True)
        rows.append(weights_NQT[..., :first].mean((0, 1)))
    return np.stack(rows)


def intersections(
    one: Float[np.ndarray, "L C"], other: Float[np.ndarray, "L C"], count: int
) -> Float[np.ndarray, " L"]:
    """|A ∩ B| / k in every layer, for the k = `count` most important tokens of A and of B.

    Raises:
      InputError: there are not that many tokens.
    """
    if not 1 <= count <= one.shape[-1]:
        raise InputError(
            f"the best {count} of {one.shape[-1]} tokens: ask for from 1 to {one.shape[-1]}"
        )
    return np.sum(top_tokens(one, count) & top_tokens(other, count), axis=-1) / count


def spectrum(engine: Engine, text: Sequence[int]) -> dict[str, Float[np.ndarray, "L N"]]:
    """The singular values of every layer and query head under full attention.

    Returns:
      `first`, the largest singular value; `share`, its part of their sum; `prior`, the absolute
      cosine between the first right singular vector and the mean query's logits.
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
