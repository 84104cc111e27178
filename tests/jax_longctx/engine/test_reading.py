import numpy as np
import pytest

from jax_longctx.engine.prefill import prefill_question
from jax_longctx.errors import ConfigError
from jax_longctx.methods import METHODS
from jax_longctx.sharding import make_mesh
from tests.small_methods import small_method
from tests.support import tiny_engine

READING = {name: small_method(name) for name in METHODS}
READING = {name: one for name, one in READING.items() if one.cannot_read_blocks is None}
ALL, FEW = "xattention:mass=1", "xattention:density=0.01"


def tokens(count, seed=0):
    return np.random.default_rng(seed).integers(1, 60, count).tolist()


TEXTS, QUESTIONS = [tokens(700, 1), tokens(413, 2)], [tokens(3), tokens(2)]


def logits(method, reading, texts=TEXTS, questions=QUESTIONS, **how):
    engine = tiny_engine(method, **{"chunk": 128, **how}, reading=reading)
    needs = {"questions": questions} if engine.method.info.needs_question else {}
    context = engine.prefill(texts, reserve=max(map(len, questions)) + 1, **needs)
    with engine.asked(context, keep=False) as live:
        given = engine.setup, engine.params, live, questions, context.total
        return np.asarray(prefill_question(*given))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("full", "snapkv") else pytest.mark.slow)
        for name in READING
    ],
)
def test_a_method_reads_blocks_of_a_text(name):
    """All blocks give what exact reading gives, and few of them something else."""
    method = READING[name]
    exact = logits(method, None)
    np.testing.assert_allclose(logits(method, ALL), exact, atol=1e-4)
    assert np.all(np.max(np.abs(logits(method, FEW) - exact), axis=-1) > 1e-2)


@pytest.mark.parametrize(
    ("reading", "how"),
    [
        ("xattention:mass=0.7", {}),
        ("xattention:mass=0.7", {"kv": "int8"}),
        ("flex:mass=0.7", {}),
        ("flex:mass=0.7", {"kv": "int8"}),
        ("vertical-slash:density=0.5", {}),
    ],
)
def test_a_ragged_batch_reads_as_each_row_alone(reading, how):
    together = logits(None, reading, **how)
    for row, text, question in zip(together, TEXTS, QUESTIONS, strict=True):
        alone = logits(None, reading, [text], [question], **how)
        np.testing.assert_allclose(row, alone[0], atol=1e-4)


def test_slots_in_stripes_over_shards():
    mesh = make_mesh(seq=2)
    exact = logits(None, None)
    np.testing.assert_allclose(logits(None, ALL, mesh=mesh), exact, atol=1e-4)
    assert np.max(np.abs(logits(None, FEW, mesh=mesh) - exact)) > 1e-2


def test_questions_and_the_chunk_itself_are_read_whole():
    texts, questions = [tokens(128, 1)], [tokens(300)]
    exact = logits(None, None, texts, questions)
    np.testing.assert_array_equal(logits(None, FEW, texts, questions), exact)


@pytest.mark.parametrize("name", sorted(METHODS.keys() - READING))
def test_methods_that_do_not_read_exactly_say_so(name):
    with pytest.raises(ConfigError, match=f"^{name} cannot read blocks of a text: it does not"):
        tiny_engine(small_method(name), reading="xattention")
