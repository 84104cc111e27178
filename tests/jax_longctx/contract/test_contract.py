"""The contract holds what later methods need: three throw-away methods against numpy, each with
ragged rows, on one device and on a 2x2x2 mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jax_longctx.engine import programs
from jax_longctx.errors import InputError
from jax_longctx.methods import Full
from jax_longctx.sharding import make_mesh
from tests.jax_longctx.contract.methods import Cautious, Instructed, KeepRecent
from tests.oracle import causal_attend, forward, probabilities, rope, to_numpy, weighted_values
from tests.support import joined, random_rows, tiny_config, tiny_engine

THETA = 1e4
LENGTHS = [37, 1, 20]
ONE, EIGHT = (1, 1, 1), (2, 2, 2)


@pytest.fixture(params=[pytest.param(ONE, marks=pytest.mark.slow), EIGHT], ids=["one", "2x2x2"])
def mesh(request):
    return make_mesh(*request.param)


def oracle_params(engine):
    return to_numpy(jax.device_get(engine.params))


def answers(engine, contexts, questions, steps, **prefill):
    """The answers, and the context after them with a cache for each layer."""
    context = engine.prefill(contexts, reserve=16, questions=questions, **prefill)
    rows = joined(engine.stream(context, questions, max_tokens=steps))
    context.caches = programs.per_layer(context.usable_caches())
    return rows, context


def greedy(config, params, context, question, steps, attend_of):
    """Greedy tokens by a full numpy forward a step; `attend_of(context length)` makes `attend`."""
    tokens = [*context, *question]
    for _ in range(steps):
        logits = forward(config, params, tokens, attend_of(len(context)))
        tokens.append(int(logits[-1].argmax()))
    return tokens[len(context) + len(question) :]


def test_full_equals_numpy(mesh):
    engine = tiny_engine(mesh=mesh, chunk=8)
    rows = random_rows(LENGTHS)
    params = oracle_params(engine)
    for row, logits in zip(rows, engine.score(rows), strict=True):
        expected = forward(engine.config, params, row, causal_attend(THETA))
        np.testing.assert_allclose(logits, expected, atol=2e-5)


def keep_recent_attend(budget):
    def attend_of(context):
        def attend(layer, q, k, v):
            at = np.arange(len(q))
            seen = at[:, None] >= at[None, :]
            # After the context its older tokens are gone; within it nothing is.
            seen &= (at[:, None] < context) | (at[None, :] >= context - budget)
            return weighted_values(probabilities(rope(q, at, THETA), rope(k, at, THETA), seen), v)

        return attend

    return attend_of


def test_cache_shrinks_at_finish(mesh):
    method = KeepRecent(budget=4)
    engine = tiny_engine(method, mesh=mesh, chunk=8)
    contexts, questions = random_rows(LENGTHS), random_rows([3, 2, 1], seed=1)
    got, context = answers(engine, contexts, questions, 6)
    assert {leaf.shape[2] for leaf in jax.tree.leaves(context.caches) if leaf.ndim == 4} == {
        4 + 128
    }
    params = oracle_params(engine)
    for row in range(3):
        expected = greedy(
            engine.config, params, contexts[row], questions[row], 6, keep_recent_attend(4)
        )
        assert got[row] == expected
    # Room that was made for two tokens grows with a longer answer.
    short = engine.prefill(contexts, reserve=2)
    assert joined(engine.stream(short, questions, max_tokens=6)) == got


@pytest.mark.slow
def test_a_budgets_growth_is_judged_by_what_it_keeps():
    """40 KB hold neither a second cache of the context nor full attention's growth."""
    engine = tiny_engine(KeepRecent(budget=4), chunk=8)
    context = engine.prefill(random_rows([600]), reserve=2)
    engine.memory_limit = 40_000
    list(engine.stream(context, random_rows([3]), max_tokens=100))


def test_a_method_that_needs_the_question_gets_no_other():
    engine = tiny_engine(Instructed(), chunk=8)
    contexts, questions = random_rows(LENGTHS), random_rows([3, 2, 5], seed=1)
    context = engine.prefill(contexts, reserve=16, questions=questions)
    with pytest.raises(InputError, match="read the context for other questions"):
        next(engine.stream(context, random_rows([3, 2, 5], seed=2)))
    for given, said in [(None, "needs the question"), (questions[:2], "as many questions")]:
        with pytest.raises(InputError, match=said):
            engine.prefill(contexts, reserve=16, questions=given)
    with pytest.raises(InputError, match="question 1 is empty"):
        engine.prefill(contexts, reserve=16, questions=[[1], [], [2]])
    with pytest.raises(InputError, match="cannot score"):
        engine.score(contexts)


def instruction_mass(engine, params, row, question, chunk):
    """Mass that the instruction leaves on every token of the context, layer by layer."""
    mass = np.zeros((engine.config.num_layers, len(row)))
    for start in range(0, len(row), chunk):

        def attend(layer, q, k, v, start=start):
            at = np.arange(len(q))
            p = probabilities(rope(q, at, THETA), rope(k, at, THETA), at[:, None] >= at[None, :])
            mass[layer, :start] += p[:, start:, :start].sum((0, 1))
            return weighted_values(p, v)

        # The instruction follows directly on the tokens before the chunk and never sees the chunk.
        forward(engine.config, params, row[:start] + question, attend)
    return mass


