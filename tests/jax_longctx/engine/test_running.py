import contextlib
import dataclasses
import math

import jax
import numpy as np
import pytest

from jax_longctx.engine import Sampling, compiling, places, running
from jax_longctx.engine.running import Ask, Chosen, RunningBatch
from jax_longctx.errors import CapacityError, InputError
from jax_longctx.methods import make_method
from jax_longctx.sharding import make_mesh
from tests.small_methods import KINDS, small_method
from tests.support import joined, random_rows, score, tiny_engine

RESERVE = 40
CONTEXTS = random_rows([64, 37, 90])
QUESTIONS = random_rows([5, 2, 3, 7, 1], seed=1)

# Of every kind, and of one kind alone: `Engine.stream` has a program for each kind.
EVERY_KIND = [
    Sampling(),
    Sampling(temperature=0.9, seed=5),
    Sampling(temperature=1.3, top_k=7, top_p=0.8, seed=6),
    Sampling(temperature=0.7, top_p=0.6, repetition_penalty=1.4, seed=2**40),
    Sampling(repetition_penalty=1.3),
]
ONE_KIND = [
    Sampling(temperature=0.5 + 0.2 * number, seed=number, repetition_penalty=1.1 + number / 5)
    for number in range(5)
]


def requests(samplings):
    given = zip(QUESTIONS, samplings, (9, 16, 3, 21, 12), (None, 0, 3, None, 20), strict=True)
    return [
        Ask(question, sampling, limit, logprobs=logprobs)
        for question, sampling, limit, logprobs in given
    ]


@pytest.fixture(scope="module")
def engine():
    return tiny_engine(chunk=16)


@pytest.fixture
def context(engine):
    return engine.prefill([CONTEXTS[0]], reserve=RESERVE)


def batch_of(engine, places, fitted=False):
    slots = engine.slots_for(90 + 128)
    return RunningBatch(engine, places=places, slots=slots, reserve=RESERVE, fitted=fitted)


def tokens(row):
    return [chosen.token for chosen in row]


def alone(engine, context, request, row=0):
    """The row's answer by `Engine.stream`."""
    seed = request.sampling.of_rows(1).seed * context.batch
    stream = engine.stream(
        context,
        [list(request.question)] * context.batch,
        sampling=dataclasses.replace(request.sampling, seed=seed),
        max_tokens=request.max_tokens,
        stop_ids=request.stop_ids,
    )
    return joined(stream)[row]


def run(batch, queue):
    """Answers of all (context, request), which join as places become free."""
    waiting, found, ended, places = list(enumerate(queue)), {}, {}, {}
    for turn in range(200):
        # One at a time, so that rows are at different steps.
        if waiting and batch.free:
            number, (context, request) = waiting.pop(0)
            place, first = batch.join(context, request)
            found[number], places[place] = [first], number
            if place in batch.ended:
                ended[places.pop(place)] = batch.ended[place]
        for place, chosen in batch.step((1, 4, 3)[turn % 3]).items():
            found[places[place]] += chosen
        for place, reason in batch.ended.items():
            if place in places:
                ended[places.pop(place)] = reason
        if not waiting and not places:
            return [found[number] for number in range(len(queue))], ended
    raise AssertionError("the batch does not end")


def check_method(method, *, places=3, mesh=None, samplings=ONE_KIND, fitted=False, texts=CONTEXTS):
    engine = tiny_engine(method, chunk=16, mesh=mesh)
    batch, asked = batch_of(engine, places, fitted), requests(samplings)
    contexts = [
        engine.prefill(
            [texts[number % 3]], reserve=RESERVE, questions=[request.question], capacity=batch.slots
        )
        for number, request in enumerate(asked)
    ]
    queue = list(zip(contexts, asked, strict=True))
    expected = [alone(engine, *each) for each in queue]
    found, ended = run(batch, queue)
    assert list(map(tokens, found)) == expected
    assert set(ended.values()) == {"length"} and len(ended) == len(queue)
    assert batch.free == places
    # The contexts are as they were.
    assert alone(engine, *queue[1]) == expected[1]


@pytest.mark.parametrize("name", [*KINDS, "resa"])
@pytest.mark.quick("full", "snapkv")
def test_each_row_answers_as_it_does_alone(name):
    check_method(small_method(name), samplings=EVERY_KIND if name == "full" else ONE_KIND)


PENALISED = [
    Sampling(),
    Sampling(presence_penalty=1.5, frequency_penalty=0.5),
    Sampling(frequency_penalty=-0.7, repetition_penalty=1.3),
    Sampling(temperature=0.9, seed=5),
    Sampling(temperature=0.9, seed=5, presence_penalty=-1.0),
]


