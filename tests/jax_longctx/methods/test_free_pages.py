import dataclasses
import functools

import jax
import numpy as np
import pytest

from jax_longctx.methods import FreePages, ReAttention
from jax_longctx.parts import residual
from jax_longctx.sharding import make_mesh
from pallas_kernels.plane import part_of
from tests.jax_longctx.methods import harness
from tests.jax_longctx.methods.harness import check_rows, full_logits, steps
from tests.support import tiny_config, tiny_engine

# Of each row: context, question; every row is given as many answer tokens. The longest ones are
# far beyond the scope of 60 tokens, and end within and at a page.
LENGTHS = [(150, 4), (96, 1), (20, 12), (0, 3)]
SMALL = {"sink": 4, "local": 32, "span": 12, "budget": 24, "count": 1, "chunk": 16}
PAGES = FreePages(page_size=8, digest="bounds", **SMALL)
also = functools.partial(pytest.param, marks=pytest.mark.slow)
row_logits = functools.partial(harness.row_logits, reserve=40)


def texts(lengths=LENGTHS):
    return harness.texts(lengths, 5)


def engine_of(method, mesh=(1, 1, 1), **config):
    return tiny_engine(method, config=tiny_config(**config), mesh=make_mesh(*mesh), chunk=16)


@functools.cache
def reattention():
    theirs = ReAttention(global_size=4, local_size=32, kept=8, chunk=16, span=5, count=2)
    return row_logits(engine_of(theirs), texts())


@pytest.mark.parametrize(
    "digest", ["bounds", *map(also, ("cuboid-mean", "cuboid-center", "centroid"))]
)
def test_pages_of_one_token_are_reattention(digest):
    ours = FreePages(**{**SMALL, "budget": 40, "span": 5, "count": 2}, page_size=1, digest=digest)
    engine = engine_of(ours)
    got = row_logits(engine, texts())
    check_rows(got, reattention())
    # Which is not full attention.
    (full,) = full_logits(engine, [part[:1] for part in texts()])
    assert np.abs(got[0] - full).max() > 1e-2


WIDE = {"sink": 4, "local": 32, "page_size": 8, "span": 96, "budget": 192, "count": 16, "chunk": 16}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "lengths"),
    [
        # What fits the scope.
        (dataclasses.replace(PAGES, local=80, lam=0.0), [(40, 4), (36, 1), (9, 5), (0, 3)]),
        also(dataclasses.replace(PAGES, local=80, lam=1.0), [(40, 4), (36, 1), (9, 5), (0, 3)]),
        # Spans that cover every page leave nothing out: all positions are the true ones.
        (FreePages(**WIDE), [(70, 4), (60, 1)]),
    ],
    ids=["short", "short with the rest", "covered"],
)
def test_what_is_all_read_is_full_attention(method, lengths):
    engine = engine_of(method, max_position=512)
    check_rows(row_logits(engine, texts(lengths)), full_logits(engine, texts(lengths)))


def watched(method):
    """The method in one layer's engine, and (q, k, v, length, slots, number) of what it chooses."""
    seen = []

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Watched(FreePages):
        def choose(self, q, cache, valid, ctx, **how):
            scope, store = super().choose(q, cache, valid, ctx, **how), cache.store
            if q.shape[1] == 1:
                found = q[:, 0], part_of(store.k), part_of(store.v), store.length, *scope.listed()
                jax.debug.callback(lambda *x: seen.append([np.asarray(i) for i in x]), *found)
            return scope

    values = {f.name: getattr(method, f.name) for f in dataclasses.fields(method)}
    return engine_of(Watched(**values), num_layers=1), seen


@pytest.mark.parametrize("digest", ["bounds", "cuboid-mean", also("cuboid-center"), "centroid"])
@pytest.mark.quick("centroid")
def test_the_pages_of_the_scope_are_those_of_the_best_scores(digest):
    method = dataclasses.replace(PAGES, digest=digest, span=8, budget=64, count=2)
    engine, seen = watched(method)
    row_logits(engine, texts([(150, 4), (96, 1)]))
    jax.effects_barrier()
    assert len(seen) >= 6
    for q, k, _, length, slots, number in seen:
        for row in range(len(q)):
            expected = expected_scope(method, q[row], k[row], int(length[row]))
            assert slots[row, : number[row]].tolist() == expected


