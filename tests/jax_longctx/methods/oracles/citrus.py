"""Chunked state eviction in plain numpy, one row at a time, every probability materialised.

A chunk and the instruction are two forward passes here, where the library makes one of both.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.oracle import forward, probabilities, rope, weighted_values

__all__ = ["Kept", "View", "look", "nothing", "read"]


@dataclasses.dataclass
class Kept:
    """A layer's cache: keys before rotary embedding, values, token indices, accumulated mass."""

    k: np.ndarray  # [n, K, H]
    v: np.ndarray  # [n, K, H]
    token: np.ndarray  # [n, K]
    mass: np.ndarray  # [n, K]

    def best(self, scores: np.ndarray, count: int) -> "Kept":
        """The `count` best of each head's slots by `scores` [n, K], in their old order."""
        order = np.argsort(-scores, axis=0, kind="stable")[:count]
        order = np.sort(order, axis=0)

        def pick(x: np.ndarray) -> np.ndarray:
            index = order if x.ndim == 2 else order[..., None]
            return np.take_along_axis(x, index, axis=0)

        return Kept(pick(self.k), pick(self.v), pick(self.token), pick(self.mass))

    def joined(self, other: "Kept") -> "Kept":
        return Kept(
            *(
                np.concatenate([getattr(x, field.name) for x in (self, other)])
                for field in dataclasses.fields(self)
            )
        )


@dataclasses.dataclass
class View:
    """What one layer saw: keys and values, probabilities and logits [N, T, n] on the cache, and
    probabilities [N, T, T] on the tokens themselves."""

    k: np.ndarray
    v: np.ndarray
    cached: np.ndarray
    logits: np.ndarray
    own: np.ndarray

    def per_head(self, kv_heads: int, which: str) -> np.ndarray:
        """Sum over rows, mean over each kv head's query heads: [n, K]."""
        summed = getattr(self, which).sum(1)
        return summed.reshape(kv_heads, len(summed) // kv_heads, -1).mean(1).T

    def kept(self, first: int, mass: np.ndarray | None = None) -> Kept:
        """The tokens as they join a cache; `first` is their first index in the text."""
        heads = self.k.shape[:2]
        token = np.broadcast_to(first + np.arange(heads[0])[:, None], heads)
        return Kept(self.k, self.v, token, np.zeros(heads) if mass is None else mass)


def look(
    config: Any, params: Any, tokens: list[int], caches: list[Kept]
) -> tuple[np.ndarray, list[View]]:
    """Logits of `tokens` after the caches, which stay as they are, and each layer's view."""
    views = []
    theta = config.rope.theta

    def attend(layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        cache = caches[layer]
        past, new = len(cache.k), len(q)
        at = past + np.arange(new)
        q = rope(q, at, theta)
        keys = np.concatenate([rope(cache.k, np.arange(past), theta), rope(k, at, theta)])
        p = probabilities(q, keys, np.arange(past + new)[None, :] <= at[:, None])
        group = q.shape[1] // k.shape[1]
        logits = np.einsum("tnh,snh->nts", q, np.repeat(keys[:past], group, axis=1))
        views.append(View(k, v, p[..., :past], logits, p[..., past:]))
        return weighted_values(p, np.concatenate([cache.v, v]))

    return forward(config, params, tokens, attend), views


def nothing(config: Any) -> list[Kept]:
    """Every layer's empty cache."""
    size = (0, config.num_kv_heads, config.head_dim)
    head = np.zeros(size[:2])
    return [
        Kept(np.zeros(size), np.zeros(size), head.astype(int), head)
        for _ in range(config.num_layers)
    ]


def _layer_wise(view: View, score: str, sink: int) -> np.ndarray:
    """Mean over all heads and rows, the same for every kv head: [n, K]."""
    which = view.cached if score == "probability" else view.logits
    scores = which.mean((0, 1)) if which.shape[1] else np.zeros(which.shape[2])
    scores[:sink] = np.inf
    return np.repeat(scores[:, None], view.k.shape[1], axis=1)


def read(
    config: Any,
    params: Any,
    context: list[int],
    question: list[int],
    answer: list[int],
    *,
    form: str,
    kept: int,
    chunk: int,
    alpha: float = 1.0,
    sink: int = 0,
    score: str = "probability",
    evict_first: bool = False,
) -> Iterator[tuple[np.ndarray, list[list[Kept]]]]:
    """(logits, caches of each thread) after each chunk, the probe, the question, each token.

    `form` is "standard", "shared", "individual" or "h2o".
    """
    heads = config.num_kv_heads
    threads = [nothing(config) for _ in range(2 if form == "individual" else 1)]

    def evicted(cache: Kept, view: View) -> Kept:
        if form == "h2o":
            return cache.best(cache.mass, kept)
        return cache.best(_layer_wise(view, score, sink), kept)

    for start in range(0, len(context), chunk):
        part = context[start : start + chunk]
        if form != "standard":
            _, by_question = look(config, params, question, threads[-1])
        if evict_first:
            threads[0] = [evicted(*pair) for pair in zip(threads[0], by_question, strict=True)]
        logits, views = look(config, params, part, threads[0])
        looking = [views] if form == "standard" else [by_question]
        if form == "individual":
            looking = [views, by_question]
        if form == "h2o":
            for cache, view, other in zip(threads[0], views, by_question, strict=True):
                weight = alpha * len(part) / len(question)
                cache.mass = cache.mass + (1 - alpha) * view.per_head(heads, "cached")
                cache.mass = cache.mass + weight * other.per_head(heads, "cached")
        for caches, ranks in zip(threads, looking, strict=True):
            for layer, view in enumerate(views):
                own = (1 - alpha) * view.per_head(heads, "own")
                cache = caches[layer]
                cache = cache if evict_first else evicted(cache, ranks[layer])
                caches[layer] = cache.joined(view.kept(start, own))
        yield logits, threads
    threads = threads[-1:]
    logits, views = look(config, params, question, threads[0])
    for layer, view in enumerate(views):
        cache = threads[0][layer]
        if form == "h2o":
            cache.mass = cache.mass + view.per_head(heads, "cached")
        threads[0][layer] = evicted(cache, view)
    yield logits, threads
    first = len(context)
    for tokens in [question, *([token] for token in answer)]:
        logits, views = look(config, params, tokens, threads[0])
        for layer, view in enumerate(views):
            threads[0][layer] = threads[0][layer].joined(view.kept(first))
        first += len(tokens)
        yield logits, threads
