import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_longctx.engine import Sampling
from jax_longctx.engine.sampling import (
    AMONG_ALL,
    AMONG_FEW,
    DRAWN,
    next_token,
    sampling_static,
    sampling_values,
)
from jax_longctx.errors import InputError

ROWS = 20_000
LOGITS = np.array([0.5, 2.0, -1.0, 1.0, 2.0, -3.0], np.float32)
# Of probabilities 0.4, 0.3, 0.2, 0.1, not in their order.
SHUFFLED = np.log(np.array([0.2, 0.4, 0.1, 0.3], np.float32))
# One program for all numbers of logits.
_next_token = jax.jit(next_token, static_argnums=5)
FILTERS = [{}, {"top_k": 40}, {"top_p": 0.99}]
NAN, INF = float("nan"), float("inf")


@functools.cache
def seeds_of(seed, rows):
    return Sampling(seed=seed).of_rows(rows).seed


def pick(logits, sampling, *, seen=None, count=0):
    """Tokens of `logits [B, V]` through one compiled `next_token`, as the engine calls it."""
    logits = jnp.asarray(logits, jnp.float32)
    rows = len(logits)
    if isinstance(sampling.seed, int):
        sampling = dataclasses.replace(sampling, seed=seeds_of(sampling.seed, rows))
    tokens = _next_token(
        logits,
        None if seen is None else jnp.asarray(seen),
        jnp.full(rows, count, jnp.int32),
        jnp.ones(rows, bool),
        sampling_values(sampling, rows),
        sampling_static(sampling),
    )
    return np.asarray(tokens)


def softmax(logits):
    weights = np.exp(logits - np.max(logits))
    return weights / weights.sum()


@pytest.mark.parametrize("options", [{"top_k": 3, "top_p": 0.5, "seed": 7}, {"temperature": 1e-4}])
def test_greedy_and_a_tiny_temperature_take_the_largest(options):
    logits = np.random.default_rng(0).normal(size=(50, 64)).astype(np.float32)
    np.testing.assert_array_equal(pick(logits, Sampling(**options)), logits.argmax(axis=1))
    # Of equals the first.
    assert pick(LOGITS[None], Sampling()) == [1]


# The share that is drawn of the three best at temperature 2.
WARM = softmax(SHUFFLED[[1, 3, 0]] / 2.0)


@pytest.mark.parametrize(
    ("logits", "kept", "options"),
    [
        *((LOGITS, range(6), {"temperature": it}) for it in (0.5, 1.0, 3.0)),
        # A k beyond the vocabulary is all of it; of the two best, equal, the first comes first.
        (LOGITS, [1], {"temperature": 2.0, "top_k": 1}),
        (LOGITS, [1, 4, 3], {"temperature": 2.0, "top_k": 3}),
        (LOGITS, range(6), {"temperature": 2.0, "top_k": 100}),
        # The smallest set that reaches p.
        *((SHUFFLED, [1], {"top_p": p}) for p in (1e-6, 0.39)),
        *((SHUFFLED, [1, 3], {"top_p": p}) for p in (0.41, 0.69)),
        (SHUFFLED, [1, 3, 0], {"top_p": 0.71}),
        (SHUFFLED, range(4), {"top_p": 0.95}),
        # A share of the likeliest one's, behind temperature, with and without a rank.
        *((SHUFFLED, [1, 3], {"min_p": 0.6, **more}) for more in ({}, {"top_k": 3})),
        (SHUFFLED, [1, 3, 0], {"min_p": 0.6, "temperature": 2.0}),
        (SHUFFLED, [1], {"min_p": 1.0, "top_p": 0.9}),
        # Of equals only as many as it needs.
        (np.zeros(4), [0, 1], {"top_p": 0.45}),
        # It counts after temperature and top-k, as transformers orders them.
        (SHUFFLED, [1, 3], {"temperature": 2.0, "top_k": 3, "top_p": float(WARM[:2].sum()) - 0.01}),
    ],
    ids=str,
)
def test_frequencies_are_those_of_what_is_kept(logits, kept, options):
    """Six standard deviations of a frequency over `ROWS` independent rows; zeros stay zeros."""
    sampling = Sampling(**{"temperature": 1.0, "seed": 1, **options})
    expected = np.zeros(len(logits))
    expected[list(kept)] = softmax(logits[list(kept)] / sampling.temperature)
    drawn = pick(np.tile(logits, (ROWS, 1)), sampling)
    frequency = np.bincount(drawn, minlength=len(logits)) / ROWS
    error = 6 * np.sqrt(expected * (1 - expected) / ROWS)
    assert np.all(np.abs(frequency - expected) <= error), (frequency, expected)


def test_few_candidates_are_ranked_without_the_rest_of_the_vocabulary():
    kinds = [sampling_static(Sampling(temperature=1.0, top_k=k)).kinds for k in (0, 1, 128, 129)]
    assert kinds == [(DRAWN,), (AMONG_FEW,), (AMONG_FEW,), (AMONG_ALL,)]
    # A share that rounds to all leaves nothing out.
    almost = Sampling(temperature=1.0, top_p=1 - 1e-9)
    assert sampling_static(almost) == sampling_static(Sampling(temperature=1.0))


def test_the_penalty_divides_positive_and_multiplies_negative_logits():
    logits = np.random.default_rng(2).normal(size=(200, 16)).astype(np.float32)
    seen = np.random.default_rng(3).random(size=(200, 16)) < 0.7
    penalised = np.where(seen, np.where(logits > 0, logits / 1.7, logits * 1.7), logits)
    expected = penalised.argmax(axis=1)
    drawn = pick(logits, Sampling(repetition_penalty=1.7), seen=seen)
    np.testing.assert_array_equal(drawn, expected)
    assert np.any(expected != logits.argmax(axis=1))
    # Dividing a negative logit would make its token likelier.
    assert pick([[-1.0, -1.2]], Sampling(repetition_penalty=1.5), seen=[[True, False]]) == [1]


