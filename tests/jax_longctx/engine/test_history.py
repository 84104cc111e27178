"""A conversation: questions and answers that stay in the caches."""

import itertools

import numpy as np
import pytest

from jax_longctx.methods import METHODS, make_method
from tests.small_methods import EVERYTHING, SMALL
from tests.support import joined, random_rows, tiny_config, tiny_engine

TEXT, *QUESTIONS = random_rows([40, 6, 9, 5])
ANSWER = 7
# Others read a text for one question.
TALKING = [name for name in METHODS if not make_method(name).info.needs_question]


def talked(engine, context):
    """The answers to `QUESTIONS` in turn; what the caches hold is not fed again."""
    answers, said = [], []
    for question in QUESTIONS:
        said += question
        asked = said[len(context.joined[0]) if context.joined else 0 :]
        (answer,) = joined(engine.stream(context, [asked], max_tokens=ANSWER, keep="history"))
        said += answer
        answers.append(answer)
    return answers


def read_anew(engine):
    """The same answers where each question's prompt is read whole, in one piece."""
    answers, prompt = [], list(TEXT)
    for question in QUESTIONS:
        prompt += question
        (answer,) = joined(engine.generate([prompt], max_tokens=ANSWER))
        prompt += answer
        answers.append(answer)
    return answers


@pytest.fixture(scope="module")
def expected():
    return read_anew(tiny_engine(chunk=16))


def begun(name, table, **options):
    engine = tiny_engine(make_method(name, table[name]), chunk=16, **options)
    return engine, engine.prefill([TEXT], reserve=128)


@pytest.mark.quick("full", "snapkv", "tova")
@pytest.mark.parametrize("name", TALKING)
def test_with_room_for_all_every_turn_is_as_if_all_was_read_anew(name, expected):
    engine, context = begun(name, EVERYTHING)
    assert talked(engine, context) == expected
    # All but what the caches do not hold yet.
    held = sum(map(len, QUESTIONS)) + (len(QUESTIONS) - 1) * ANSWER
    held += 0 if engine.method.info.answers_apart else ANSWER - 1
    assert len(context.joined[0]) == held
    # The context alone is as it was, and the history has ended.
    (alone,) = joined(engine.stream(context, [QUESTIONS[0]], max_tokens=ANSWER))
    assert alone == expected[0] and context.history is None and not context.joined
    assert talked(engine, context) == expected


@pytest.mark.quick("full")
@pytest.mark.parametrize("name", ["full", "snapkv", "h2o"])
def test_a_conversation_grows_ends_early_and_is_fed_anew(name):
    engine, context = begun(name, SMALL)
    whole = talked(engine, context)
    small = engine.prefill([TEXT], reserve=1)
    small.reserve = 1
    assert talked(engine, small) == whole and small.slots > context.slots
    # An answer that is closed early stays as far as it was told.
    next(engine.stream(context, [QUESTIONS[0]]))
    stream = engine.stream(context, [QUESTIONS[0]], max_tokens=ANSWER, keep="history")
    told = list(itertools.chain(next(stream)[0], next(stream)[0]))
    stream.close()
    apart = engine.method.info.answers_apart
    assert context.joined == [QUESTIONS[0] + (told[:-1] if not apart else [])]
    # Where an error ends a question, what the caches hold is unknown: it is fed anew.
    with pytest.raises(ValueError, match="lost"), engine.asked(context, keep="history") as live:
        live.given = [[1]]
        raise ValueError("lost")
    assert context.history is None and context.joined == []


@pytest.mark.slow
def test_rows_of_a_mesh_with_windows_over_two_modes():
    """Ragged rows go on like each alone, where some layers slide, and loops over layers or not."""
    config, rows = tiny_config(windows=(16, None)), random_rows([30, 17])
    asked = random_rows([5, 8], seed=2), random_rows([3, 6], seed=3)
    found = []
    for by_layer in (True, False):
        engine = tiny_engine(config=config, chunk=16, by_layer=by_layer)
        together = []
        for part in [slice(0, 2), slice(0, 1), slice(1, 2)]:
            context = engine.prefill(rows[part], reserve=64)
            last, answers = [[] for _ in rows[part]], []
            for questions in asked:
                given = [[*a, *b] for a, b in zip(last, questions[part], strict=True)]
                how = {"max_tokens": ANSWER, "keep": "history"}
                answers.append(joined(engine.stream(context, given, **how)))
                last = [answer[-1:] for answer in answers[-1]]
            together.append(np.swapaxes(np.array(answers), 0, 1).tolist())
        both, first, second = together
        assert both == first + second
        found.append(both)
    assert found[0] == found[1]
