"""The training patterns against dense masked attention, and against decoding with RefreshKV; and
evaluations by both.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_longctx.errors import ConfigError, InputError
from jax_longctx.evaluation.perplexity import perplexity, score_texts
from jax_longctx.methods import RefreshKV
from jax_longctx.models.llama import model_of
from jax_longctx.sharding import make_mesh
from tests.jax_longctx.methods.harness import last_logits, steps
from tests.jax_longctx.methods.oracles.partial_cache import choose
from tests.oracle import probabilities
from tests.support import random_rows, tiny_config, tiny_engine
from tests.train_cpt.tiny_run import tiny_setup
from train_cpt.attention import (
    Pattern,
    attend_with,
    causal_attention,
    check_attention,
    pattern_attention,
)
from train_cpt.evaluate import dev_losses, drop_interval, parse_method
from train_cpt.step import hidden_states, text_losses

BATCH, HEADS, KV_HEADS, HEAD_DIM = 2, 4, 2, 8
SCALE = HEAD_DIM**-0.5
PREFIX, TAIL = 18, 6
LENGTH = PREFIX + TAIL
CONFIG = tiny_config(num_layers=1)
PATTERN = Pattern(tail=TAIL, budget=5, kernel=3)
# RefreshKV without full steps, and without eviction from its small cache, is this.
NEVER = "snapkv:budget=5,kernel=3,window=1,over_group=max"
TEXTS = np.array(random_rows([LENGTH] * 4, seed=7), np.int32)
CAUSAL = np.broadcast_to(np.tri(LENGTH, dtype=bool), (BATCH, KV_HEADS, LENGTH, LENGTH))


def inputs():
    rng = np.random.default_rng(0)
    shapes = [(BATCH, LENGTH, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def dense_attention(q, k, v, seen):
    """Plain masked attention; `seen` is `[B, K, T, S]`, one mask for the heads of a group."""
    grouped = q.reshape(BATCH, -1, KV_HEADS, HEADS // KV_HEADS, HEAD_DIM)
    logits = SCALE * jnp.einsum("btkgh,bskh->bkgts", grouped, k)
    p = jax.nn.softmax(jnp.where(seen[:, :, None], logits, -jnp.inf), axis=-1)
    return jnp.einsum("bkgts,bskh->btkgh", p, v).reshape(q.shape)


def with_gradients(attention, q, k, v, dout):
    out, pull = jax.vjp(attention, q, k, v)
    return [out, *pull(dout)]


@jax.jit
def dense_gradients(q, k, v, dout, seen):
    return with_gradients(functools.partial(dense_attention, seen=seen), q, k, v, dout)


def assert_same(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def masked_tail(q, k, pattern):
    """`[B, K, T, S]`: causal, but of the prefix the last rows see what numpy's choice keeps."""
    how = {"budget": pattern.budget, "kernel": pattern.kernel, "over": pattern.over_group}
    how |= {"kind": "max", "forced": int(pattern.force_self)}
    seen = CAUSAL.copy()
    for row in range(BATCH):
        p = probabilities(q[row, PREFIX - 1 : PREFIX], k[row, :PREFIX], np.ones((1, PREFIX), bool))
        for head, ids in enumerate(choose(p, KV_HEADS, **how)):
            seen[row, head, PREFIX:, :PREFIX] = np.isin(np.arange(PREFIX), ids)
    return seen


@pytest.mark.parametrize(("count", "block"), [(1, 5), (1, 24), (1, 99), (2, 5), (3, 3), (24, 1)])
@pytest.mark.quick("1-5", "1-99", "3-3")
def test_the_gradients_of_a_texts_runs_of_queries_are_those_of_dense_attention(count, block):
    q, k, v, dout = inputs()
    own = LENGTH // count

    @jax.jit
    def run(q, k, v, dout, ahead):
        attend = functools.partial(causal_attention, scale=SCALE, block=block, ahead=ahead)
        return with_gradients(attend, q, k, v, dout)

    runs = [
        run(q[:, start : start + own], k, v, dout[:, start : start + own], jnp.int32(start))
        for start in range(0, LENGTH, own)
    ]
    outs, dqs, dks, dvs = zip(*runs, strict=True)
    expected = dense_gradients(q, k, v, dout, CAUSAL)
    assert_same([np.concatenate(outs, 1), np.concatenate(dqs, 1), sum(dks), sum(dvs)], expected)


@pytest.mark.parametrize(
    "pattern",
    [
        PATTERN,
        Pattern(tail=TAIL, budget=3, kernel=1, over_group="mean", force_self=False),
        Pattern(tail=TAIL, budget=4, kernel=3, over_group="first"),
    ],
)
@pytest.mark.quick("pattern0", "pattern1")
def test_the_patterns_gradients_are_those_of_a_dense_mask(pattern):
    q, k, v, dout = inputs()
    seen = masked_tail(q, k, pattern)
    assert not np.array_equal(seen, CAUSAL)
    sparse = functools.partial(pattern_attention, pattern, scale=SCALE)
    found = jax.jit(functools.partial(with_gradients, sparse))(q, k, v, dout)
    assert_same(found, dense_gradients(q, k, v, dout, seen))


@functools.cache
def engine_of(spec):
    return tiny_engine(parse_method(spec), config=CONFIG, chunk=PREFIX)


