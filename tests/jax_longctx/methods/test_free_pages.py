"""FreePages: equal to ReAttention with pages of one token, to full attention where all is read."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from jax_longctx.errors import ConfigError
from jax_longctx.methods import FreePages, ReAttention
from jax_longctx.parts import residual
from jax_longctx.sharding import make_mesh
from pallas_kernels.plane import part_of
from tests.jax_longctx.methods.harness import steps
from tests.oracle import causal_attend, forward, to_numpy
from tests.support import random_rows, tiny_config, tiny_engine

# Of each row: context, question; every row is given as many answer tokens. The longest ones are
# far beyond the scope of 60 tokens, and end within and at a page.
LENGTHS = [(150, 4), (96, 1), (20, 12), (0, 3)]
SMALL = {"sink": 4, "local": 32, "span": 12, "budget": 24, "count": 1, "chunk": 16}
PAGES = FreePages(page_size=8, digest="bounds", **SMALL)
also = functools.partial(pytest.param, marks=pytest.mark.slow)


def texts(lengths=LENGTHS, answer=5):
    contexts = random_rows([context for context, _ in lengths])
    questions = random_rows([question for _, question in lengths], seed=1)
    return contexts, questions, random_rows([answer] * len(lengths), seed=2)


def engine_of(method, **options):
    return tiny_engine(method, config=tiny_config(**options.pop("config", {})), chunk=16, **options)


def logits_of(engine, rows, each=None):
    """Every row's logits [tokens, V], in order; `each(step)` looks at each step."""
    pieces = [[] for _ in rows[0]]
    for step in steps(engine, *rows, reserve=40):
        for piece, logits, valid in zip(pieces, step.logits, step.valid, strict=True):
            piece.append(logits[:valid])
        if each is not None:
            each(step)
    return [np.concatenate(piece) for piece in pieces]


def check_same(one, other, atol=1e-4):
    for a, b in zip(one, other, strict=True):
        np.testing.assert_allclose(a, b, atol=atol)


def full_attention(engine, rows):
    """Every row's logits [tokens, V] under full attention, by numpy."""
    params, attend = to_numpy(jax.device_get(engine.params)), causal_attend(1e4)
    texts_of_rows = ([*a, *b, *c] for a, b, c in zip(*rows, strict=True))
    return [forward(engine.config, params, row, attend) for row in texts_of_rows]


@functools.cache
def reattention():
    theirs = ReAttention(global_size=4, local_size=32, kept=8, chunk=16, span=5, count=2)
    return logits_of(engine_of(theirs), texts())


@pytest.mark.parametrize(
    "digest", ["bounds", *map(also, ("cuboid-mean", "cuboid-center", "centroid"))]
)
def test_pages_of_one_token_are_reattention(digest):
    ours = FreePages(
        sink=4, local=32, budget=40, page_size=1, digest=digest, chunk=16, span=5, count=2
    )
    engine = engine_of(ours)
    got, rows = logits_of(engine, texts()), [part[:1] for part in texts()]
    check_same(got, reattention())
    # Which is not full attention.
    assert np.abs(got[0] - full_attention(engine, rows)[0]).max() > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("lam", [0.0, also(1.0)])
def test_what_fits_the_scope_is_full_attention(lam):
    rows = texts([(40, 4), (36, 1), (9, 5), (0, 3)])
    engine = engine_of(dataclasses.replace(PAGES, local=80, lam=lam))
    check_same(logits_of(engine, rows), full_attention(engine, rows))


@pytest.mark.slow
def test_a_budget_that_covers_the_middle_is_full_attention():
    """Spans that cover every page leave nothing out: all positions are the true ones."""
    rows = texts([(70, 4), (60, 1)])
    method = FreePages(sink=4, local=32, page_size=8, span=96, budget=192, count=16, chunk=16)
    engine = engine_of(method, config={"max_position": 512})
    check_same(logits_of(engine, rows), full_attention(engine, rows))


@pytest.mark.parametrize("digest", ["bounds", "cuboid-mean", also("cuboid-center"), "centroid"])
@pytest.mark.quick("centroid")
def test_the_pages_of_the_scope_are_those_of_the_best_scores(digest):
    """Of one token: the chosen pages against scores of all keys' digests in numpy."""
    method = dataclasses.replace(PAGES, digest=digest, span=8, budget=64, count=2)
    seen = []

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Watched(FreePages):
        def choose(self, q, cache, valid, ctx, **how):
            scope = super().choose(q, cache, valid, ctx, **how)
            if q.shape[1] == 1:
                found = (q[:, 0], part_of(cache.store.k), cache.store.length, *scope.listed())
                jax.debug.callback(lambda *x: seen.append([np.asarray(i) for i in x]), *found)
            return scope

    watched = Watched(**{f.name: getattr(method, f.name) for f in dataclasses.fields(method)})
    logits_of(engine_of(watched, config={"num_layers": 1}), texts([(150, 4), (96, 1)]))
    jax.effects_barrier()
    assert len(seen) >= 6
    for q, k, length, slots, number in seen:
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
    together = logits_of(engine_of(method), rows)
    for row in range(2):
        alone = [[group[row]] for group in rows]
        check_same(logits_of(engine_of(method), alone), together[row : row + 1])
    check_same(logits_of(engine_of(method, mesh=make_mesh(2, 2, 2)), rows), together)


