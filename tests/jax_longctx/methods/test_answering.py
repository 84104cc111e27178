"""Methods under which tokens leave during an answer, every so many of its tokens."""

import itertools

import numpy as np
import pytest

from jax_longctx.engine.running import Ask, RunningBatch
from jax_longctx.errors import ConfigError
from jax_longctx.methods import METHODS, make_method
from jax_longctx.parts.compressing import LEAVING, Compressing
from jax_longctx.sharding import make_mesh
from tests.jax_longctx.methods.harness import FedRows, answer_logits, oracle_params
from tests.jax_longctx.methods.oracles import answering
from tests.small_methods import SMALL
from tests.support import random_rows, tiny_config, tiny_engine

# A row that evicts from the first, one that does so in its answer, and one that never does.
ROWS = [random_rows(n, seed=seed) for seed, n in enumerate([[61, 20, 0], [7, 3, 2], [17, 17, 17]])]
AGAIN = [random_rows(n, seed=9) for n in ([4, 4, 1], [6, 6, 6])]
RULES = {"r-kv": answering.r_kv, "triattention": answering.triattention}
GOING_ON = [
    name
    for name, kind in METHODS.items()
    if issubclass(kind, Compressing) and kind.cannot_go_on is None
]


def method_of(name, **settings):
    own = {"local": 8} | SMALL[name] | {"budget": 24, "interval": 4}
    return make_method(name, own | settings)


@pytest.mark.parametrize("budget", [16, 28])
@pytest.mark.parametrize("name", RULES)
@pytest.mark.quick("28")
def test_what_stays_is_numpy_s_in_every_layer_and_head(name, budget):
    """After each segment: kept keys, in order, of tokens that numpy chose; and the logits."""
    method = method_of(name, budget=budget)
    engine = tiny_engine(method, chunk=16)
    params = oracle_params(engine)
    rule = RULES[name](method)
    oracles = [answering.Answering(engine.config, params, rule, budget) for _ in ROWS[0]]
    left, read = 0, [len(row) for row in ROWS[0]]
    run = FedRows.of(engine, ROWS[0])
    # The second question follows on the first one's answer.
    fed = itertools.chain(run.read(ROWS[0]), run.answer(*ROWS[1:]), run.answer(*AGAIN))
    for step in fed:
        answers = step.segment.role != "context"
        leaving = step.segment.role == "query" or step.segment.variant == LEAVING
        for b, oracle in enumerate(oracles):
            if not (size := int(step.valid[b])):
                continue
            tokens = np.asarray(step.segment.tokens)[b, :size].tolist()
            ends = not answers and oracle.position + size == read[b]
            expected = oracle.feed(tokens, leaving or ends, before=step.segment.role == "query")
            np.testing.assert_allclose(step.logits[b, :size], expected, atol=1e-4)
            for layer, cache in enumerate(step.caches) if answers else ():
                store, keys = cache.store, oracle.keys[layer]
                assert int(store.length[b]) == len(keys[0]) and int(store.position[b]) == (
                    oracle.position
                )
                assert len(keys[0]) <= budget + method.interval
                mine = np.asarray(store.k)[b, :, : len(keys[0])]
                np.testing.assert_allclose(mine, keys, atol=1e-4)
                left += int(store.position[b]) > len(keys[0])
    assert left
    # No head keeps what another one does.
    kept = {tuple(head) for layer in oracles[0].tokens for head in layer}
    assert len(kept) == 4 and all(max(head) > 61 + 7 for head in kept)


@pytest.mark.slow
@pytest.mark.quick("random")
@pytest.mark.parametrize("name", GOING_ON)
def test_every_rule_goes_on_and_on_a_mesh_alike(name):
    method = method_of(name)
    # Questions of one part at any interval. Of equal tokens norms differ by rounding alone.
    order, rows = np.random.default_rng(0).permutation(64).tolist(), []
    for context, question in [(40, 4), (20, 3), (0, 2)]:
        answer = context + question
        rows.append((order[:context], order[context:answer], order[answer : answer + 17]))
    rows = [*zip(*rows, strict=True)]
    one, mesh = (
        answer_logits(tiny_engine(method, mesh=make_mesh(*n), chunk=16), rows)
        for n in ((1, 1, 1), (1, 2, 2))
    )
    np.testing.assert_allclose(one, mesh, atol=1e-4)
    alone = answer_logits(tiny_engine(method_of(name, interval=99), chunk=16), rows)
    # Before tokens leave again nothing differs; the row that never fills its budget stays alike.
    np.testing.assert_allclose(one[:, :4], alone[:, :4], atol=1e-4)
    np.testing.assert_allclose(one[2], alone[2], atol=1e-4)
    assert np.abs(one[:2, 4:] - alone[:2, 4:]).max(axis=(1, 2)).min() > 1e-3


def test_an_answer_may_be_many_times_the_budget():
    """In a running batch, beside another row; the caches stay as they are."""
    method = method_of("r-kv", budget=16)
    engine = tiny_engine(method, config=tiny_config(max_position=4096), chunk=16)
    batch = RunningBatch(engine, places=2, slots=engine.slots_for(40), reserve=8)
    (first,), (second,) = (
        [engine.prefill([row], reserve=8, capacity=batch.slots)] for row in ROWS[0][:2]
    )
    held, got = batch.resident_bytes, {}
    # Budget and interval, rounded to a tile, and the newest queries.
    assert held == 2 * 2 * (2 * 2 * 128 * 8 * 4 + 8 * 4 * 8 * 4 + 4 * 4)
    for context, length in ((first, 96), (second, 50)):
        place, token = batch.join(context, Ask([1, 2, 3], max_tokens=length))
        got[place] = [token]
        for place, chosen in batch.step(7).items():
            got[place] += chosen
    while batch.running:
        for place, chosen in batch.step().items():
            got[place] += chosen
        assert batch.resident_bytes == held
    assert [len(row) for row in got.values()] == [96, 50]
    for context, answer in zip((first, second), got.values(), strict=True):
        stream = engine.stream(context, [[1, 2, 3]], max_tokens=len(answer))
        assert [int(t) for block in stream for t in block[0]] == [each.token for each in answer]


def test_no_interval_where_a_rule_cannot_go_on_or_budgets_grow():
    with pytest.raises(ConfigError, match="kvzip: no interval: it ranks what it repeats"):
        make_method("kvzip", {"interval": 8})
    with pytest.raises(ConfigError, match="interval needs a budget in tokens; leave ratio out"):
        make_method("knorm", {"ratio": 0.5, "interval": 8})
    with pytest.raises(ConfigError, match="r-kv: no interval with over_heads=ada: what heads keep"):
        make_method("r-kv", {"over_heads": "ada"})