@pytest.mark.slow
def test_two_row_groups(mesh):
    engine = tiny_engine(Instructed(), mesh=mesh, chunk=8)
    contexts, questions = random_rows(LENGTHS), random_rows([3, 2, 5], seed=1)
    got, context = answers(engine, contexts, questions, 4)
    assert got == answers(tiny_engine(Full(), chunk=8), contexts, questions, 4)[0]
    params = oracle_params(engine)
    for row in range(3):
        expected = instruction_mass(engine, params, contexts[row], questions[row], 8)
        for layer, cache in enumerate(context.caches):
            mass = np.asarray(cache.mass)[row]
            np.testing.assert_allclose(mass[: len(contexts[row])], expected[layer], atol=1e-5)
            assert not mass[len(contexts[row]) :].any()


def cautious_greedy(engine, params, context, question, steps, method):
    """The numpy twin of `Cautious`: keys of decoded tokens stay as they were computed."""
    config = engine.config
    keys = [[None, None] for _ in range(config.num_layers)]
    reference = [None] * config.num_layers
    full_steps = [0] * config.num_layers

    def prefill(layer, q, k, v):
        keys[layer] = [k, v]
        reference[layer] = q[-1].sum(0)
        return causal_attend(THETA)(layer, q, k, v)

    def decode(layer, q, k, v):
        keys[layer] = [np.concatenate(pair) for pair in zip(keys[layer], (k, v), strict=True)]
        mean, before = q[-1].sum(0), reference[layer]
        cosine = mean @ before / np.linalg.norm(mean) / np.linalg.norm(before)
        reference[layer] = mean
        at = np.arange(len(keys[layer][0]))
        full_steps[layer] += cosine <= method.threshold
        seen = (cosine <= method.threshold) | (at > at[-1] - method.window)
        p = probabilities(rope(q, at[-1:], THETA), rope(keys[layer][0], at, THETA), seen[None])
        return weighted_values(p, keys[layer][1])

    logits = forward(config, params, [*context, *question], prefill)
    tokens = [int(logits[-1].argmax())]
    while len(tokens) < steps:
        tokens.append(int(forward(config, params, tokens[-1:], decode)[-1].argmax()))
    return tokens, full_steps


@pytest.mark.parametrize(
    ("sizes", "threshold"),
    [
        (EIGHT, 0.0),
        *(pytest.param(ONE, value, marks=pytest.mark.slow) for value in (-1.1, 1.1)),
    ],
)
def test_cond_in_each_layer(sizes, threshold):
    method = Cautious(threshold=threshold)
    engine = tiny_engine(method, mesh=make_mesh(*sizes), chunk=8)
    contexts, questions = random_rows(LENGTHS), random_rows([3, 2, 1], seed=1)
    got, _ = answers(engine, contexts, questions, 8)
    params = oracle_params(engine)
    turned = 0
    for row in range(3):
        expected, steps = cautious_greedy(engine, params, contexts[row], questions[row], 8, method)
        assert got[row] == expected
        turned += sum(steps)
    # The thresholds are: never, sometimes, always.
    everything = 3 * 7 * engine.config.num_layers
    assert turned == 0 if threshold < -1 else turned == everything if threshold > 1 else 0 < turned
    assert turned < everything or threshold > 1


def test_shards_of_a_row_agree():
    """What one shard of heads and slots decides holds on all of them, and for no other row."""
    mesh = make_mesh(2, 2, 2)
    ctx = tiny_engine(mesh=mesh).setup.layer_context(None, jnp.zeros(1, jnp.int32))

    def decide():
        shard = [jax.lax.axis_index(name) for name in ("data", "seq", "tensor")]
        first = (shard[0] == 0) & (shard[1] == 1) & (shard[2] == 0)
        return ctx.agree(jnp.stack([first, shard[0] == 1, jnp.array(False)]))[None, None, :, None]

    specs = {"in_specs": (), "out_specs": PartitionSpec("seq", "tensor", "data")}
    got = jax.jit(jax.shard_map(decide, mesh=mesh, check_vma=False, **specs))()
    # Rows 0, 1, 2 of either data shard, as each of 2 x 2 shards has it.
    assert got[..., 0].astype(int).tolist() == [[[1, 0, 0, 0, 1, 0]] * 2] * 2


def test_empty_context_is_legal(mesh):
    engine = tiny_engine(mesh=mesh, chunk=8)
    contexts, questions = [[], random_rows([9])[0]], random_rows([4, 4], seed=1)
    got, _ = answers(engine, contexts, questions, 5)
    config = tiny_config()
    expected = greedy(
        config, oracle_params(engine), [], questions[0], 5, lambda _: causal_attend(THETA)
    )
    assert got[0] == expected
