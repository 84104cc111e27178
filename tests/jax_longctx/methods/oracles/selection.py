"""Sparse decode and RESA in numpy from their definitions, one row, one query, all keys at hand.

`settings` is any object with a selector's settings as attributes; nothing of the library is called.
"""

import itertools
import math
from fractions import Fraction
from typing import Any

import numpy as np

from tests.oracle import causal_attend, forward, rope

# Ada-KV's share of the uniform budget.
ALPHA = 0.2


def page_score(kind, digest, keys, q):
    """What a page of keys `[Z, H]` promises to `q`, unscaled."""
    if kind == "ideal":
        return float(keys[0] @ q)
    high, low = keys.max(0), keys.min(0)
    if kind == "quest":
        return float(np.maximum(q * high, q * low).sum())
    if digest == "centroid":
        return float(keys.mean(0) @ q)
    centre = (high + low) / 2
    away = np.abs(keys - centre)
    shape, extent = digest.split("-")
    if shape == "sphere":
        away = np.linalg.norm(away, axis=1, keepdims=True)
    radius = {"mean": away.mean(0), "max": away.max(0), "center": (away.min(0) + away.max(0)) / 2}[
        extent
    ]
    if shape == "sphere":
        return float(centre @ q + radius[0] * np.linalg.norm(q))
    return float(np.maximum(q * (centre + radius), q * (centre - radius)).sum())


def _span(settings, n):
    """The tokens between the fixed ones."""
    start = min(settings.sink, n)
    return start, max(start, n - settings.local)


def _top(scores, count):
    return sorted(np.argsort(-scores, kind="stable")[:count].tolist())


