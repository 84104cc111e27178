import dataclasses

import jax
import numpy as np
import pytest

from jax_longctx.engine import Sampling, capacity
from jax_longctx.engine.capacity import check_fits
from jax_longctx.engine.context_io import save_context
from jax_longctx.engine.runs import per_layer
from jax_longctx.errors import CapacityError, ConfigError, InputError
from jax_longctx.methods import DynamicNTK, Full
from jax_longctx.models.rope import RopeConfig
from jax_longctx.sharding import make_mesh
from tests.small_methods import small_method
from tests.support import engine_over, joined, random_rows, score, tiny_config, tiny_engine

ROW = random_rows([45])[0]
# A trained length below the row's, so that dynamic NTK does something.
SHORT = tiny_config(rope=RopeConfig(kind="default", theta=1e4, trained_length=16))


def collect(engine, context, questions, **options):
    return joined(engine.stream(context, questions, **options))


@pytest.fixture(scope="module")
def engine():
    return tiny_engine(chunk=16)


@pytest.fixture(scope="module")
def whole_logits():
    return score(tiny_engine(chunk=64), [ROW])[0]


@pytest.mark.parametrize(
    ("method", "chunk"),
    [(Full(), 7), (DynamicNTK(factor=2.0), 1), (DynamicNTK(factor=2.0), 128)],
    ids=["full-7", "ntk-1", "ntk-128"],
)
def test_logits_do_not_depend_on_the_chunk(method, chunk):
    whole, chunked = (
        score(tiny_engine(method, config=SHORT, chunk=size), [ROW])[0] for size in (64, chunk)
    )
    np.testing.assert_allclose(chunked, whole, atol=1e-4)


def test_decode_gives_the_logits_of_prefill(engine, whole_logits):
    context = engine.prefill([ROW[:-1]], reserve=24)
    answer = collect(engine, context, [ROW[-1:]], max_tokens=20)[0]
    logits = score(engine, [ROW + answer])[0]
    np.testing.assert_allclose(logits[: len(ROW)], whole_logits, atol=1e-4)
    assert answer == [int(row.argmax()) for row in logits[len(ROW) - 1 : -1]]


@pytest.mark.parametrize(
    "sizes", [(2, 2, 2), pytest.param((1, 4, 1), marks=pytest.mark.slow)], ids=str
)
def test_ragged_rows_equal_single_rows(engine, sizes):
    rows = random_rows([45, 1, 17, 16], seed=3)
    together = score(tiny_engine(mesh=make_mesh(*sizes), chunk=16), rows)
    for row, logits in zip(rows, together, strict=True):
        np.testing.assert_allclose(logits, score(engine, [row])[0], atol=1e-5)


@pytest.mark.parametrize(("chunk", "sizes"), [(5, (2, 2, 2)), (16, (1, 4, 1))], ids=str)
@pytest.mark.slow
def test_windows_on_some_layers_equal_one_device(sizes, chunk):
    config = tiny_config(windows=(7, None))
    rows = random_rows([45, 1, 150], seed=3)
    sharded = score(tiny_engine(config=config, mesh=make_mesh(*sizes), chunk=chunk), rows)
    for row, logits in zip(rows, sharded, strict=True):
        whole = score(tiny_engine(config=config, chunk=64), [row])[0]
        np.testing.assert_allclose(logits, whole, atol=1e-4)
        assert np.abs(logits - score(tiny_engine(chunk=64), [row])[0]).max() > 1e-3 or len(row) < 7


def test_dynamic_ntk_uses_each_rows_own_total(engine):
    ntk = tiny_engine(DynamicNTK(factor=4.0), config=SHORT, chunk=16)
    full = tiny_engine(config=SHORT, chunk=16)
    rows = random_rows([45, 16, 9], seed=3)
    together = score(ntk, rows)
    for row, logits in zip(rows, together, strict=True):
        np.testing.assert_allclose(logits, score(ntk, [row])[0], atol=1e-5)
    # Up to the trained length it is full attention, beyond it is not.
    np.testing.assert_allclose(together[1], score(full, [rows[1]])[0], atol=1e-5)
    assert np.abs(together[0] - score(full, [rows[0]])[0]).max() > 1e-2