@pytest.mark.slow
def test_the_estimate_is_that_of_all_keys_left_out():
    """Decode with lam against softmax over scope and estimated rest, in numpy, of one layer."""
    method, seen = dataclasses.replace(PAGES, lam=1.0), []
    whole = residual.combine

    def watched(chosen, prior, everything, **how):
        made = whole(chosen, prior, everything, **how)
        found = (chosen.out, chosen.lse, prior.query, prior.lse, prior.bias, made[0])
        jax.debug.callback(lambda *x: seen.append([np.asarray(i) for i in x]), *found)
        return made

    scopes = []

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Watched(FreePages):
        def choose(self, q, cache, valid, ctx, **how):
            scope = super().choose(q, cache, valid, ctx, **how)
            if q.shape[1] == 1:
                store = (part_of(cache.store.k), part_of(cache.store.v), cache.store.length)
                jax.debug.callback(
                    lambda *x: scopes.append([np.asarray(i) for i in x]), *scope.listed(), *store
                )
            return scope

    values = {f.name: getattr(method, f.name) for f in dataclasses.fields(method)}
    config = {"num_layers": 1}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(residual, "combine", watched)
        logits_of(engine_of(Watched(**values), config=config), texts([(150, 4)]))
        jax.effects_barrier()
    assert len(seen) == 5
    for (out, lse, query, prior_lse, bias, made), scope in zip(seen, scopes[-5:], strict=True):
        slots, number, k, v, length = scope
        kept = slots[0, : number[0]]
        left = np.setdiff1d(np.arange(length[0]), kept)
        heads, width = query.shape[2], query.shape[3]
        group = heads // k.shape[1]
        for head in range(heads):
            keys, numbers = k[0, head // group], v[0, head // group]
            # The prior covers all keys, generated ones too.
            logits = keys[: length[0]] @ query[0, 0, head] / np.sqrt(width)
            np.testing.assert_allclose(
                np.log(np.exp(logits).sum()), prior_lse[0, head], rtol=1e-3, atol=1e-3
            )
            weights = np.exp(logits + bias[0, head])
            mass = np.exp(lse[0, 0, head])
            total = mass + weights[left].sum()
            expected = mass * out[0, 0, head] + weights[left] @ numbers[left]
            np.testing.assert_allclose(made[0, 0, head], expected / total, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_read_bytes_are_digests_and_scope():
    engine = engine_of(PAGES)
    cache = list(steps(engine, *texts([(150, 4)])))[-1].caches[0]
    line = cache.store.k.nbytes // cache.store.k.shape[2]
    digests = 2 * cache.store.k.nbytes // PAGES.page_size
    # Four query heads name one page each, and the budget holds two spans of 12.
    assert PAGES.read_bytes(cache, 150) == digests + 2 * line * (4 + 24 + 32)
    assert PAGES.read_bytes(cache, 10) == digests + 2 * line * 10
    counted = np.asarray(cache.kept)[0] / np.asarray(cache.steps)[0]
    assert (counted <= 60).all() and (counted > 36).all()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"page_size": 24}, "must divide 128"),
        ({"span": 4, "page_size": 8}, "must hold a page of 8"),
        ({"budget": 8, "span": 16}, "must hold a span of 16"),
        ({"local": 16, "chunk": 32}, "must hold a chunk of 32"),
        ({"count": 17}, "count must be from 1 to 16"),
        ({"lam": 1.5}, "lam must be from 0 to 1"),
    ],
    ids=str,
)
def test_bad_settings(settings, said):
    with pytest.raises(ConfigError, match=f"free-pages: .*{said}"):
        FreePages(**settings)


def test_a_scope_beyond_the_trained_length_or_a_window_is_refused():
    with pytest.raises(ConfigError, match="= 60 positions, the model attends at most 48"):
        PAGES.validate(tiny_config(max_position=48))
    with pytest.raises(ConfigError, match="at most 59"):
        PAGES.validate(tiny_config(windows=(None, 59)))
    PAGES.validate(tiny_config(windows=(None, 60)))