def _softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def selected(kind, settings, q, k, prompt):
    """Which keys each head attends, bool `[N, n]`.

    q `[N, H]` and k `[n, K, H]` after rotary embedding.
    """
    n, kv_heads, width = k.shape
    heads, page = len(q), settings.page_size
    group, scale = heads // kv_heads, width**-0.5
    start, stop = _span(settings, n)
    kept = np.zeros((heads, n), bool)
    kept[:, :start] = kept[:, stop:] = True
    pages = [p for p in range(math.ceil(n / page)) if p * page < stop and (p + 1) * page > start]
    if not pages or start == stop:
        return kept
    tokens = [np.arange(max(p * page, start), min((p + 1) * page, stop)) for p in pages]
    digest = getattr(settings, "digest", "")

    def keys(page_id, head):
        return k[page_id * page : (page_id + 1) * page, head // group]

    scores = np.array(
        [[page_score(kind, digest, keys(p, h), q[h]) for p in pages] for h in range(heads)]
    )
    sizes = np.log([len(t) for t in tokens])
    chosen = _lists(kind, settings, scores, sizes, scale, kv_heads, _count(settings, prompt))
    for h in range(heads):
        picks = chosen[h]
        if settings.allocation.startswith("psa"):
            a = scale * (k[:, h // group] @ q[h])
            guess = np.exp(scale * scores[h] + sizes)
            picks = _psa(settings, picks, scores[h], tokens, kept[h], np.exp(a), guess)
        for p in picks:
            kept[h, tokens[p]] = True
    return kept


def _lists(kind, settings, scores, sizes, scale, kv_heads, count):
    """Each query head's pages, of scores `[N, P]` of pages with log sizes `[P]`."""
    heads = len(scores)
    group = heads // kv_heads

    def by_kv(x):
        return x.reshape(kv_heads, group, -1).mean(1)

    mass = _softmax(scale * scores + sizes)
    pooled = scores if kind == "arkvale" else mass
    if settings.allocation.startswith("ada"):
        shared = by_kv(pooled)
        if kind == "arkvale":
            shared = _softmax(scale * shared + sizes)
        return [pages for pages in _ada(settings, shared, count) for _ in range(group)]
    if settings.granularity == "query_head":
        return [_top(row, count) for row in scores]
    if settings.granularity == "kv_head":
        return [_top(row, count) for row in by_kv(pooled) for _ in range(group)]
    return [_top(pooled.mean(0), count)] * heads


def _count(settings, prompt):
    budget = settings.budget
    if settings.ratio is not None:
        budget = math.floor(Fraction(str(settings.ratio)) * prompt)
    return max(budget // settings.page_size, 1)


def _ada(settings, mass, count):
    heads, pages = mass.shape
    count = min(count, pages)
    safe = math.floor(Fraction(str(ALPHA)) * count)
    entries = sorted(itertools.product(range(heads), range(pages)), key=lambda e: -mass[e])
    if settings.allocation == "ada-blend":
        free = [sum(h == head for h, _ in entries[: heads * count]) for head in range(heads)]
        counts = [round(f * (1 - ALPHA)) + safe for f in free]
        return [_top(mass[h], counts[h]) for h in range(heads)]
    kept = {(h, p) for h in range(heads) for p in _top(mass[h], safe)}
    for entry in entries:
        if len(kept) < heads * count:
            kept.add(entry)
    return [sorted(p for h, p in kept if h == head) for head in range(heads)]


def _psa(settings, picks, scores, tokens, forced, weight, guess):
    """Pages from the best on until enough."""
    order = sorted(picks, key=lambda p: (-scores[p], p))
    for t in range(1, len(order) + 1):
        inside = forced.copy()
        for p in order[:t]:
            inside[tokens[p]] = True
        mine = weight[inside].sum()
        if settings.allocation == "psa-oracle":
            enough = mine / weight.sum() >= settings.epsilon
        else:
            rest = sum(guess[p] for p in range(len(tokens)) if p not in order[:t])
            enough = mine / (mine + rest) >= settings.epsilon
        if enough:
            return order[:t]
    return order


def softmax_output(q, k, v, kept):
    """`[N, H]`: exact attention of each head to its kept keys."""
    return resa_output(q, k, v, kept, -np.inf, np.zeros(len(q)), 1.0)


def resa_output(q, k, v, kept, p0, bias, lam):
    """`[N, H]`: exact logits where kept, p0 + bias (and lam as a factor of weight) elsewhere."""
    group = len(q) // k.shape[1]
    logits = np.einsum("nh,snh->ns", q, np.repeat(k, group, 1)) * q.shape[1] ** -0.5
    logits = np.where(kept, logits, p0 + bias[:, None])
    weights = np.exp(logits - logits.max(1, keepdims=True))
    factor = np.where(kept, 1.0, lam)
    total = (weights * factor).sum(1, keepdims=True)
    return np.einsum("ns,snh->nh", weights * factor / total, np.repeat(v, group, 1))


def prior_of(q, k, mean_q):
    """RESA's (p0, bias) of a step."""
    group = len(q) // k.shape[1]
    p0 = np.einsum("nh,snh->ns", mean_q, np.repeat(k, group, 1)) * q.shape[1] ** -0.5
    bias = ((q - mean_q) * np.repeat(k.mean(0), group, 0)).sum(1) * q.shape[1] ** -0.5
    return p0, bias


def decode_logits(kind, method, config, params, prompt, answer):
    """Logits `[1 + steps, V]` after the prompt and each answer token, kept tokens `[L, N]` in all.

    `method` also has RESA's settings where it is RESA.
    """
    theta, layers = config.rope.theta, config.num_layers
    keys: list[Any] = [None] * layers
    means: list[Any] = [None] * layers
    kept = np.zeros((layers, config.num_heads), int)
    residual = hasattr(method, "lam")
    settings = method.base if residual else method

    def read(layer, q, k, v):
        at = np.arange(len(q))
        rotated = rope(k, at, theta)
        keys[layer] = [rotated, v]
        asked = rope(q, at, theta)
        means[layer] = np.mean(asked, axis=0)
        return causal_attend(theta)(layer, q, k, v)

    def step(layer, q, k, v):
        n = len(keys[layer][0])
        at = np.array([n])
        keys[layer] = [
            np.concatenate([old, new])
            for old, new in zip(keys[layer], (rope(k, at, theta), v), strict=True)
        ]
        q, (k, v) = rope(q, at, theta)[0], keys[layer]
        prior = prior_of(q, k, means[layer]) if residual else None
        chosen = selected(kind, settings, q, k, len(prompt))
        kept[layer] += chosen.sum(1)
        if prior is None:
            return softmax_output(q, k, v, chosen)[None]
        return resa_output(q, k, v, chosen, *prior, method.lam)[None]

    rows = [forward(config, params, prompt, read)[-1]]
    rows += [forward(config, params, [token], step)[-1] for token in answer]
    return np.array(rows), kept
