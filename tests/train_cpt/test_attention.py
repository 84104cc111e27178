"""The training patterns against dense masked attention, and against decoding with RefreshKV."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_longctx.errors import ConfigError
from jax_longctx.methods.refreshkv import RefreshKV
from jax_longctx.models.llama import model_of
from jax_longctx.sharding import make_mesh
from tests.jax_longctx.methods.harness import last_logits, steps
from tests.jax_longctx.methods.oracles.partial_cache import choose
from tests.oracle import probabilities
from tests.support import random_rows, tiny_config, tiny_engine
from train_cpt.attention import (
    Pattern,
    attend_with,
    causal_attention,
    check_attention,
    pattern_attention,
)
from train_cpt.step import hidden_states

BATCH, HEADS, KV_HEADS, HEAD_DIM = 2, 4, 2, 8
SCALE = HEAD_DIM**-0.5
PREFIX, TAIL = 18, 6
MOST = PREFIX + TAIL
CONFIG = tiny_config(num_layers=1)
PATTERN = Pattern(tail=TAIL, budget=5, kernel=3)


def inputs(length):
    """q, k, v and the gradient of the output."""
    rng = np.random.default_rng(length)
    shapes = [(BATCH, length, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def dense_attention(q, k, v, seen):
    """Plain masked attention; `seen` is `[B, K, T, S]`, one mask for the heads of a group."""
    grouped = q.reshape(BATCH, -1, KV_HEADS, HEADS // KV_HEADS, HEAD_DIM)
    logits = SCALE * jnp.einsum("btkgh,bskh->bkgts", grouped, k)
    p = jax.nn.softmax(jnp.where(seen[:, :, None], logits, -jnp.inf), axis=-1)
    return jnp.einsum("bkgts,bskh->btkgh", p, v).reshape(q.shape)


def with_gradients(attention, q, k, v, dout):
    """The output and the gradients of q, k and v."""
    out, pull = jax.vjp(attention, q, k, v)
    return [out, *pull(dout)]


@jax.jit
def _dense_gradients(q, k, v, dout, seen):
    return with_gradients(functools.partial(dense_attention, seen=seen), q, k, v, dout)


def dense_gradients(q, k, v, dout, seen):
    """Those of plain masked attention, of one program: texts are filled up to `MOST` tokens."""
    length = q.shape[1]
    more = (0, MOST - length)
    arrays = [np.pad(array, [(0, 0), more, (0, 0), (0, 0)]) for array in (q, k, v, dout)]
    # What is filled up sees itself.
    seen = np.pad(seen, [(0, 0), (0, 0), more, more]) | np.eye(MOST, dtype=bool)
    return [found[:, :length] for found in _dense_gradients(*arrays, seen)]


def assert_same(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def causal_mask(length):
    seen = np.tril(np.ones((length, length), bool))
    return np.broadcast_to(seen, (BATCH, KV_HEADS, length, length))


def masked_tail(q, k, pattern):
    """`[B, K, T, S]`: causal, but of the prefix the last rows see what numpy's choice keeps."""
    how = {"budget": pattern.budget, "kernel": pattern.kernel, "over": pattern.over_group}
    how |= {"kind": "max", "forced": int(pattern.force_self)}
    seen = causal_mask(q.shape[1]).copy()
    for row in range(BATCH):
        p = probabilities(q[row, PREFIX - 1 : PREFIX], k[row, :PREFIX], np.ones((1, PREFIX), bool))
        for head, ids in enumerate(choose(p, KV_HEADS, **how)):
            seen[row, head, PREFIX:, :PREFIX] = np.isin(np.arange(PREFIX), ids)
    return seen


@pytest.mark.parametrize("length", [1, 5, 13])
def test_causal_gradients_are_those_of_dense_attention(length):
    streamed = functools.partial(causal_attention, scale=SCALE, block=5)
    arrays = inputs(length)
    found = jax.jit(functools.partial(with_gradients, streamed))(*arrays)
    assert_same(found, dense_gradients(*arrays, causal_mask(length)))


@pytest.mark.parametrize("shards", [(2, 5), (3, 4)])
def test_runs_of_a_texts_queries_have_the_gradients_of_the_whole(shards):
    count, own = shards
    q, k, v, dout = inputs(count * own)
    expected = dense_gradients(q, k, v, dout, causal_mask(count * own))

    @jax.jit
    def run(q, k, v, dout, ahead):
        attend = functools.partial(causal_attention, scale=SCALE, block=3, ahead=ahead)
        return with_gradients(attend, q, k, v, dout)

    runs = [
        run(q[:, start : start + own], k, v, dout[:, start : start + own], jnp.int32(start))
        for start in range(0, count * own, own)
    ]
    outs, dqs, dks, dvs = zip(*runs, strict=True)
    assert_same([np.concatenate(outs, 1), np.concatenate(dqs, 1), sum(dks), sum(dvs)], expected)


