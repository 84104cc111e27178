"""Losses of a text's last tokens as methods decode them, against the training pattern's own."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from jax_longctx.errors import ConfigError, InputError
from jax_longctx.evaluation.perplexity import perplexity, score_texts
from jax_longctx.methods import RefreshKV
from jax_longctx.sharding import make_mesh
from tests.support import random_rows, tiny_config, tiny_engine
from tests.train_cpt.tiny_run import tiny_setup
from train_cpt.attention import Pattern
from train_cpt.evaluate import dev_losses, drop_interval, parse_method
from train_cpt.step import text_losses

LENGTH, TAIL = 22, 5
CONFIG = tiny_config(num_layers=1)
PATTERN = Pattern(tail=TAIL, budget=6, kernel=3)
TEXTS = np.array(random_rows([LENGTH] * 3, seed=3), np.int32)
NEVER = "refreshkv:budget=6,kernel=3,schedule=fixed,stride=1000,evict_on_push=false"


@functools.cache
def engine_of(spec, mesh=(1, 1, 1)):
    return tiny_engine(parse_method(spec), config=CONFIG, chunk=8, mesh=make_mesh(*mesh))


@functools.cache
def losses_of(spec, mesh=(1, 1, 1), batch=3):
    engine = engine_of(spec, mesh)
    return score_texts(engine, TEXTS, through="decode", score=TAIL, batch=batch).losses


def setup_of(pattern):
    return dataclasses.replace(tiny_setup(), pattern=pattern)


def trained_losses(pattern):
    """Mean loss of every text's last tokens as training computes it."""
    params = jax.device_get(engine_of("full").params)
    return [float(text_losses(setup_of(pattern), params, text[None], TAIL)) for text in TEXTS]


def test_decoding_computes_what_training_does():
    """Full attention as causal training, RefreshKV without full steps as its pattern."""
    full, sparse = losses_of("full"), losses_of(NEVER).mean(1)
    assert full.shape == (3, TAIL)
    np.testing.assert_allclose(full.mean(1), trained_losses(Pattern()), atol=1e-4)
    np.testing.assert_allclose(sparse, trained_losses(PATTERN), atol=1e-4)
    assert np.all(np.abs(sparse - full.mean(1)) > 1e-3)


@pytest.mark.thorough
def test_losses_follow_caches_that_shrink_and_depend_neither_on_the_batch_nor_on_the_mesh():
    # SnapKV whose window is the question alone is RefreshKV that never takes a full step.
    snapkv = losses_of("snapkv:budget=6,window=1,kernel=3,over_group=max")
    for found in (snapkv, losses_of(NEVER, mesh=(2, 1, 2), batch=2)):
        np.testing.assert_allclose(found, losses_of(NEVER), atol=1e-5)


@pytest.mark.thorough
def test_an_evaluation_reads_the_dev_texts_as_trained_and_as_decoded():
    params = engine_of("full").params
    dev = np.concatenate([TEXTS, TEXTS[:1]])
    how = {"rows": 1, "texts": 3, "methods": [NEVER]}
    found = dev_losses(setup_of(PATTERN), params, dev, **how)
    assert found == {
        "dev_loss": pytest.approx(np.mean(trained_losses(PATTERN)), abs=1e-4),
        f"dev_perplexity/{NEVER}": pytest.approx(perplexity(losses_of(NEVER)), rel=1e-4),
    }
    # Without a sparse tail all tokens but the first count, or as many as are asked for.
    few = dev_losses(setup_of(Pattern()), params, dev, rows=3, texts=5, last=TAIL)
    assert few["dev_loss"] == pytest.approx(np.mean(losses_of("full")), abs=1e-4)
    every = dev_losses(setup_of(Pattern()), params, dev, rows=3, texts=5)["dev_loss"]
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