@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_rows_draw_by_their_seeds_and_by_their_places_under_one(options):
    flat = np.zeros((64, 50), np.float32)
    sampling, other = (Sampling(temperature=1.0, seed=seed, **options) for seed in (11, 12))
    drawn = pick(flat, sampling)
    assert len(set(drawn.tolist())) > 20
    places = [30, 2, 63]
    among = sampling.at((place,) for place in places)
    np.testing.assert_array_equal(pick(flat[:3], among), drawn[places])
    assert np.mean(pick(flat, other) == drawn) < 0.25
    assert np.mean(pick(flat, sampling, count=1) == drawn) < 0.25
    # A row with a seed of its own draws alike wherever it stands.
    logits = np.random.default_rng(4).normal(size=(16, 50)).astype(np.float32)
    logits[15], seeds = logits[0], (7, *range(100, 114), 7)
    drawn = pick(logits, Sampling(temperature=1.0, seed=seeds, **options))
    assert drawn[0] == drawn[15]
    for row in (0, 3, 15):
        alone = Sampling(temperature=1.0, seed=(seeds[row],), **options)
        assert pick(logits[row : row + 1], alone) == drawn[row]


def test_noise_goes_with_the_token_and_not_with_its_rank():
    """Rounding may swap two logits that are close; that draws the same token."""
    logits = np.zeros((500, 40), np.float32)
    moved = logits + np.random.default_rng(5).normal(size=logits.shape).astype(np.float32) * 1e-6
    sampling = Sampling(temperature=1.0, top_k=40, seed=3)
    np.testing.assert_array_equal(pick(logits, sampling), pick(moved, sampling))


def test_places_are_told_apart_by_row_question_and_seed():
    one = Sampling(seed=1)
    places = [(row, question) for row in (0, 1, 2**32) for question in (0, 1)]
    found = {seed for n in (1, 2, 2**32 + 1) for seed in Sampling(seed=n).at(places).seed}
    assert len(found) == 3 * len(places)
    assert one.at([(5,)]) == one.at([(5, 0)]) and one.at([(0,), (1,)]) == one.of_rows(2)
    with pytest.raises(InputError, match="3 rows need as many seeds, 2 given"):
        Sampling(seed=(1, 2)).of_rows(3)
    with pytest.raises(InputError, match="a seed of its own already"):
        Sampling(seed=(1, 2)).at([(0,), (1,)])


TIES = np.array([[0.0, 3.0, 2.9999, -800.0, 3.0]], np.float32).repeat(200, axis=0)


@pytest.mark.parametrize("options", [*FILTERS, {"top_k": 2, "top_p": 1e-300}], ids=str)
@pytest.mark.parametrize("temperature", [1e-300, 1e-38, 1e-36, 1e-10])
def test_the_smallest_temperatures_draw_among_the_largest_logits(temperature, options):
    """As the limit does, where the largest are equal; products and quotients stay numbers."""
    for scale in (1.0, 1e-3, 1e30):
        drawn = set(pick(TIES * scale, Sampling(temperature=temperature, **options)).tolist())
        assert drawn == ({1} if "top_p" in options and options["top_p"] < 0.5 else {1, 4})


def test_the_largest_temperature_draws_from_all_alike():
    logits = np.tile([5.0, -1000.0, 0.0, 2.0], (ROWS, 1))
    for temperature in (1e30, 1e300):
        drawn = pick(logits, Sampling(temperature=temperature))
        assert np.abs(np.bincount(drawn, minlength=4) / ROWS - 0.25).max() < 0.02


@pytest.mark.parametrize("penalty", [1e-6, 1e6])
@pytest.mark.parametrize("temperature", [0.0, 1e-38, 1.0])
def test_the_extremes_of_the_penalty_keep_the_order(penalty, temperature):
    logits = np.array([[2.0, 3.0, -1.0, -2.0]] * 50, np.float32)
    seen = np.ones_like(logits, bool)
    drawn = pick(logits, Sampling(repetition_penalty=penalty, temperature=temperature), seen=seen)
    if temperature != 1 or penalty < 1:
        assert set(drawn.tolist()) == {1}
    else:
        # Divided by so much the two first are alike.
        assert set(drawn.tolist()) == {0, 1}


@pytest.mark.parametrize(
    ("name", "range_", "values"),
    [
        ("temperature", "at least 0 and finite", (-0.1, NAN, INF)),
        ("top_k", r"at least 0 \(0 is off\)", (-1,)),
        ("top_p", "above 0 and at most 1", (0.0, 1.5, NAN)),
        ("min_p", "from 0 to 1", (-0.1, 1.5, NAN)),
        *((f"{name}_penalty", "from -2 to 2", (-2.1, NAN)) for name in ("presence", "frequency")),
        ("repetition_penalty", "from 1e-06 to 1,000,000", (0.0, NAN, INF, 1e-30)),
        ("seed", "from 0 to .*", (-1, (1, 2**64), ())),
    ],
)
def test_bad_settings_are_named(name, range_, values):
    for value in values:
        with pytest.raises(InputError, match=f"^{name} must be {range_}, got ") as error:
            Sampling(**{name: value})
        assert str(error.value).endswith(f"got {value}")
    # The edges are good.
    Sampling(temperature=0.0, top_k=0, top_p=1.0, repetition_penalty=0.5)
