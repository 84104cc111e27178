"""What the tests of InfLLM share: methods by the oracle's rules, runs of rows, comparisons."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_longctx.contract import method
from jax_longctx.engine import Engine
from jax_longctx.methods import InfLLM
from jax_longctx.studies.infllm_accounted import InfLLMAccounted
from tests.jax_longctx.methods.harness import steps
from tests.jax_longctx.methods.oracles.infllm import Rules, calls_of, follow
from tests.oracle import to_numpy
from tests.support import random_rows

__all__ = [
    "CHOSEN",
    "LAYERS",
    "Rows",
    "Watched",
    "check",
    "check_memory",
    "method_of",
    "oracle_params",
    "read",
    "texts",
    "traces",
    "whole_row",
]

# Contexts, questions and answers.
Rows = tuple[list[list[int]], list[list[int]], list[list[int]]]
# Sliding windows that hide nothing, one a layer: what a method can tell the layers by.
LAYERS = (1000, 2000)
# (layer, units) of every choice of a watched method.
CHOSEN: list[tuple[int, np.ndarray]] = []


@method(source="InfLLM", name="watched")
class Watched(InfLLMAccounted):
    """Tells which units each layer attends, and starts with garbage wherever nothing is yet."""

    def init_cache(self, shape):
        def fill(leaf):
            return jnp.full_like(leaf, 1e4) if leaf.ndim > 1 else leaf

        return jax.tree.map(fill, super().init_cache(shape))

    def choose(self, q, cache, valid, ctx):
        chosen = super().choose(q, cache, valid, ctx)
        jax.debug.callback(functools.partial(note, LAYERS.index(ctx.window)), chosen)
        return chosen


def note(layer, chosen):
    CHOSEN.append((layer, np.asarray(chosen)))


def method_of(rules: Rules, kind: type = InfLLM, **settings: Any) -> Any:
    return kind(
        n_init=rules.i0,
        n_local=rules.w,
        block_size=rules.bs,
        topk=rules.kb,
        repr_topk=rules.r,
        chunk=rules.x,
        score=rules.score,
        granularity="query_head" if rules.each_head else "layer",
        far_distance=rules.far,
        far_mask="released" if rules.released else "exact",
        **settings,
    )


def read(engine, rows, each=None):
    """Every row's logits [tokens, V], and the last caches; `each(step)` looks at each step."""
    pieces = [[] for _ in rows[0]]
    caches = ()
    for step in steps(engine, *rows):
        for piece, logits, valid in zip(pieces, step.logits, step.valid, strict=True):
            piece.append(logits[:valid])
        caches = step.caches
        if each is not None:
            each(step)
    return [np.concatenate(piece) for piece in pieces], caches


def texts(lengths, answer, seed=0):
    """Random contexts, questions and answers; `lengths` are pairs of the first two."""
    contexts = random_rows([context for context, _ in lengths], seed=seed)
    questions = random_rows([question for _, question in lengths], seed=seed + 1)
    return contexts, questions, random_rows([answer] * len(lengths), seed=seed + 2)


def whole_row(rows, b):
    return [token for part in rows for token in part[b]]


def traces(engine, rules, rows):
    """The oracle's account of each row."""
    params = oracle_params(engine)
    calls = [calls_of(rules, *map(len, parts)) for parts in zip(*rows, strict=True)]
    tokens = [whole_row(rows, b) for b in range(len(calls))]
    return [follow(rules, engine.config, params, *row) for row in zip(tokens, calls, strict=True)]


def check(engine, rules, rows):
    """Logits and memories equal the oracle's; returns its traces."""
    logits, caches = read(engine, rows)
    found = traces(engine, rules, rows)
    for b, (got, trace) in enumerate(zip(logits, found, strict=True)):
        np.testing.assert_allclose(got, np.concatenate(trace.logits), atol=1e-4)
        check_memory(rules, caches, b, trace)
    return found


def check_memory(rules, caches, row, trace):
    """Representatives, and what the tokens not packed yet have received."""
    for layer, cache in zip(trace.layers, caches, strict=True):
        units = np.asarray(cache.units)[row, :, : len(layer.units)]
        for unit, expected in enumerate(layer.units):
            np.testing.assert_allclose(units[:, unit], expected, atol=1e-5)
        left = np.arange(rules.i0 + len(layer.units) * rules.bs, len(layer.k))
        ring = np.asarray(cache.received)[row]
        got = ring[:, left % ring.shape[1]]
        np.testing.assert_allclose(got, layer.received[:, left], atol=2e-4)


def oracle_params(engine: Engine) -> Any:
    return to_numpy(jax.device_get(engine.params))