def test_how_much_is_reserved_does_not_change_an_answer():
    engine = tiny_engine(DynamicNTK(), config=SHORT, chunk=16)
    short = joined(engine.generate([ROW], max_tokens=8))[0]
    assert joined(engine.generate([ROW], max_tokens=60))[0][:8] == short
    # It is the greedy choice of one whole forward over the prompt.
    assert short[0] == int(score(engine, [ROW])[0][-1].argmax())


def test_one_context_answers_many_questions(engine):
    context = engine.prefill([ROW, ROW[:9]], reserve=16)
    assert context.answering_bytes == 0
    first, second = random_rows([4, 2], seed=5), random_rows([1, 7], seed=6)
    a = collect(engine, context, first, max_tokens=6)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(context.usable_caches()))
    assert context.answering_bytes == held > 0
    b = collect(engine, context, second, max_tokens=6)
    assert collect(engine, context, first, max_tokens=6) == a
    assert collect(engine, context, second, max_tokens=6) == b
    assert a != b
    alone = engine.prefill([ROW, ROW[:9]], reserve=16)
    assert collect(engine, alone, second, max_tokens=6) == b


def test_a_context_is_whole_after_a_question_given_up_or_says_that_it_was_lost(engine):
    context = engine.prefill([ROW], reserve=16)
    question = random_rows([4], seed=5)
    whole = collect(engine, context, question, max_tokens=6)
    stream = engine.stream(context, question, max_tokens=6)
    next(stream)
    with pytest.raises(InputError, match="answering another question"):
        next(engine.stream(context, question, max_tokens=6))
    stream.close()
    assert collect(engine, context, question, max_tokens=6) == whole
    context = engine.prefill([ROW], reserve=16)
    for leaf in jax.tree.leaves(context.caches):
        leaf.delete()
    for act in (
        lambda: next(engine.stream(context, [[1]])),
        lambda: next(engine.stream(context, [[1]], max_tokens=500)),
        lambda: context.resident_bytes,
    ):
        with pytest.raises(InputError, match="lost to an interruption; prefill it again"):
            act()


def test_a_longer_answer_than_reserved_grows_the_cache(engine):
    short = engine.prefill([ROW], reserve=2)
    long = engine.prefill([ROW], reserve=200)
    question = random_rows([4], seed=5)
    before = short.slots
    grown = collect(engine, short, question, max_tokens=150)
    assert grown == collect(engine, long, question, max_tokens=150)
    assert short.slots > before
    assert {
        leaf.shape[2] for leaf in jax.tree.leaves(per_layer(short.caches)) if leaf.ndim == 4
    } == {short.slots}


def test_answers_stop(engine):
    context = engine.prefill([ROW, ROW[:9]], reserve=32)
    questions = random_rows([4, 2], seed=5)
    free = collect(engine, context, questions, max_tokens=20)
    assert [len(row) for row in free] == [20, 20]
    stop = free[0][7]
    stopped = collect(engine, context, questions, max_tokens=20, stop_ids=[stop])
    for row in range(2):
        end = free[row].index(stop) + 1 if stop in free[row] else 20
        assert stopped[row] == free[row][:end]


def test_a_prompt_alone_and_in_any_batch_draws_the_same_tokens(engine):
    short, long = random_rows([7, 40], seed=9)
    own = Sampling(temperature=1.0, seed=(5,))
    (alone,) = joined(engine.generate([ROW], max_tokens=30, sampling=own))
    among = dataclasses.replace(own, seed=(1, 5, 2, 5))
    found = joined(engine.generate([long, ROW, short, ROW], max_tokens=30, sampling=among))
    assert found[1] == found[3] == alone
    one = Sampling(temperature=1.0, seed=5)
    rows = joined(engine.generate([ROW] * 4, max_tokens=30, sampling=one))
    assert len({tuple(row) for row in rows}) == 4
    for place in (0, 3):
        found = joined(engine.generate([ROW], max_tokens=30, sampling=one.at([(place,)])))
        assert found == [rows[place]]


def test_the_penalty_counts_prompt_and_answer(engine):
    sampling = Sampling(repetition_penalty=1e6)
    answer = joined(engine.generate([ROW[:10]], max_tokens=20, sampling=sampling))[0]
    assert len({*answer}) == 20
    assert not {*answer} & {*ROW[:10]}


