"""The choice of a token against numpy, and the distribution it is drawn from."""

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


def pick(logits, sampling, *, seen=None, count=0):
    """Tokens of `logits [B, V]` through one compiled `next_token`, as the engine calls it."""
    logits = jnp.asarray(logits, jnp.float32)
    rows = len(logits)
    run = jax.jit(next_token, static_argnums=5)
    given = sampling.of_rows(rows)
    tokens = run(
        logits,
        None if seen is None else jnp.asarray(seen),
        jnp.full(logits.shape[:1], count, jnp.int32),
        jnp.ones(rows, bool),
        sampling_values(given, rows),
        sampling_static(sampling),
    )
    return np.asarray(tokens)


def softmax(logits):
    weights = np.exp(logits - np.max(logits))
    return weights / weights.sum()


def check_frequencies(sampling, expected, logits=LOGITS):
    """Six standard deviations of a frequency over `ROWS` independent rows; zeros stay zeros."""
    drawn = pick(np.tile(logits, (ROWS, 1)), sampling)
    frequency = np.bincount(drawn, minlength=len(logits)) / ROWS
    error = 6 * np.sqrt(expected * (1 - expected) / ROWS)
    assert np.all(np.abs(frequency - expected) <= error), (frequency, expected)


def test_greedy_takes_the_largest_and_of_equals_the_first():
    logits = np.random.default_rng(0).normal(size=(50, 64)).astype(np.float32)
    sampling = Sampling(top_k=3, top_p=0.5, seed=7)
    np.testing.assert_array_equal(pick(logits, sampling), logits.argmax(axis=1))
    assert pick(LOGITS[None], Sampling()) == [1]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_frequencies_follow_the_temperature(temperature):
    expected = softmax(LOGITS / temperature)
    check_frequencies(Sampling(temperature=temperature, seed=1), expected)


def test_a_tiny_temperature_is_greedy():
    logits = np.random.default_rng(1).normal(size=(50, 64)).astype(np.float32)
    drawn = pick(logits, Sampling(temperature=1e-4))
    np.testing.assert_array_equal(drawn, logits.argmax(axis=1))


@pytest.mark.parametrize(("top_k", "kept"), [(1, [1]), (3, [1, 4, 3]), (100, range(6))])
def test_top_k_draws_from_the_k_best(top_k, kept):
    """A k beyond the vocabulary is all of it; of the two best, equal, the first comes first."""
    masked = np.full_like(LOGITS, -np.inf)
    masked[list(kept)] = LOGITS[list(kept)]
    sampling = Sampling(temperature=2.0, top_k=top_k, seed=2)
    check_frequencies(sampling, softmax(masked / 2.0))


# Logits of probabilities 0.4, 0.3, 0.2, 0.1, not in their order.
SHUFFLED = np.log(np.array([0.2, 0.4, 0.1, 0.3], np.float32))


def test_few_candidates_are_ranked_without_the_rest_of_the_vocabulary():
    kinds = [sampling_static(Sampling(temperature=1.0, top_k=k)).kinds for k in (0, 1, 128, 129)]
    assert kinds == [(DRAWN,), (AMONG_FEW,), (AMONG_FEW,), (AMONG_ALL,)]


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(1e-6, [1]), (0.39, [1]), (0.41, [1, 3]), (0.69, [1, 3]), (0.71, [1, 3, 0]), (0.95, range(4))],
)
def test_top_p_draws_from_the_smallest_set_that_reaches_p(top_p, kept):
    expected = np.zeros(4)
    expected[list(kept)] = np.exp(SHUFFLED[list(kept)])
    sampling = Sampling(temperature=1.0, top_p=top_p, seed=3)
    check_frequencies(sampling, expected / expected.sum(), SHUFFLED)


def test_top_p_keeps_of_equals_only_as_many_as_it_needs():
    expected = np.array([0.5, 0.5, 0, 0])
    check_frequencies(Sampling(temperature=1.0, top_p=0.45, seed=4), expected, np.zeros(4))


