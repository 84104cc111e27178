"""What the tests of methods that evict share: rows, and a comparison with numpy."""

import jax
import numpy as np

from jax_longctx.parts.evicting import AnswerCache
from tests.jax_longctx.methods.harness import oracle_params, steps
from tests.jax_longctx.methods.oracles.evictors import Evicting
from tests.support import random_rows

RESERVE = 32
# Rows that evict, that never fill a budget of 16 (not with the answer either), and an empty one.
CONTEXTS = random_rows([37, 9, 20, 0])
QUESTIONS = random_rows([3, 2, 7, 5], seed=1)
ANSWERS = random_rows([6] * 4, seed=2)
NOTHING = [[]] * 4


def kept_tokens(caches):
    return [
        [
            [
                answer_tokens(cache, head)
                if isinstance(cache, AnswerCache)
                else tuple(int(t) for t in head[:length])
                for head in row
            ]
            for row, length in zip(*_tokens(cache), strict=True)
        ]
        for cache in caches
    ]


def _tokens(cache):
    if not isinstance(cache, AnswerCache):
        return np.asarray(cache.token), np.asarray(cache.length)
    store, limit = cache.store, cache.limit
    return np.asarray(store.tokens(limit, store.capacity)), np.asarray(store.length(limit))


def answer_tokens(cache, slots):
    """The tokens in a head's slots that the next step will read beside its own."""
    kept = sorted(int(token) for token in slots if token >= 0)
    if cache.budget is not None and len(kept) > cache.budget:
        # The next token is written over it.
        del kept[cache.store.first]
    return tuple(kept)


def compare(engine, rule, contexts=CONTEXTS, questions=NOTHING, answers=()):
    """The engine's rows together against numpy's one by one, after each segment.

    Kept tokens of every layer and head, the statistics, the position, and the logits.
    """
    params = oracle_params(engine)
    oracles = [Evicting(engine.config, params, rule) for _ in contexts]
    evicted, shapes = False, {}
    for step in steps(engine, contexts, questions, answers, RESERVE):
        got = kept_tokens(step.caches)
        # A loop over decode steps carries the caches: nothing about their arrays may change.
        now = [(leaf.shape, leaf.dtype, leaf.weak_type) for leaf in jax.tree.leaves(step.caches)]
        assert now == shapes.setdefault(type(step.caches[0]), now)
        # What only joins has no statistics: nothing is ranked any more.
        looks = oracles[0].method.protocol == "own" or step.segment.role in ("context", "probe")
        for b, oracle in enumerate(oracles):
            size = int(step.valid[b])
            if size:
                tokens = [int(t) for t in np.asarray(step.segment.tokens)[b, :size]]
                expected = oracle.feed(tokens, step.segment.role)
                np.testing.assert_allclose(step.logits[b, :size], expected, atol=1e-4)
            for cache, kept, layer in zip(step.caches, got, oracle.layers, strict=True):
                assert kept[b] == [tuple(head) for head in layer.token]
                store = cache.store if isinstance(cache, AnswerCache) else cache
                assert int(store.position[b]) == oracle.position
                evicted |= len(layer.token[0]) < oracle.position
                for head in range(len(layer.sums) if looks and rule.compared else 0):
                    mine = np.asarray(cache.statistics)[b, head, : len(kept[b][head])]
                    np.testing.assert_allclose(
                        mine, layer.sums[head][:, : rule.compared], atol=1e-4
                    )
    assert evicted or not contexts
    return oracles