@pytest.mark.parametrize(
    "pattern",
    [
        PATTERN,
        Pattern(tail=TAIL, budget=3, kernel=1, over_group="mean", force_self=False),
        Pattern(tail=TAIL, budget=4, kernel=3, over_group="first"),
    ],
)
def test_the_patterns_gradients_are_those_of_a_dense_mask(pattern):
    q, k, v, dout = inputs(PREFIX + TAIL)
    seen = masked_tail(q, k, pattern)
    assert not np.array_equal(seen, causal_mask(PREFIX + TAIL))
    sparse = functools.partial(pattern_attention, pattern, scale=SCALE)
    found = jax.jit(functools.partial(with_gradients, sparse))(q, k, v, dout)
    assert_same(found, dense_gradients(q, k, v, dout, seen))


@functools.cache
def engine_of():
    """Decodes by RefreshKV without full steps, with the same weights."""
    method = RefreshKV(budget=5, kernel=3, schedule="fixed", stride=1000, evict_on_push=False)
    return tiny_engine(method, config=CONFIG, chunk=PREFIX)


@functools.cache
def model_logits(pattern, mesh=(1, 1, 1)):
    """The tiny model's logits `[B, T, V]` of `TEXTS` under a pattern."""
    attend = attend_with(CONFIG, make_mesh(*mesh), pattern)

    @jax.jit
    def run(params, tokens):
        model = model_of(CONFIG, params)
        return model.logits(hidden_states(model, tokens, attend))

    return np.asarray(run(jax.device_get(engine_of().params), jnp.array(TEXTS, jnp.int32)))


TEXTS = random_rows([PREFIX + TAIL] * 2, seed=7)


def test_rk_6_the_pattern_is_decoding_without_a_full_step():
    ends = [(0, 0), (0, PREFIX), (PREFIX, None)]
    parts = [[row[begin:end] for row in TEXTS] for begin, end in ends]
    decoded = [last_logits(step) for step in steps(engine_of(), *parts)]
    logits = model_logits(PATTERN)
    np.testing.assert_allclose(logits[:, PREFIX - 1 :], np.stack(decoded, 1), atol=1e-4)
    # The pattern is another than causal attention, on the last rows alone.
    causal = model_logits(Pattern())
    np.testing.assert_allclose(logits[:, :PREFIX], causal[:, :PREFIX], atol=1e-5)
    assert np.all(np.abs(logits[:, PREFIX:] - causal[:, PREFIX:]).max(-1) > 1e-3)


def test_rk_7_a_budget_of_the_whole_prefix_or_more_is_causal():
    pattern = Pattern(tail=TAIL, budget=2048, kernel=3)
    np.testing.assert_allclose(model_logits(pattern), model_logits(Pattern()), atol=1e-5)


@pytest.mark.parametrize("mesh", [(2, 1, 2), (1, 4, 2)])
def test_the_pattern_is_the_same_over_data_tokens_and_heads(mesh):
    # With four shards of six tokens the tail is one shard's, the choosing row another's.
    np.testing.assert_allclose(model_logits(PATTERN, mesh), model_logits(PATTERN), atol=1e-5)


@pytest.mark.optimized
def test_no_rows_of_scores_over_the_whole_text_are_held():
    length = 32768
    sparse = functools.partial(pattern_attention, Pattern(tail=64, budget=1024), scale=SCALE)

    def loss(q, k, v):
        return jnp.sum(sparse(q, k, v) ** 2)

    arrays = [
        jax.ShapeDtypeStruct((1, length + 64, heads, HEAD_DIM), jnp.float32) for heads in (2, 1, 1)
    ]
    compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*arrays).compile()
    # Less than 256 columns of scores, or 256 rows, would take.
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * 256 * length * 4


@pytest.mark.parametrize(
    ("config", "mesh", "tail", "message"),
    [
        (tiny_config(), (1, 5, 1), 0, "24 tokens do not divide over mesh axis seq=5"),
        (tiny_config(), (1, 1, 1), 24, "tail=24 leaves none of a text's 24 tokens"),
        (tiny_config(windows=(8, None)), (1, 1, 1), 0, "sliding window"),
        (tiny_config(), (1, 1, 4), 0, "kv_heads=2 does not divide"),
    ],
)
def test_what_cannot_be_trained_is_refused(config, mesh, tail, message):
    with pytest.raises(ConfigError, match=message):
        check_attention(config, make_mesh(*mesh), Pattern(tail=tail), 24)