@pytest.mark.parametrize("fitted", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_rows_with_penalties_by_count_stand_beside_others(fitted, monkeypatch):
    monkeypatch.setattr(running, "FITTED_FROM", 128)
    monkeypatch.setattr(running, "STEPS_TO_SHRINK", 1)
    check_method(small_method("full"), samplings=PENALISED, fitted=fitted)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.quick("full")
def test_rows_move_to_caches_of_other_sizes(name, monkeypatch):
    sizes, fit = [], RunningBatch._fit

    def fitted(batch, *more):
        fit(batch, *more)
        sizes.append((len(batch._state.done), batch._caches.slots))

    monkeypatch.setattr(RunningBatch, "_fit", fitted)
    monkeypatch.setattr(running, "FITTED_FROM", 128)
    monkeypatch.setattr(running, "STEPS_TO_SHRINK", 1)
    check_method(small_method(name), fitted=True, texts=random_rows([64, 150, 90]))
    # The last row is alone again.
    assert {rows for rows, _ in sizes} == {1, 3} and sizes[-1][0] == 1
    if name == "full":
        # More tokens end an answer than the columns that an empty place has.
        batch = batch_of(engine := tiny_engine(chunk=16), 2, fitted=True)
        context = engine.prefill([CONTEXTS[0]], reserve=RESERVE)
        many = [
            Ask(QUESTIONS[0], max_tokens=9, stop_ids=range(20 * n, 20 * n + n)) for n in (40, 1)
        ]
        assert [tokens(row) for row in run(batch, [(context, each) for each in many])[0]] == [
            alone(engine, context, each) for each in many
        ]
    grows = small_method(name).info.keeps_all
    assert {slots for _, slots in sizes} >= ({128, 256} if grows else {128})


def test_rows_that_come_and_go_do_not_move_the_others(monkeypatch):
    made, make = [], places.Whole.__init__

    def counted(caches, engine, reserve, rows, slots):
        make(caches, engine, reserve, rows, slots)
        made.append(rows)

    monkeypatch.setattr(places.Whole, "__init__", counted)
    batch = batch_of(engine := tiny_engine(chunk=16), 2, fitted=True)
    context = engine.prefill([CONTEXTS[0]], reserve=RESERVE)
    request = Ask(QUESTIONS[0], max_tokens=60)
    stays, _ = batch.join(context, request)
    for _ in range(3):
        place, _ = batch.join(context, request)
        batch.step(1)
        batch.leave(place)
        batch.step(1)
    assert made == [1, 2]
    for _ in range(running.STEPS_TO_SHRINK):
        batch.step(1)
    assert made == [1, 2, 1]
    # A batch without rows has none to move.
    batch.join(context, request)
    for place in (0, 1):
        batch.leave(place)
    batch.join(context, request)
    assert made == [1, 2, 1, 2, 1] and stays == 0


@pytest.mark.parametrize("name", ["full", "refreshkv"])
@pytest.mark.slow
def test_on_a_mesh(name):
    check_method(small_method(name), places=4, mesh=make_mesh(2, 1, 2))


def test_each_row_has_its_own_schedule():
    settings = {"schedule": "adaptive", "qc_stride": "2", "threshold": "0.9", "budget": "24"}
    check_method(make_method("refreshkv", settings))


@pytest.mark.slow
def test_rows_whose_steps_differ_soon_go_together():
    engine = tiny_engine(make_method("refreshkv", {"schedule": "fixed", "stride": "5"}), chunk=16)
    context = engine.prefill([CONTEXTS[0]], reserve=100)
    batch = RunningBatch(engine, places=4, slots=engine.slots_for(164), reserve=100)
    request, counts = Ask(QUESTIONS[0], max_tokens=60), {}
    for waits in range(4):
        place, _ = batch.join(context, request)
        counts[place] = 1
        for found in [batch.step(1) for _ in range(waits)]:
            for place, chosen in found.items():
                counts[place] += len(chosen)
    for _ in range(30):
        for place, chosen in batch.step(1).items():
            counts[place] += len(chosen)
    # Some turns took a part of the rows; then all went together.
    assert min(counts.values()) >= 24
    assert len({count % 5 for count in counts.values()}) == 1


@contextlib.contextmanager
def compilations(of="/jax/core/compile/backend_compile_duration"):
    """The names of the programs that are compiled within it; of other events, their functions."""
    found = []

    def listen(event, seconds, fun_name="", **_):
        if event == of:
            found.append(fun_name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize(
    ("name", "by_layer"),
    [
        ("full", True),
        pytest.param("refreshkv", True, marks=pytest.mark.slow),
        pytest.param("refreshkv", False, marks=pytest.mark.slow),
    ],
)
def test_nothing_is_compiled_as_rows_join_and_leave(name, by_layer, monkeypatch):
    # A long run of tests may have used so many mappings that all programs are dropped right here.
    monkeypatch.setattr(compiling, "COUNTED", math.inf)
    engine = tiny_engine(small_method(name), chunk=16, by_layer=by_layer)
    batch = batch_of(engine, 3)
    sizes = {"reserve": RESERVE, "capacity": batch.slots}
    contexts = [engine.prefill([row], **sizes) for row in CONTEXTS]
    longest, *others = sorted(requests(EVERY_KIND), key=lambda each: -len(each.question))
    run(batch, [(contexts[0], longest)])
    batch.leave(batch.join(contexts[0], longest)[0])
    with compilations() as found:
        queue = [(contexts[number % 3], request) for number, request in enumerate(others)]
        answers, _ = run(batch, queue)
        # The rows of a context have programs of their own.
        place, _ = batch.join(contexts[1], longest)
        batch.step(2)
        batch.leave(place)
        batch.join(contexts[2], others[0])
        batch.step(3)
    assert [len(answer) for answer in answers] == [each.max_tokens for each in others]
    assert not found


@pytest.mark.slow
def test_rows_of_one_context_may_join_each_on_its_own():
    engine = tiny_engine(small_method("h2o"), chunk=16)
    context = engine.prefill(CONTEXTS, reserve=RESERVE)
    batch = batch_of(engine, 3)
    request = Ask(QUESTIONS[0], ONE_KIND[0], max_tokens=7)
    batch.join(context, request, row=1)
    place, first = batch.join(context, request, row=2)
    assert tokens([first, *batch.step()[place]]) == alone(engine, context, request, row=2)


@pytest.mark.parametrize("name", ["snapkv", "refreshkv", "resa"])
@pytest.mark.quick("snapkv")
def test_contexts_of_other_sizes_may_join(name):
    engine = tiny_engine(small_method(name), chunk=16)
    request = Ask(QUESTIONS[0], ONE_KIND[0], max_tokens=12)
    batch = RunningBatch(engine, places=3, slots=engine.slots_for(300), reserve=RESERVE)
    for capacity, slots in ((0, 256), (900, 1024)):
        context = engine.prefill([CONTEXTS[0]], reserve=4, capacity=capacity)
        assert (context.slots, batch.slots) == (slots, 384)
        ((found,), _) = run(batch, [(context, request)])
        assert tokens(found) == alone(engine, context, request)


def test_a_row_ends_with_a_stop_or_leaves(engine, context):
    batch = batch_of(engine, 2)
    answer = alone(engine, context, Ask(QUESTIONS[0], max_tokens=20))
    at = next(at for at in range(2, 20) if answer[at] not in answer[:at])
    stopping = Ask(QUESTIONS[0], max_tokens=20, stop_ids=(answer[at],))
    first, _ = batch.join(context, stopping)
    second, _ = batch.join(context, Ask(QUESTIONS[1], max_tokens=30))
    assert batch.free == 0 and sorted(batch.running) == [first, second]
    with pytest.raises(InputError, match="all 2 places are taken"):
        batch.join(context, stopping)
    found = batch.step(25)
    assert tokens(found[first]) == answer[1 : at + 1]
    assert batch.ended == {first: "stop"} and len(found[second]) == 25
    batch.leave(second)
    batch.leave(second)
    assert batch.free == 2 and batch.step() == {} and batch.ended == {}
    # The first token may end an answer already; more stop ids than the batch had room for.
    stops = (answer[0], *range(40, 60))
    place, chosen = batch.join(context, Ask(QUESTIONS[0], max_tokens=20, stop_ids=stops))
    assert chosen.token == answer[0] and batch.ended == {place: "stop"} and batch.free == 2
    ((again,), ended) = run(batch, [(context, dataclasses.replace(stopping, stop_ids=(99,) * 20))])
    assert tokens(again) == answer and ended == {0: "length"}


def test_log_probabilities_are_those_of_the_models_logits(engine, context):
    sampling = Sampling(temperature=2.0, repetition_penalty=1.5, top_k=30, seed=3)
    queue = [
        (context, Ask(QUESTIONS[0], sampling, 8, logprobs=logprobs)) for logprobs in (4, 0, None)
    ]
    found, _ = run(batch_of(engine, 2), queue)
    (logits,) = score(engine, [[*CONTEXTS[0], *QUESTIONS[0], *tokens(found[0])]])
    before = len(CONTEXTS[0]) + len(QUESTIONS[0]) - 1
    for step, (many, own, none) in enumerate(zip(*found, strict=True)):
        row = logits[before + step].astype(np.float64)
        row -= np.log(np.exp(row - row.max()).sum()) + row.max()
        assert many.token == own.token == none.token and none.logprob is None
        assert many.logprob == pytest.approx(row[many.token], abs=1e-4)
        assert own == Chosen(many.token, many.logprob) and none == Chosen(many.token)
        best = np.argsort(-row)[:4]
        assert [token for token, _ in many.best] == best.tolist()
        np.testing.assert_allclose([value for _, value in many.best], row[best], atol=1e-4)


def test_a_row_whose_logits_are_no_numbers_ends_alone(engine, context):
    bad, request = (engine.prefill([CONTEXTS[1]], reserve=RESERVE), Ask(QUESTIONS[0], max_tokens=9))
    expected, batch = alone(engine, context, request), batch_of(engine, 3)
    place, first = batch.join(context, request)
    worse, _ = batch.join(bad, request)
    # Stacked caches have the layers first.
    axis = 0 if engine.setup.by_layer else 1

    def spoiled(leaf):
        broken = leaf.ndim > 2 + axis and leaf.shape[axis] == 3
        return leaf.at[(slice(None),) * axis + (worse,)].set(np.nan) if broken else leaf

    batch._caches.held = jax.tree.map(spoiled, batch._caches.held)
    found = [first, *batch.step(3)[place]]
    assert batch.ended == {worse: "not finite"} and batch.free == 2
    found += batch.step()[place]
    assert tokens(found) == expected and batch.ended == {place: "length"}
    # The place is as good as new.
    ((again,), _) = run(batch, [(context, request)])
    assert tokens(again) == expected


def test_what_never_fits_is_refused_with_the_arithmetic():
    for name, most, expected in [
        ("full", 58, "64 tokens, a question of 5 and an answer of 59 need 129 slots, .* shorten"),
        ("snapkv", 123, "need 129 slots, a place of this batch reserves 128"),
    ]:
        engine = tiny_engine(small_method(name), chunk=16)
        context = engine.prefill([CONTEXTS[0]], reserve=RESERVE)
        batch = RunningBatch(engine, places=1, slots=128, reserve=RESERVE)
        batch.fits(context, Ask(QUESTIONS[0], max_tokens=most))
        with pytest.raises(CapacityError, match=expected):
            batch.fits(context, Ask(QUESTIONS[0], max_tokens=most + 1))
    small = tiny_engine(chunk=16, memory_limit=100_000)
    with pytest.raises(CapacityError, match=r"a cache of 1,024 tokens needs .* tokens would fit"):
        RunningBatch(small, places=8, slots=1024, reserve=RESERVE)


def test_bad_requests_are_named(engine):
    for wrong, message in [
        ({"question": []}, "the question is empty"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"logprobs": 21}, "logprobs must be from 0 to 20, got 21"),
    ]:
        with pytest.raises(InputError, match=message):
            Ask(**{"question": [1], **wrong})
    asked = tiny_engine(small_method("citrus"), chunk=16)
    context = asked.prefill([CONTEXTS[0]], reserve=RESERVE, questions=QUESTIONS[:1])
    batch, question = batch_of(asked, 1), QUESTIONS[0]
    seeds = Ask(question, Sampling(seed=(1, 2)), max_tokens=3)
    for act, message in [
        (lambda: batch.fits(context, Ask(QUESTIONS[1])), "read the context for another question"),
        (lambda: batch.fits(context, Ask(question), row=1), "rows 0 to 0, there is no row 1"),
        (lambda: batch.fits(context, Ask([64])), "holds token id 64"),
        (lambda: batch.join(context, seeds), "1 rows need as many seeds, 2 given"),
        (lambda: batch_of(engine, 1).fits(context, Ask(question)), "was prefilled under"),
    ]:
        with pytest.raises(InputError, match=message):
            act()
    assert batch.free == 1


def test_a_text_is_read_between_the_blocks_of_rows_that_run(engine, context):
    request = Ask(QUESTIONS[0], max_tokens=30)
    expected = alone(engine, context, request)
    other = alone(engine, engine.prefill([CONTEXTS[2]], reserve=RESERVE), request)
    batch = batch_of(engine, 2)
    place, first = batch.join(context, request)
    found, told, prefilling = [first], [], engine.prefilling([CONTEXTS[2]], reserve=RESERVE)
    while True:
        try:
            told.append(next(prefilling).done)
        except StopIteration as end:
            second = end.value
            break
        found += batch.step(2)[place]
    assert told == [16, 32, 48, 64, 80, 90]
    beside, start = batch.join(second, request)
    more = batch.step()
    assert tokens([*found, *more[place]]) == expected
    assert tokens([start, *more[beside]]) == other
    # One that is given up leaves nothing behind.
    next(engine.prefilling([CONTEXTS[1]], reserve=RESERVE))
