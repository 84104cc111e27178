"""Star Attention against numpy, on meshes of up to four shards, and what decodes over its cache.

The names carry the spec's ids (S1-S14).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jax_longctx.contract import Feed
from jax_longctx.engine.allocate import cache_shapes
from jax_longctx.engine.decode import decode_block
from jax_longctx.engine.runs import per_layer
from jax_longctx.methods import Full, make_method, settings_of
from jax_longctx.methods.star import Star
from jax_longctx.sharding import make_mesh
from research.star_anchors import StarAnchors
from research.star_released_mask import StarReleasedMask
from tests.jax_longctx.methods.harness import (
    answer_logits,
    check_rows,
    oracle_params,
    texts,
    with_caches,
)
from tests.jax_longctx.methods.oracles.star import read_blocks, tail_logits
from tests.support import random_rows, tiny_engine

# Beyond three shards of four, in 8 blocks of 64; within the second shard; two blocks; one token.
ROWS = CONTEXTS, QUESTIONS, ANSWERS = texts([(450, 3), (201, 2), (77, 20), (1, 1)], 3)
STAR = Star(block=64)
ANCHORS = StarAnchors(block=64)
thorough = functools.partial(pytest.param, marks=pytest.mark.thorough)


def engine_of(method, mesh=(1, 4, 1)):
    return tiny_engine(method, mesh=make_mesh(*mesh), chunk=24)


@functools.cache
def expected(method):
    """numpy: each block behind its anchor, then question and answer over all of them.

    Logits `[B, 4, V]` of the question's last token and the answer's, and the keys `[L][T, K, H]`.
    """
    engine = engine_of(STAR, (1, 1, 1))
    model, found = (engine.config, oracle_params(engine)), []
    for row, question, answer in zip(*ROWS, strict=True):
        kept = read_blocks(method, *model, row)
        found.append((tail_logits(*model, kept, [*question, *answer])[-4:], [k for k, _ in kept]))
    return found


def test_blocks_are_not_padded_and_all_but_the_first_have_an_anchor():
    prompt = Feed("context", 512, CONTEXTS, slots=512, shards=4)
    columns = [segment.tokens.shape[-1] for segment in STAR.segments(prompt)]
    assert len(columns) > 2 and set(columns) == {4 * 64}
    prompt = Feed("context", 8, [[7, 8, 9, 5]], slots=4, shards=4)
    anchors, blocks = Star(block=1, anchor_kv="recompute").segments(prompt)
    assert anchors.tokens.tolist() == [[0, 7, 7, 7]] and anchors.valid.tolist() == [[0, 1, 1, 1]]
    assert blocks.tokens.tolist() == prompt.context and blocks.valid.tolist() == [[1, 1, 1, 1]]


def compare(engine, method):
    """Every row's kept keys, and its logits at the question's end and in the answer."""
    logits, held = with_caches(engine, ROWS)
    assert len(held) == engine.config.num_layers
    for row, (wanted, keys) in enumerate(expected(method)):
        np.testing.assert_allclose(logits[row][-4:], wanted, atol=1e-4)
        mine = [cache.k[row, :, : len(CONTEXTS[row])].swapaxes(0, 1) for cache in held]
        check_rows(mine, keys)


@pytest.mark.parametrize("kv", [thorough("recompute"), "broadcast"])
def test_s3_s4_s7_s11_blocks_question_and_answer_equal_numpy(kv):
    method = dataclasses.replace(STAR, anchor_kv=kv)
    compare(engine_of(method), method)


@pytest.mark.parametrize(
    ("kv", "mesh"),
    [
        *(("recompute", mesh) for mesh in [(1, 1, 1), (2, 2, 2)]),
        *(("broadcast", mesh) for mesh in [(1, 2, 1), (2, 2, 2), (1, 8, 1)]),
    ],
)
@pytest.mark.thorough
def test_s5_s6_any_number_of_shards_gives_the_same(kv, mesh):
    method = dataclasses.replace(STAR, anchor_kv=kv)
    compare(engine_of(method, mesh), method)


@pytest.mark.parametrize(
    "changes",
    [
        thorough({"anchor": 0}),
        thorough({"anchor": 20, "anchor_kv": "broadcast"}),
        {"content": "previous", "positions": "previous"},
        thorough({"positions": "previous"}),
        thorough({"content": "shuffled", "anchor": 30}),
    ],
    ids=str,
)
def test_s14_anchors_equal_numpy(changes):
    method = dataclasses.replace(ANCHORS, **changes)
    compare(engine_of(method), method)


def test_s14_an_anchor_holds_the_tokens_that_its_setting_names():
    row, start = [*range(100, 100 + 4 * STAR.block)], 2 * STAR.block

    def tokens(content, seed=0):
        method = dataclasses.replace(ANCHORS, content=content, anchor=9, constant=7, seed=seed)
        return method.anchor_tokens(row, start, 64)

    assert tokens("first") == row[:9] and tokens("constant") == [7] * 9
    assert tokens("previous") == row[STAR.block : STAR.block + 9]
    assert sorted(tokens("shuffled")) == row[:9] != tokens("shuffled")
    assert set(tokens("random")) <= set(range(64)) and len(tokens("random")) == 9
    for content in ("shuffled", "random"):
        assert tokens(content) == tokens(content) != tokens(content, seed=1)


@pytest.mark.thorough
def test_random_positions_are_ascending_below_the_block():
    method = dataclasses.replace(ANCHORS, positions="random", anchor=30)
    engine = engine_of(method, (1, 1, 1))
    cache = method.init_cache(cache_shapes(engine.setup, 1, 256, 8)[0])
    cache = dataclasses.replace(cache, filled=jnp.full((1, 1), 128, jnp.int32))
    setup = engine.setup

    def draw(cache):
        ctx = setup.layer_context(setup.layer(0), jnp.zeros(1, jnp.int32))
        index = jnp.arange(30)[None]
        return method.anchor_positions(index, method._block_of(cache, ctx), 256)

    run = jax.shard_map(
        draw, mesh=engine.mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False
    )
    (drawn,) = np.asarray(run(cache))
    assert (np.diff(drawn) > 0).all() and drawn[0] >= 0 and drawn[-1] < 128
    assert drawn.tolist() != list(range(30))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("block", "length"), [pytest.param(128, 100, marks=pytest.mark.thorough), (64, 128)]
)
def test_s1_s2_one_block_and_two_are_full_attention(block, length):
    row, question = random_rows([length, 5], seed=4)
    answers = []
    for method in (Star(block=block), Full()):
        engine = engine_of(method, (1, 2, 1))
        context = engine.prefill([row], reserve=16)
        answers.append([new for new in engine.stream(context, [question], max_tokens=6)])
    assert answers[0] == answers[1]


@pytest.mark.slow
def test_s10_only_the_answers_tokens_are_appended():
    context = engine_of(STAR, (1, 2, 1)).prefill([CONTEXTS[1]], reserve=16)
    engine = engine_of(STAR, (1, 2, 1))
    for _ in engine.stream(context, [[1, 2, 3]], max_tokens=4):
        pass
    assert per_layer(context.caches)[0].length.tolist() == [201 + 3 + 3]
    assert type(per_layer(context.caches)[0]).__name__ == "AppendCache"  # the anchors are gone


DECODES = {
    "quest": {"decode.page_size": 8},
    "ideal-topk": {},
    "resa": {"decode.page_size": 8},
    "resa-arkvale": {"decode.page_size": 8, "decode.selector": "arkvale"},
    "resa-ideal": {"decode.selector": "ideal"},
    "resa-first-dense": {"decode.page_size": 8, "decode.skip_layers": 1},
    "refreshkv": {},
}


def star(name, budget, **settings):
    decode, *_ = name.split("-") if name.startswith("resa") else [name]
    given = {"decode": decode, "decode.budget": budget, **DECODES[name], **settings}
    if decode != "refreshkv":
        given["decode.local"] = 16
    return make_method("star", {"block": 64, **given})


@functools.cache
def logits_of(method, lengths, mesh=(1, 1, 1)):
    return answer_logits(engine_of(method, mesh), texts(lengths, 4), before=1)


# Each method and setting is in one of the two tests.
@pytest.mark.thorough
@pytest.mark.parametrize("name", ["quest", "resa", "refreshkv"])
def test_two_blocks_decode_as_the_method_alone(name):
    """Two blocks on two shards are full attention: keys, pages and mean queries are all there."""
    lengths = (128, 3), (100, 5)
    method = star(name, 16)
    assert make_method("star", settings_of(method)["settings"]) == method
    mine, alone = logits_of(method, lengths, (1, 2, 1)), logits_of(method.decode, lengths)
    np.testing.assert_allclose(mine, alone, atol=1e-4)
    # A small budget reads less than everything.
    assert np.abs(mine - logits_of(Full(), lengths))[:, 1:].max() > 1e-3


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["ideal-topk", "resa-arkvale", "resa-ideal", "resa-first-dense"])
def test_a_budget_for_all_is_star_with_full_attention(name):
    lengths, mesh = ((250, 3), (70, 5)), (1, 4, 1)
    for_all, whole = (logits_of(it, lengths, mesh) for it in (star(name, 1024), Star(block=64)))
    np.testing.assert_allclose(for_all, whole, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh", [(1, 4, 1), pytest.param((1, 1, 1), marks=pytest.mark.thorough)], ids=str
)
def test_s13_the_authors_mask_hides_a_hosts_last_keys_from_a_questions_first_rows(mesh):
    """Also a question of more tokens than a host holds (ST-B2). One host has nothing to hide."""
    method = StarReleasedMask(block=128)
    rows = texts([(201, 5), (300, 140)], 3)
    engine = engine_of(method, mesh)
    params = oracle_params(engine)
    mine = answer_logits(engine, rows, before=1, reserve=150)
    for b, (context, question, answer) in enumerate(zip(*rows, strict=True)):
        kept = read_blocks(method, engine.config, params, context)
        count, hidden = len(question), []
        for r in range(count):
            hosts = range((len(context) - 1) // 128 if mesh[1] > 1 else 0)
            # Of a host's 128 keys row r sees those up to 128 - count + r.
            seen = max(128 - count + r + 1, 0)
            hidden.append([128 * host + slot for host in hosts for slot in range(seen, 128)])
        wanted = tail_logits(engine.config, params, kept, [*question, *answer], hidden)
        np.testing.assert_allclose(mine[b], wanted[-4:], atol=1e-4)
        plain = tail_logits(engine.config, params, kept, [*question, *answer])
        assert (np.abs(wanted - plain)[-4:].max() > 1e-3) == (mesh[1] > 1)


def test_s12_no_token_compiles_anything():
    engine = engine_of(Star(block=64), (1, 2, 1))
    context = engine.prefill([random_rows([100])[0]], reserve=64)
    stream = engine.stream(context, [[1, 2]], max_tokens=60)
    tokens = [next(stream), next(stream)]
    before = decode_block._cache_size()
    tokens += stream
    assert sum(len(block[0]) for block in tokens) == 60
    assert decode_block._cache_size() == before