def test_presence_and_frequency_penalties_count_the_answers_tokens(engine):
    prompt, answer = ROW[:10], []
    for _ in range(24):
        (logits,) = score(engine, [prompt + answer])
        counts = np.bincount(answer, minlength=64)
        answer.append(int(np.argmax(logits[-1] - 0.4 * (counts > 0) - 0.3 * counts)))
    sampling = Sampling(presence_penalty=0.4, frequency_penalty=0.3)
    (found,) = joined(engine.generate([prompt], max_tokens=24, sampling=sampling))
    (plain,) = joined(engine.generate([prompt], max_tokens=24))
    assert found == answer != plain


def test_bad_input_is_named(engine, monkeypatch):
    def refused(message, act):
        with pytest.raises(InputError, match=message):
            act()

    context = engine.prefill([ROW, ROW], reserve=4)
    refused("token id 64.*vocabulary is 0..63", lambda: engine.prefill([[1, 64]], reserve=4))
    refused("token id -1", lambda: engine.prefill([[-1]], reserve=4))
    refused("no rows given", lambda: engine.prefill([], reserve=4))
    refused("prompt 0 is empty", lambda: engine.generate([[]], max_tokens=4))
    refused("question 1 is empty", lambda: next(engine.stream(context, [[1], []])))
    refused("2 contexts need as many .*, 1 given", lambda: next(engine.stream(context, [[1]])))
    # These before anything is read.
    monkeypatch.setattr(engine, "prefill", None)
    one = {"max_tokens": 4, "sampling": Sampling(temperature=1.0, seed=(1,))}
    refused("2 rows need as many seeds, 1 given", lambda: engine.generate([ROW, ROW], **one))
    refused("max_tokens must be at least 1", lambda: engine.generate([ROW], max_tokens=0))


def test_a_context_is_refused_under_another_method(tmp_path):
    """Full attention's context would be asked densely under a sparse method, without a word."""
    engine = tiny_engine(chunk=16)
    context = engine.prefill([ROW], reserve=16)
    for method in (DynamicNTK(), DynamicNTK(factor=2.0)):
        other = engine_over(engine.config, engine.params, method, engine.mesh, chunk=16)
        with pytest.raises(InputError, match=r"prefilled under Full\(\), .* has DynamicNTK"):
            next(other.stream(context, [[1]]))
        with pytest.raises(InputError, match="prefill again"):
            save_context(other, context, tmp_path / "saved")
    assert collect(engine, context, [[1]], max_tokens=2)
    # Equal settings are the same method.
    equal = engine_over(engine.config, engine.params, Full(), engine.mesh, chunk=32)
    assert collect(equal, context, [[1]], max_tokens=2)


def test_weights_heads_and_sizes_that_cannot_be_are_named():
    broken = tiny_engine(chunk=16)
    broken.params["final_norm"]["scale"] *= float("nan")
    with pytest.raises(InputError, match=r"not finite.*NaN"):
        joined(broken.generate([ROW], max_tokens=4))
    with pytest.raises(ConfigError, match="kv_heads=2 does not divide over mesh axis tensor=4"):
        tiny_engine(mesh=make_mesh(tensor=4))
    small = tiny_engine(chunk=16, memory_limit=80_000)
    with pytest.raises(CapacityError) as error:
        small.prefill([list(ROW) * 20], reserve=16)
    said = str(error.value)
    # 1152 slots x 2 layers x 2 heads x 8 x (k, v) x 4 bytes, and the lengths.
    assert "cache of 1,152 tokens needs 288.0 KiB" in said
    assert "70.3 KiB of 78.1 KiB" in said
    assert "about 281 tokens would fit" in said
    small.prefill([ROW], reserve=16)
    # A question that leaves the context as it was needs a copy of what the method evicts from.
    evicting = tiny_engine(small_method("tova"), chunk=16)
    context, evicting.memory_limit = evicting.prefill([ROW], reserve=16), 1000
    with pytest.raises(CapacityError):
        collect(evicting, context, [[1]], max_tokens=2)
    assert collect(evicting, context, [[1]], max_tokens=2, keep=False)


def test_what_is_said_of_memory(monkeypatch, tmp_path):
    check_fits(10, 10**15, 10.0, None)
    with pytest.raises(CapacityError):
        check_fits(10, 10**15, 10.0, 10**9)
    with pytest.raises(CapacityError, match=r"of 953\.7 MiB free is usable; shorten"):
        check_fits(10, 10**10, 0.0, 10**9)
    assert capacity.available_bytes(make_mesh()) is not None
    monkeypatch.setattr(capacity, "MEMINFO", tmp_path / "none")
    assert capacity.available_bytes(make_mesh()) is None