def test_top_p_counts_after_temperature_and_top_k():
    """As transformers orders them: of the three best, at temperature 2, p's share."""
    warm = softmax(SHUFFLED[[1, 3, 0]] / 2.0)
    assert warm[0] < 0.45 < warm[:2].sum() < 0.8 < np.exp(SHUFFLED[[1, 3, 0]]).sum()
    two = Sampling(temperature=2.0, top_k=3, top_p=float(warm[:2].sum()) - 0.01, seed=5)
    expected = np.zeros(4)
    expected[[1, 3]] = warm[:2] / warm[:2].sum()
    check_frequencies(two, expected, SHUFFLED)


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


def test_the_penalty_shifts_what_is_drawn():
    seen = np.tile([False, True, False, False, True, True], (ROWS, 1))
    sampling = Sampling(temperature=1.0, repetition_penalty=2.0, seed=6)
    drawn = pick(np.tile(LOGITS, (ROWS, 1)), sampling, seen=seen)
    expected = softmax(np.array([0.5, 1.0, -1.0, 1.0, 1.0, -6.0]))
    frequency = np.bincount(drawn, minlength=6) / ROWS
    error = 6 * np.sqrt(expected * (1 - expected) / ROWS)
    assert np.all(np.abs(frequency - expected) <= error)


FILTERS = [{}, {"top_k": 40}, {"top_p": 0.99}]


@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_rows_draw_by_their_place_under_one_seed(options):
    """Place, seed and token each change the draw; the batch does not."""
    flat = np.zeros((64, 50), np.float32)
    sampling = Sampling(temperature=1.0, seed=11, **options)
    drawn = pick(flat, sampling)
    assert len(set(drawn.tolist())) > 20
    np.testing.assert_array_equal(pick(flat, sampling), drawn)
    places = [30, 2, 63]
    np.testing.assert_array_equal(
        pick(flat[:3], sampling.at((place,) for place in places)), drawn[places]
    )
    other = Sampling(temperature=1.0, seed=12, **options)
    assert np.mean(pick(flat, other) == drawn) < 0.25
    assert np.mean(pick(flat, sampling, count=1) == drawn) < 0.25


@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_a_row_with_a_seed_of_its_own_draws_alike_wherever_it_stands(options):
    logits = np.random.default_rng(4).normal(size=(16, 50)).astype(np.float32)
    seeds = (7, *range(100, 114), 7)
    sampling = Sampling(temperature=1.0, seed=seeds, **options)
    logits[15] = logits[0]
    drawn = pick(logits, sampling)
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


def test_a_share_that_rounds_to_all_leaves_nothing_out():
    almost = Sampling(temperature=1.0, top_p=1 - 1e-9)
    assert sampling_static(almost) == sampling_static(Sampling(temperature=1.0))


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


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature must be at least 0 and finite, got -0.1"),
        ({"temperature": NAN}, "temperature must be at least 0 and finite, got nan"),
        ({"temperature": INF}, "temperature must be at least 0 and finite, got inf"),
        ({"top_k": -1}, r"top_k must be at least 0 \(0 is off\), got -1"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1, got 0.0"),
        ({"top_p": 1.5}, "top_p must be above 0 and at most 1, got 1.5"),
        ({"top_p": NAN}, "top_p must be above 0 and at most 1, got nan"),
        (
            {"repetition_penalty": 0.0},
            "repetition_penalty must be from 1e-06 to 1,000,000, got 0.0",
        ),
        ({"repetition_penalty": NAN}, "repetition_penalty must be from .*, got nan"),
        ({"repetition_penalty": INF}, "repetition_penalty must be from .*, got inf"),
        ({"repetition_penalty": 1e-30}, "repetition_penalty must be from .*, got 1e-30"),
        ({"seed": -1}, "seed must be from 0 to .*, got -1"),
        ({"seed": (1, 2**64)}, r"seed must be from 0 to .* each row, got \(1, 1844.*\)"),
        ({"seed": ()}, r"seed must be from 0 to .* each row, got \(\)"),
    ],
    ids=str,
)
def test_bad_settings_are_named(options, message):
    with pytest.raises(InputError, match=f"^{message}$"):
        Sampling(**options)


def test_edges_of_the_ranges_are_good():
    Sampling(temperature=0.0, top_k=0, top_p=1.0, repetition_penalty=0.5)
