"""Star's second phase: other methods over its cache, the authors' mask (spec: S8, S9, S12, S13)."""

import functools

import jax
import numpy as np
import pytest

from jax_longctx.engine import programs
from jax_longctx.methods import Full, StarReleasedMask, make_method, settings_of
from jax_longctx.methods.star import Star
from jax_longctx.sharding import make_mesh
from tests.jax_longctx.methods.harness import last_logits, steps
from tests.jax_longctx.methods.oracles.star import answer_logits, read_blocks
from tests.oracle import to_numpy
from tests.support import random_rows, tiny_engine

DECODES = {
    "quest": {"decode.page_size": 8},
    "ideal-topk": {},
    "resa": {"decode.page_size": 8},
    "resa-arkvale": {"decode.page_size": 8, "decode.selector": "arkvale"},
    "resa-ideal": {"decode.selector": "ideal"},
    "resa-frozen": {"decode.page_size": 8, "decode.growth": "frozen"},
    "resa-first-dense": {"decode.page_size": 8, "decode.skip_layers": 1},
    "refreshkv": {},
}


def star(name, budget, **settings):
    """Star whose second phase is the method of that name."""
    decode, *_ = name.split("-") if name.startswith("resa") else [name]
    given = {"decode": decode, "decode.budget": budget, **DECODES[name], **settings}
    if decode != "refreshkv":
        given["decode.local"] = 16
    return make_method("star", {"block": 64, **given})


def engine_of(method, mesh=(1, 1, 1)):
    return tiny_engine(method, mesh=make_mesh(*mesh), chunk=24)


def answered(engine, rows, reserve=32):
    """Logits of each row's question's last token and of the answer, `[B, 1 + A, V]`."""
    seen = list(steps(engine, *rows, reserve))
    asked = np.stack(
        [
            last_logits([s for s in seen if s.segment.role == "query" and s.valid[b]][-1])[b]
            for b in range(len(rows[0]))
        ]
    )
    found = [last_logits(step) for step in seen if step.segment.role == "decode"]
    return np.stack([asked, *found], axis=1)


@functools.cache
def logits_of(method, lengths, mesh=(1, 1, 1)):
    rows = [random_rows(each, seed=n) for n, each in enumerate(lengths)]
    return answered(engine_of(method, mesh), rows)


# Each method and setting is in one of the two tests.
@pytest.mark.thorough
@pytest.mark.parametrize("name", ["quest", "resa", "resa-frozen", "refreshkv"])
def test_two_blocks_decode_as_the_method_alone(name):
    """Two blocks on two shards are full attention: keys, pages and mean queries are all there."""
    lengths = (128, 100), (3, 5), (4, 4)
    method = star(name, 16)
    assert make_method("star", settings_of(method)["settings"]) == method
    mine, alone = logits_of(method, lengths, (1, 2, 1)), logits_of(method.decode, lengths)
    np.testing.assert_allclose(mine, alone, atol=1e-4)
    # A small budget reads less than everything.
    assert np.abs(mine - logits_of(Full(), lengths))[:, 1:].max() > 1e-3


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["ideal-topk", "resa-arkvale", "resa-ideal", "resa-first-dense"])
def test_a_budget_for_all_is_star_with_full_attention(name):
    lengths, mesh = ((250, 70), (3, 5), (3, 3)), (1, 4, 1)
    for_all, whole = (logits_of(it, lengths, mesh) for it in (star(name, 1024), Star(block=64)))
    np.testing.assert_allclose(for_all, whole, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh", [(1, 4, 1), pytest.param((1, 1, 1), marks=pytest.mark.thorough)], ids=str
)
def test_s13_the_authors_mask_hides_a_hosts_last_keys_from_a_questions_first_rows(mesh):
    """Also a question of more tokens than a host holds (ST-B2). One host has nothing to hide."""
    method = StarReleasedMask(block=128)
    sizes = [201, 300], [5, 140], [3, 3]
    rows = [random_rows(lengths, seed=n) for n, lengths in enumerate(sizes)]
    engine = engine_of(method, mesh)
    params = to_numpy(jax.device_get(engine.params))
    mine = answered(engine, rows, reserve=150)
    for b, (context, question, answer) in enumerate(zip(*rows, strict=True)):
        kept = read_blocks(method, engine.config, params, context)
        count, hidden = len(question), []
        for r in range(count):
            hosts = range((len(context) - 1) // 128 if mesh[1] > 1 else 0)
            # Of a host's 128 keys row r sees those up to 128 - count + r.
            seen = max(128 - count + r + 1, 0)
            hidden.append([128 * host + slot for host in hosts for slot in range(seen, 128)])
        wanted = answer_logits(engine.config, params, kept, [*question, *answer], hidden)
        np.testing.assert_allclose(mine[b], wanted[-4:], atol=1e-4)
        plain = answer_logits(engine.config, params, kept, [*question, *answer])
        assert (np.abs(wanted - plain)[-4:].max() > 1e-3) == (mesh[1] > 1)


def test_s12_no_token_compiles_anything():
    engine = engine_of(Star(block=64), (1, 2, 1))
    context = engine.prefill([random_rows([100])[0]], reserve=64)
    stream = engine.stream(context, [[1, 2]], max_tokens=60)
    tokens = [next(stream), next(stream)]
    before = programs.decode_block._cache_size()
    tokens += stream
    assert sum(len(block[0]) for block in tokens) == 60
    assert programs.decode_block._cache_size() == before
