"""What holds for every task: length, repetition, an answerer that reads the prompt and is right."""

import json

import pytest

from jax_longctx.errors import ConfigError, LengthError
from jax_longctx.evaluation.tasks import TASKS, Sample, Task, describe, make_task
from jax_longctx.text import Tokenizer
from tests.jax_longctx.evaluation.tasks.cases import CASES
from tests.smollm2 import write_tokenizer

everywhere = pytest.mark.parametrize("name", CASES)


def words(text: str) -> int:
    return len(text.split())


def drawn(name, *, trials=3, seed=5, count=words, tokens=None, **settings) -> list[Sample]:
    case = CASES[name]
    task = make_task(name, {**case.settings, **settings})
    return list(task.samples(count, tokens=tokens or case.tokens, trials=trials, seed=seed))


def test_every_task_has_a_case_but_those_of_a_users_file():
    assert set(TASKS) == {*CASES, "longbench", "leval", "infinitebench"}


@pytest.fixture(scope="module")
def short_sentences(tmp_path_factory):
    """Settings with a text of sentences of five words, for a task that has a text."""
    path = tmp_path_factory.mktemp("text") / "short.txt"
    path.write_text(" ".join(f"Row {i} has {i % 7} birds." for i in range(3000)), encoding="utf-8")
    return lambda name: {"haystack": str(path)} if CASES[name].text else {}


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """SmolLM2's tokenizer and its count of tokens."""
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    tokenizer = Tokenizer.load(folder)
    return tokenizer, lambda text: len(tokenizer.encode(text))


@everywhere
def test_prompts_have_the_length_asked_for(name, short_sentences):
    case, task = CASES[name], make_task(name, CASES[name].settings)
    for tokens in (case.tokens, case.tokens + 401):
        for sample in drawn(name, tokens=tokens, **short_sentences(name)):
            asked = sample.query + sample.answer_prefix
            length = 1 + words(sample.context) + words(asked) + task.max_new
            assert sample.length == length
            assert tokens - case.slack <= length <= tokens


@everywhere
def test_prompts_have_the_length_asked_for_in_real_tokens(name, short_sentences, real):
    tokenizer, count = real
    case, task = CASES[name], make_task(name, CASES[name].settings)
    tokens = 3 * case.tokens
    for sample in drawn(name, trials=1, count=count, tokens=tokens, **short_sentences(name)):
        ids = (
            tokenizer.encode(sample.context),
            tokenizer.encode(sample.query + sample.answer_prefix),
        )
        assert sample.length == 1 + len(ids[0]) + len(ids[1]) + task.max_new
        assert tokens - case.real_slack <= sample.length <= tokens


@everywhere
def test_the_same_seed_draws_the_same_prompts_for_any_number_of_them(name):
    three = drawn(name)
    assert drawn(name, trials=1) == three[:1]
    assert drawn(name) == three
    assert [sample.index for sample in three] == [0, 1, 2]
    prompts = {sample.context + sample.query for sample in three}
    assert len(prompts) == 3
    assert not prompts & {sample.context + sample.query for sample in drawn(name, seed=6)}


@everywhere
def test_who_reads_the_prompt_is_right_and_who_says_nothing_is_not(name):
    task = make_task(name, CASES[name].settings)
    for sample in drawn(name):
        assert task.score(CASES[name].answer(sample), sample) == 100
        assert task.score("", sample) == 0


@everywhere
def test_right_answers_stand_in_the_context_alone(name):
    for sample in drawn(name):
        for gold in sample.outputs if CASES[name].hidden else ():
            assert sample.context.count(gold) == CASES[name].hidden
            assert gold not in sample.query + sample.answer_prefix


@everywhere
def test_a_prompt_joins_as_it_is(name):
    for sample in drawn(name):
        assert sample.context == sample.context.strip()
        for part in (sample.query, sample.answer_prefix):
            assert part == "" or (part[0].isspace() and part == part.rstrip())
        json.dumps(sample.meta)


@everywhere
def test_too_few_tokens_are_refused(name):
    with pytest.raises(LengthError, match="few"):
        drawn(name, tokens=20)


@everywhere
def test_a_task_says_what_it_is(name):
    task = make_task(name, CASES[name].settings)
    assert isinstance(task, Task)
    assert task.name == name and task.label.startswith(name) and task.metric
    about = json.loads(json.dumps(describe(name)))
    given = {key: entry["default"] for key, entry in about["settings"].items()}
    assert make_task(name, given) == TASKS[name]
    assert about["about"].strip()
    assert isinstance(task.parts("", drawn(name, trials=1)[0]), dict)


@everywhere
def test_settings_are_checked(name):
    with pytest.raises(ConfigError, match="max_new must be at least 1, got 0"):
        make_task(name, {"max_new": "0"})
    with pytest.raises(ConfigError, match=f"task '{name}' has no setting 'name'"):
        make_task(name, {"name": "x"})


def test_an_unknown_task_is_refused():
    with pytest.raises(ConfigError, match=r"unknown task 'passkeys'.*did you mean 'passkey'"):
        make_task("passkeys")