@functools.cache
def model_logits(pattern, mesh=(1, 1, 1)):
    """The tiny model's logits `[B, T, V]` of `TEXTS` under a pattern."""
    attend = attend_with(CONFIG, make_mesh(*mesh), pattern)

    @jax.jit
    def run(params, tokens):
        model = model_of(CONFIG, params)
        return model.logits(hidden_states(model, tokens, attend))

    return np.asarray(run(jax.device_get(engine_of(NEVER).params), TEXTS))


def test_rk_6_the_pattern_is_decoding_without_a_full_step():
    ends = [(0, 0), (0, PREFIX), (PREFIX, None)]
    parts = [TEXTS[:, begin:end].tolist() for begin, end in ends]
    decoded = [last_logits(step) for step in steps(engine_of(NEVER), *parts)]
    logits = model_logits(PATTERN)
    np.testing.assert_allclose(logits[:, PREFIX - 1 :], np.stack(decoded, 1), atol=1e-4)
    # The pattern is another than causal attention, on the last rows alone.
    causal = model_logits(Pattern())
    np.testing.assert_allclose(logits[:, :PREFIX], causal[:, :PREFIX], atol=1e-5)
    assert np.all(np.abs(logits[:, PREFIX:] - causal[:, PREFIX:]).max(-1) > 1e-3)


@pytest.mark.parametrize(
    ("pattern", "mesh", "expected"),
    [
        (Pattern(tail=TAIL, budget=2048, kernel=3), (1, 1, 1), Pattern()),
        pytest.param(PATTERN, (2, 1, 2), PATTERN, marks=pytest.mark.slow),
        # With four shards of six tokens the tail is one shard's, the choosing row another's.
        (PATTERN, (1, 4, 2), PATTERN),
    ],
)
def test_rk_7_a_budget_of_the_prefix_is_causal_and_every_mesh_computes_the_same(
    pattern, mesh, expected
):
    np.testing.assert_allclose(model_logits(pattern, mesh), model_logits(expected), atol=1e-5)


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


@functools.cache
def losses_of(spec):
    how = {"through": "decode", "score": TAIL, "batch": len(TEXTS)}
    return score_texts(engine_of(spec), TEXTS, **how).losses


def setup_of(pattern):
    return dataclasses.replace(tiny_setup(), pattern=pattern)


def trained_losses(pattern):
    """Mean loss of every text's last tokens as training computes it."""
    params = jax.device_get(engine_of("full").params)
    return [float(text_losses(setup_of(pattern), params, text[None], TAIL)) for text in TEXTS]


def test_decoding_computes_what_training_does():
    full, sparse = losses_of("full"), losses_of(NEVER).mean(1)
    assert full.shape == (len(TEXTS), TAIL)
    np.testing.assert_allclose(full.mean(1), trained_losses(Pattern()), atol=1e-4)
    np.testing.assert_allclose(sparse, trained_losses(PATTERN), atol=1e-4)
    assert np.all(np.abs(sparse - full.mean(1)) > 1e-3)


@pytest.mark.thorough
def test_an_evaluation_reads_the_dev_texts_as_trained_and_as_decoded():
    params = engine_of("full").params
    dev = np.concatenate([TEXTS, TEXTS[:1]])
    how = {"rows": 1, "texts": 4, "methods": [NEVER]}
    found = dev_losses(setup_of(PATTERN), params, dev, **how)
    assert found == {
        "dev_loss": pytest.approx(np.mean(trained_losses(PATTERN)), abs=1e-4),
        f"dev_perplexity/{NEVER}": pytest.approx(perplexity(losses_of(NEVER)), rel=1e-4),
    }
    # Without a sparse tail all tokens but the first count, or as many as are asked for.
    few = dev_losses(setup_of(Pattern()), params, dev, rows=4, texts=7, last=TAIL)
    assert few["dev_loss"] == pytest.approx(np.mean(losses_of("full")), abs=1e-4)
    every = dev_losses(setup_of(Pattern()), params, dev, rows=4, texts=7)["dev_loss"]
    assert abs(every - few["dev_loss"]) > 1e-3


def test_methods_are_named_with_their_settings():
    method = parse_method("refreshkv:schedule=fixed,stride=25")
    assert method == dataclasses.replace(RefreshKV(), schedule="fixed", stride=25)
    with pytest.raises(InputError, match=r"'refreshkv:stride' is not understood"):
        parse_method("refreshkv:stride")
    with pytest.raises(ConfigError, match="unknown method"):
        parse_method("nothing")


def test_what_losses_fell_by_has_an_interval_over_texts():
    rng = np.random.default_rng(0)
    before = rng.normal(3, 1, 400)
    # The texts differ much more than what they fell by: only paired does the interval close.
    after = before - rng.normal(0.1, 0.2, 400)
    estimate, low, high = drop_interval(before, after)
    assert estimate == pytest.approx(np.mean(before - after))
    # 1.96 standard errors of 0.01.
    assert high - low == pytest.approx(2 * 1.96 * 0.2 / 20, rel=0.15) and low < estimate < high
    more = drop_interval(before, after, (before + 1, after + 1))
    assert more == pytest.approx((0, 0, 0), abs=1e-12)
    assert drop_interval(before, before - 1, (before, before - 0.25)) == pytest.approx([0.75] * 3)
    # A single text has no interval.
    assert drop_interval(before[:1], before[:1] - 1)[0] == pytest.approx(1)
    assert np.isnan(drop_interval(before[:1], before[:1] - 1)[1:]).all()
