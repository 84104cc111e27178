"""Chunked state eviction in plain numpy, one row at a time, every probability materialised.

A chunk and the instruction are two forward passes here, where the library makes one of both.
"""

import dataclasses

import numpy as np

from tests.oracle import forward, probabilities, rope, weighted_values


@dataclasses.dataclass
class Kept:
    """A layer's cache: keys before rotary embedding, values, token indices, accumulated mass."""

    k: np.ndarray  # [n, K, H]
    v: np.ndarray  # [n, K, H]
    token: np.ndarray  # [n, K]
    mass: np.ndarray  # [n, K]

    def best(self, scores, count):
        """The `count` best of each head's slots by `scores` [n, K], in their old order."""
        order = np.argsort(-scores, axis=0, kind="stable")[:count]
        order = np.sort(order, axis=0)

        def pick(x):
            index = order if x.ndim == 2 else order[..., None]
            return np.take_along_axis(x, index, axis=0)

        return Kept(*(pick(getattr(self, field.name)) for field in dataclasses.fields(self)))

    def joined(self, other):
        return Kept(
            *(
                np.concatenate([getattr(x, field.name) for x in (self, other)])
                for field in dataclasses.fields(self)
            )
        )


@dataclasses.dataclass
class View:
    """What one layer saw: keys and values, probabilities [N, T, n] on the cache, and
    [N, T, T] on the tokens themselves."""

    k: np.ndarray
    v: np.ndarray
    cached: np.ndarray
    own: np.ndarray

    def per_head(self, kv_heads, which):
        """Sum over rows, mean over each kv head's query heads: [n, K]."""
        summed = getattr(self, which).sum(1)
        return summed.reshape(kv_heads, len(summed) // kv_heads, -1).mean(1).T

    def kept(self, first):
        """The tokens as they join a cache; `first` is their first index in the text."""
        heads = self.k.shape[:2]
        token = np.broadcast_to(first + np.arange(heads[0])[:, None], heads)
        return Kept(self.k, self.v, token, np.zeros(heads))


def look(config, params, tokens, caches):
    """Logits of `tokens` after the caches, which stay as they are, and each layer's view."""
    views = []
    theta = config.rope.theta

    def attend(layer, q, k, v):
        cache = caches[layer]
        past, new = len(cache.k), len(q)
        at = past + np.arange(new)
        q = rope(q, at, theta)
        keys = np.concatenate([rope(cache.k, np.arange(past), theta), rope(k, at, theta)])
        p = probabilities(q, keys, np.arange(past + new)[None, :] <= at[:, None])
        views.append(View(k, v, p[..., :past], p[..., past:]))
        return weighted_values(p, np.concatenate([cache.v, v]))

    return forward(config, params, tokens, attend), views


def nothing(config):
    """Every layer's empty cache."""
    size = (0, config.num_kv_heads, config.head_dim)
    head = np.zeros(size[:2])
    return [
        Kept(np.zeros(size), np.zeros(size), head.astype(int), head)
        for _ in range(config.num_layers)
    ]


@dataclasses.dataclass(frozen=True)
class Rule:
    """What is kept: `form` is "standard", "shared", "individual" or "h2o"."""

    form: str
    kept: int
    chunk: int
    sink: int = 0

    def evicted(self, cache, view):
        if self.form == "h2o":
            return cache.best(cache.mass, self.kept)
        # The mean over all heads and rows, the same for every kv head.
        scores = view.cached.mean((0, 1))
        scores[: self.sink] = np.inf
        return cache.best(np.repeat(scores[:, None], view.k.shape[1], axis=1), self.kept)

    def accumulate(self, cache, chunk, probe):
        weight = chunk.cached.shape[1] / probe.cached.shape[1]
        cache.mass = cache.mass + weight * probe.per_head(cache.k.shape[1], "cached")

    def joined(self, cache, chunk, looks, start):
        """The cache after the chunk at `start` and what `looks` has seen of it."""
        return self.evicted(cache, looks).joined(chunk.kept(start))


def read(config, params, context, question, answer, rule):
    """(logits, caches of each thread) after each chunk, the probe, the question, each token."""
    threads = [nothing(config) for _ in range(2 if rule.form == "individual" else 1)]
    for start in range(0, len(context), rule.chunk):
        part = context[start : start + rule.chunk]
        _, probe = look(config, params, question, threads[-1])
        logits, chunk = look(config, params, part, threads[0])
        looks = {"standard": [chunk], "individual": [chunk, probe]}.get(rule.form, [probe])
        for caches, views in zip(threads, looks, strict=True):
            for layer, cache in enumerate(caches):
                if rule.form == "h2o":
                    rule.accumulate(cache, chunk[layer], probe[layer])
                caches[layer] = rule.joined(cache, chunk[layer], views[layer], start)
        yield logits, threads
    yield from _answer(config, params, question, answer, threads[-1], rule, len(context))


def _answer(config, params, question, answer, caches, rule, first):
    """The question as a probe and as a text, then the answer, which only join."""
    logits, views = look(config, params, question, caches)
    for layer, view in enumerate(views):
        if rule.form == "h2o":
            caches[layer].mass = caches[layer].mass + view.per_head(view.k.shape[1], "cached")
        caches[layer] = rule.evicted(caches[layer], view)
    yield logits, [caches]
    for tokens in [question, *([token] for token in answer)]:
        logits, views = look(config, params, tokens, caches)
        caches = [c.joined(view.kept(first)) for c, view in zip(caches, views, strict=True)]
        first += len(tokens)
        yield logits, [caches]