def expected_scope(method, q, k, length):
    """The ascending slots of one row, from queries [N, H] and keys [K, S, H] before rotation."""
    page, sink, local = method.page_size, method.sink, method.local
    stop = length - min(max(length - sink, 0), local)
    group = len(q) // len(k)
    chosen = set()
    for head in range(len(q)):
        scores = {}
        for first in range(sink // page, -(-stop // page)):
            keys = k[head // group, first * page : min((first + 1) * page, length)]
            high, low = keys.max(0), keys.min(0)
            middle = (high + low) / 2
            away = np.abs(keys - middle)
            if method.digest == "centroid":
                high = low = keys.mean(0)
            elif method.digest != "bounds":
                means = {"mean": away.mean(0), "center": (away.max(0) + away.min(0)) / 2}
                radius = means[method.digest.partition("-")[2]]
                high, low = middle + radius, middle - radius
            scores[first] = np.maximum(q[head] * high, q[head] * low).sum()
        chosen |= set(sorted(scores, key=lambda each: -scores[each])[: method.count])
    # Fewer are named than stay.
    assert len(chosen) <= method.kept
    before = (method.span // 2) - page // 2
    spans = {
        slot
        for first in chosen
        for slot in range(first * page - before, first * page - before + method.span)
        if sink <= slot < stop
    }
    return [*range(min(sink, length)), *sorted(spans), *range(stop, length)]


@pytest.mark.slow
@pytest.mark.parametrize("lam", [also(0.0), 0.7])
def test_ragged_rows_answer_as_alone_and_on_a_mesh(lam):
    rows, method = texts(), dataclasses.replace(PAGES, lam=lam)
    together = row_logits(engine_of(method), rows)
    for row in range(2):
        alone = [[group[row]] for group in rows]
        check_rows(row_logits(engine_of(method), alone), together[row : row + 1])
    check_rows(row_logits(engine_of(method, (2, 2, 2)), rows), together)


@pytest.mark.slow
def test_the_estimate_is_that_of_all_keys_left_out(monkeypatch):
    """Decode with lam against softmax over scope and estimated rest, in numpy, of one layer."""
    seen, whole = [], residual.combine

    def combine(chosen, prior, everything, **how):
        made = whole(chosen, prior, everything, **how)
        found = (chosen.out, chosen.lse, prior.query, prior.lse, prior.bias, made[0])
        jax.debug.callback(lambda *x: seen.append([np.asarray(i) for i in x]), *found)
        return made

    monkeypatch.setattr(residual, "combine", combine)
    engine, scopes = watched(dataclasses.replace(PAGES, lam=1.0))
    row_logits(engine, texts([(150, 4)]))
    jax.effects_barrier()
    assert len(seen) == 5
    for (out, lse, query, prior_lse, bias, made), scope in zip(seen, scopes[-5:], strict=True):
        _, k, v, (length,), slots, number = scope
        left = np.setdiff1d(np.arange(length), slots[0, : number[0]])
        heads, width = out.shape[2:]
        for head in range(heads):
            keys, numbers = (x[0, head // (heads // k.shape[1])] for x in (k, v))
            # The prior covers all keys, generated ones too.
            logits = keys[:length] @ query[0, 0, head] / np.sqrt(width)
            mass = np.log(np.exp(logits).sum())
            np.testing.assert_allclose(mass, prior_lse[0, head], rtol=1e-3, atol=1e-3)
            weights = np.exp(logits + bias[0, head])
            mass = np.exp(lse[0, 0, head])
            total = mass + weights[left].sum()
            expected = mass * out[0, 0, head] + weights[left] @ numbers[left]
            np.testing.assert_allclose(made[0, 0, head], expected / total, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_an_answer_keeps_between_the_fixed_tokens_and_the_whole_scope():
    *_, last = steps(engine_of(PAGES, num_layers=1), *texts([(150, 4)]))
    counted = np.asarray(last.caches[0].kept)[0] / np.asarray(last.caches[0].steps)[0]
    assert (counted <= 60).all() and (counted > 36).all()
