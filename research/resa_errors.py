"""How far sparse attention is from full attention, with and without RESA's estimate.

RESA, section 5.3 and Fig. 6(a). A text is prefilled by full attention, which keeps every layer's
queries, keys and values. The first part of the text is the prompt. Each of the last tokens is a
decode step, for which a selector chooses among all keys so far. The score error is the L1 distance
between full attention's distribution over the keys and the one used (2 at most); the output error
is ||o - o_full|| / ||o_full||. Both are averaged over query heads and queries.

Errors do not accumulate over layers: every layer has full attention's queries.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from jax_longctx.caches import AppendCache
from jax_longctx.contract import LayerContext
from jax_longctx.engine import Engine
from jax_longctx.engine.capacity import bucket
from jax_longctx.engine.runs import each_layer
from jax_longctx.engine.setup import Setup
from jax_longctx.errors import InputError
from jax_longctx.methods.resa import Resa
from jax_longctx.parts.selecting import SelectiveCache
from jax_longctx.parts.sparse_decode import named
from jax_longctx.run_spec import ON_DEVICES
from jax_longctx.sharding import on_devices
from pallas_kernels.common import capped, factor_of
from pallas_kernels.plane import part_of
from pallas_kernels.quantised import dequantised
from research.attention import Recorded, Recorder

LAMS = (0.0, 0.25, 0.5, 0.75, 1.0)


def attention_errors(
    engine: Engine,
    texts: Sequence[Sequence[int]],
    methods: Sequence[Resa],
    *,
    queries: int = 64,
) -> list[dict[str, Any]]:
    """Errors of each method over all layers and the last `queries` tokens of each text.

    The engine gives model and mesh (of one device). Its method does not matter, nor do the methods'
    `lam`: there is one record for each of `LAMS`.

    Returns:
      Records with the method's settings, `lam`, `score_error` and `output_error` (means), the same
      `by_layer`, `kept` (mean share of the keys that is attended) and `queries` (their number).

    Raises:
      InputError: a text is not longer than `queries`, or the mesh has several devices.
    """
    shortest = min(map(len, texts), default=0)
    if queries < 1 or shortest <= queries:
        raise InputError(
            f"each text must be longer than the last {queries} tokens that are measured (at least "
            f"1); the shortest has {shortest}"
        )
    if engine.mesh.size != 1 or any(engine.config.windows):
        raise InputError(
            "attention errors are measured on one device and without sliding windows; this mesh "
            f"has {engine.mesh.size} devices, the layers' windows are {set(engine.config.windows)}"
        )
    if any(method.allocation.startswith("psa") for method in methods):
        raise InputError("attention errors are for fixed budgets: uniform, ada-floor, ada-blend")
    recorder = engine.under(Recorder(), kv=None, **ON_DEVICES)
    slots = bucket(max(map(len, texts)) + 1)
    measures = [_measure(recorder.setup, method, queries) for method in methods]
    sums = np.zeros((len(methods), engine.config.num_layers, 2, len(LAMS)))
    kept = np.zeros((len(methods), engine.config.num_layers))
    for text in texts:
        caches = recorder.prefill([text], reserve=0, capacity=slots).usable_caches()
        for layer, cache in enumerate(each_layer(caches)):
            for index, measure in enumerate(measures):
                errors, share = measure(cache, jnp.int32(len(text) - queries))
                sums[index, layer] += np.asarray(errors)
                kept[index, layer] += float(share)
    means = sums / len(texts)
    return [
        {
            "settings": dataclasses.asdict(method) | {"lam": lam},
            "score_error": float(means[index, :, 0, i].mean()),
            "output_error": float(means[index, :, 1, i].mean()),
            "by_layer": means[index, :, :, i].tolist(),
            "kept": float(kept[index].mean() / len(texts)),
            "queries": queries * len(texts),
        }
        for index, method in enumerate(methods)
        for i, lam in enumerate(LAMS)
    ]


def _measure(setup: Setup, method: Resa, queries: int) -> Any:
    """`(one layer's cache of one text, tokens of its prompt) -> (errors [2, lams], kept share)`."""

    def body(cache: Recorded, prompt: Array) -> tuple[Array, Array]:
        ctx = setup.layer_context(setup.layer(0), cache.store.length)

        def one(step: Array) -> tuple[Array, Array]:
            return _step_errors(method, cache, prompt, prompt + step, ctx)

        errors, shares = jax.lax.map(one, jnp.arange(queries))
        return jnp.mean(errors, axis=0), jnp.mean(shares)

    everywhere = PartitionSpec()
    return jax.jit(on_devices(setup.mesh, body, everywhere, everywhere))


def _step_errors(
    method: Resa, cache: Recorded, prompt: Array, position: Array, ctx: LayerContext
) -> tuple[Float[Array, "2 E"], Float[Array, ""]]:
    """Of the query at `position`: errors by lambda, and the share of the keys that it attends."""
    length_B = position[None] + 1
    store = dataclasses.replace(cache.store, length=length_B)
    q_B1NH = jax.lax.dynamic_slice_in_dim(cache.queries, position, 1, axis=2).swapaxes(1, 2)
    kept_NS = _kept(method, q_B1NH, store, prompt[None], ctx)[0]
    group = q_B1NH.shape[2] // store.k.shape[1]
    kept = (dequantised(x)[0] for x in (store.k, store.v))
    k_NSH, v_NSH = (jnp.repeat(x, group, axis=0).astype(jnp.float32) for x in kept)
    q_NH, at_S = q_B1NH[0, 0].astype(jnp.float32), jnp.arange(k_NSH.shape[1])
    seen_S = at_S <= position
    read = (at_S < prompt)[:, None]
    mean_q_NH = jnp.sum(jnp.where(read, cache.queries[0], 0.0), axis=1) / prompt
    mean_k_NH = jnp.sum(jnp.where(seen_S[:, None], k_NSH, 0.0), axis=1) / jnp.sum(seen_S)
    scale = factor_of(ctx.scale)
    exact_NS = capped(scale * jnp.einsum("NH,NSH->NS", q_NH, k_NSH), ctx.scale)
    prior_NS = capped(scale * jnp.einsum("NH,NSH->NS", mean_q_NH, k_NSH), ctx.scale)
    bias_N = scale * jnp.sum((q_NH - mean_q_NH) * mean_k_NH, axis=-1)
    prior_NS = prior_NS + bias_N[:, None]
    logits_NS = jnp.where(seen_S, jnp.where(kept_NS, exact_NS, prior_NS), -jnp.inf)
    weights_NS = jnp.exp(logits_NS - jnp.max(logits_NS, axis=-1, keepdims=True))
    full_NS = jax.nn.softmax(jnp.where(seen_S, exact_NS, -jnp.inf), axis=-1)
    full_NH = jnp.einsum("NS,NSH->NH", full_NS, v_NSH)

    def errors(lam: Array) -> Array:
        scaled_NS = weights_NS * jnp.where(kept_NS, 1.0, lam)
        share_NS = scaled_NS / jnp.sum(scaled_NS, axis=-1, keepdims=True)
        away_NH = jnp.einsum("NS,NSH->NH", share_NS, v_NSH) - full_NH
        distance_N = jnp.sum(jnp.abs(share_NS - full_NS), axis=-1)
        relative_N = jnp.linalg.norm(away_NH, axis=-1) / jnp.linalg.norm(full_NH, axis=-1)
        return jnp.stack([jnp.mean(distance_N), jnp.mean(relative_N)])

    found = jax.vmap(errors, out_axes=1)(jnp.array(LAMS))
    return found, jnp.mean(jnp.sum(kept_NS, axis=-1) / length_B[0])


def _kept(
    method: Resa,
    q: Float[Array, "B 1 N H"],
    store: AppendCache,
    prompt: Int[Array, " B"],
    ctx: LayerContext,
) -> Bool[Array, "B N S"]:
    """Which slots the method's selector attends, the fixed ones too."""
    base, heads = method.base, q.shape[2]
    batch, kv_heads, slots, width = store.k.shape
    pages = slots // base.page_size
    paged = dequantised(part_of(store.k)).reshape(batch, kv_heads, pages, base.page_size, width)
    held_BS = jnp.arange(slots) < store.length[:, None]
    digests = base.summarise(paged, held_BS.reshape(batch, pages, base.page_size))
    nothing = jnp.zeros((batch, heads), jnp.int32)
    cache = SelectiveCache(store, digests, prompt, nothing, prompt)
    span = base.selectable(store, ctx)
    lists = base.choose(q, cache, span, ctx)
    pages_BXC = lists.pages
    if lists.heads is not None:
        own_BKE = lists.heads[:, None] == jnp.arange(kv_heads)[:, None]
        pages_BXC = jnp.where(own_BKE, pages_BXC, -1)
    chosen_BXP = named(pages_BXC, pages)
    chosen_BNP = jnp.repeat(chosen_BXP, heads // chosen_BXP.shape[1], axis=1)
    chosen_BNS = jnp.repeat(chosen_BNP, base.page_size, axis=2)
    at_S = jnp.arange(slots)
    between_BS = (at_S >= span.start[:, None]) & (at_S < span.stop[:, None])
    return held_BS[:, None] & (chosen_BNS | ~between_BS[:, None])
