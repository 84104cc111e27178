import json

import pytest

from jax_longctx.errors import ConfigError, LengthError
from jax_longctx.evaluation.tasks import TASKS, Task, describe, make_task
from jax_longctx.text import Tokenizer
from tests.jax_longctx.evaluation.tasks.cases import CASES, any_answer_has_a_score, words
from tests.smollm2 import write_tokenizer

everywhere = pytest.mark.parametrize("name", CASES)


def of(name, *, trials=3, seed=5, count=words, tokens=None, **settings):
    case = CASES[name]
    task = make_task(name, {**case.settings, **settings})
    return list(task.samples(count, tokens=tokens or case.tokens, trials=trials, seed=seed))


def test_every_task_has_a_case_but_those_of_a_users_file():
    assert set(TASKS) == {*CASES, "longbench", "leval", "infinitebench", "longproc", "questions"}
    with pytest.raises(ConfigError, match=r"unknown task 'passkeys'.*did you mean 'passkey'"):
        make_task("passkeys")


@pytest.fixture(scope="module")
def short_sentences(tmp_path_factory):
    """Settings with a text of sentences of five words, for a task that has a text."""
    path = tmp_path_factory.mktemp("text") / "short.txt"
    path.write_text(" ".join(f"Row {i} has {i % 7} birds." for i in range(3000)), encoding="utf-8")
    return lambda name: {"haystack": str(path)} if CASES[name].text else {}


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    tokenizer = Tokenizer.load(folder)
    return lambda text: len(tokenizer.encode(text))


@everywhere
def test_prompts_have_the_length_asked_for(name, short_sentences, real):
    case, task, tokens = CASES[name], make_task(name, CASES[name].settings), CASES[name].tokens
    for size, trials, count, slack in (
        (tokens, 3, words, case.slack),
        (tokens + 401, 3, words, case.slack),
        (3 * tokens, 1, real, case.real_slack),
    ):
        how = {"tokens": size, "trials": trials, "count": count}
        for sample in of(name, **how, **short_sentences(name)):
            asked = sample.query + sample.answer_prefix
            assert sample.length == 1 + count(sample.context) + count(asked) + task.max_new
            assert size - slack <= sample.length <= size


@everywhere
def test_the_same_seed_draws_the_same_prompts_for_any_number_of_them(name):
    three = of(name)
    assert of(name, trials=1) == three[:1] and of(name) == three
    assert [sample.index for sample in three] == [0, 1, 2]
    prompts = {sample.context + sample.query for sample in three}
    assert len(prompts) == 3
    assert not prompts & {sample.context + sample.query for sample in of(name, seed=6)}


@everywhere
def test_who_reads_the_prompt_is_right_and_who_says_nothing_is_not(name):
    """The right answers stand in the context alone, and the parts of a prompt join as they are."""
    task, case = make_task(name, CASES[name].settings), CASES[name]
    for sample in of(name):
        assert task.score(case.answer(sample), sample) == 100
        assert task.score("", sample) == 0
        for gold in sample.outputs if case.hidden else ():
            assert sample.context.count(gold) == case.hidden
            assert gold not in sample.query + sample.answer_prefix
        assert sample.context == sample.context.strip()
        for part in (sample.query, sample.answer_prefix):
            assert part == "" or (part[0].isspace() and part == part.rstrip())
        json.dumps(sample.meta)
        assert isinstance(task.parts("", sample), dict)
    any_answer_has_a_score(task, of(name, trials=1)[0])


@everywhere
def test_a_task_says_what_it_is_and_what_it_refuses(name):
    task = make_task(name, CASES[name].settings)
    assert isinstance(task, Task)
    assert task.name == name and task.label.startswith(name) and task.metric
    about = json.loads(json.dumps(describe(name)))
    given = {key: entry["default"] for key, entry in about["settings"].items()}
    assert make_task(name, given) == TASKS[name]
    assert about["about"].strip()
    with pytest.raises(LengthError, match="few"):
        of(name, tokens=20)
    for settings, message in (
        ({"max_new": "0"}, "max_new must be at least 1, got 0"),
        ({"name": "x"}, f"task '{name}' has no setting 'name'"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_task(name, settings)
