"""Star Attention against numpy, on meshes of up to four shards (spec: S1-S8, S10, S11, S14)."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jax_longctx.contract import Prompt
from jax_longctx.engine import Engine, programs
from jax_longctx.methods import Full
from jax_longctx.methods.star import Star
from jax_longctx.sharding import make_mesh
from tests.jax_longctx.methods.harness import last_logits, steps
from tests.jax_longctx.methods.oracles.star import answer_logits, read_blocks
from tests.oracle import to_numpy
from tests.support import random_rows, tiny_engine

# Beyond three shards of four, in 8 blocks of 64; within the second shard; two blocks; one token.
CONTEXTS = random_rows([450, 201, 77, 1])
QUESTIONS = random_rows([3, 2, 20, 1], seed=1)
ANSWERS = random_rows([3] * 4, seed=2)
STAR = Star(block=64)


@functools.cache
def model():
    engine = tiny_engine()
    return engine, to_numpy(jax.device_get(engine.params))


def engine_of(method, mesh=(1, 4, 1), chunk=24):
    """The same weights on any mesh; chunks that do not divide a block."""
    engine, _ = model()
    mesh = make_mesh(*mesh)
    params = tiny_engine(mesh=mesh).params
    return Engine(engine.config, params, method, mesh, chunk=chunk)


@functools.cache
def expected(method):
    """numpy: each block behind its anchor, then question and answer over all of them.

    Logits `[B, 4, V]` of the question's last token and the answer's, and the keys `[L][T, K, H]`.
    """
    engine, params = model()
    found = []
    for row, question, answer in zip(CONTEXTS, QUESTIONS, ANSWERS, strict=True):
        kept = read_blocks(method, engine.config, params, row)
        logits = answer_logits(engine.config, params, kept, [*question, *answer])
        found.append((logits[-4:], [k for k, _ in kept]))
    return found


def test_a_block_below_the_chunk_is_not_padded_to_the_chunk():
    prompt = Prompt("context", 512, CONTEXTS, slots=512, shards=4)
    columns = [segment.tokens.shape[-1] for segment in STAR.segments(prompt)]
    assert len(columns) > 2 and set(columns) == {4 * 64}


def test_all_blocks_but_the_first_have_an_anchor_of_one_token_too():
    prompt = Prompt("context", 8, [[7, 8, 9, 5]], slots=4, shards=4)
    anchors, blocks = Star(block=1, anchor_kv="recompute").segments(prompt)
    assert anchors.tokens.tolist() == [[0, 7, 7, 7]] and anchors.valid.tolist() == [[0, 1, 1, 1]]
    assert blocks.tokens.tolist() == prompt.context and blocks.valid.tolist() == [[1, 1, 1, 1]]


def compare(engine, method):
    """Every row's kept keys, and its logits at the question's end and in the answer."""
    wanted, seen, held = expected(method), [], []
    for step in steps(engine, CONTEXTS, QUESTIONS, ANSWERS):
        if step.segment.role == "query" and not held:
            held = [np.asarray(cache.k) for cache in step.caches]
        seen.append(step)
    for layer, ours in enumerate(held):
        for row, (_, keys) in enumerate(wanted):
            kept = ours[row, :, : len(CONTEXTS[row])].swapaxes(0, 1)
            np.testing.assert_allclose(kept, keys[layer], atol=1e-4)
    assert len(held) == engine.config.num_layers
    for column, step in enumerate(seen[-3:], start=1):
        logits = np.stack([row[column] for row, _ in wanted])
        np.testing.assert_allclose(last_logits(step), logits, atol=1e-4)


@pytest.mark.parametrize("kv", [pytest.param("recompute", marks=pytest.mark.thorough), "broadcast"])
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
    """Also more shards than blocks, and blocks of which a shard has several."""
    method = dataclasses.replace(STAR, anchor_kv=kv)
    compare(engine_of(method, mesh), method)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"anchor": 0}, marks=pytest.mark.thorough),
        pytest.param({"anchor": 20, "anchor_kv": "broadcast"}, marks=pytest.mark.thorough),
        {"content": "previous", "positions": "previous"},
        pytest.param({"positions": "previous"}, marks=pytest.mark.thorough),
        pytest.param({"content": "shuffled", "anchor": 30}, marks=pytest.mark.thorough),
        pytest.param({"content": "constant", "constant": 7}, marks=pytest.mark.thorough),
        pytest.param({"content": "random", "anchor": 30}, marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_s14_anchors_equal_numpy(changes):
    method = dataclasses.replace(STAR, **changes)
    compare(engine_of(method), method)


@pytest.mark.thorough
def test_random_positions_are_ascending_below_the_block():
    method = dataclasses.replace(STAR, positions="random", anchor=30)
    engine = engine_of(method, (1, 1, 1))
    cache = method.init_cache(shape_of(engine))
    cache = dataclasses.replace(cache, filled=jnp.full((1, 1), 128, jnp.int32))
    setup = engine.setup

    def draw(cache):
        ctx = setup.layer_context(None, jnp.zeros(1, jnp.int32))
        index = jnp.arange(30)[None]
        return method.anchor_positions(index, method._block_of(cache, ctx), 256)

    run = jax.shard_map(
        draw, mesh=engine.mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False
    )
    (drawn,) = np.asarray(run(cache))
    assert (np.diff(drawn) > 0).all() and drawn[0] >= 0 and drawn[-1] < 128
    assert drawn.tolist() != list(range(30))


def shape_of(engine):
    return programs.cache_shapes(engine.setup, 1, 256, 8)[0]


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
    assert programs.per_layer(context.caches)[0].length.tolist() == [201 + 3 + 3]
    assert (
        type(programs.per_layer(context.caches)[0]).__name__ == "AppendCache"
    )  # the anchors are gone
