import dataclasses
import inspect
import json
import logging
import math
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from unittest.mock import create_autospec

import jax
import pytest
from typer.testing import CliRunner

pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness: pip install '.[harness]'")

import lm_eval
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model, model_registry
from lm_eval.tasks import TaskManager
from sqlitedict import SqliteDict

import checkpoints_convert
import jax_longctx
from jax_longctx.cli.main import app
from jax_longctx.engine import Sampling
from jax_longctx.engine.scoring import loglikelihoods
from jax_longctx.errors import ConfigError, InputError, OriginError
from jax_longctx.evaluation import lm_harness
from jax_longctx.evaluation.lm_harness import LongctxLM
from jax_longctx.methods import METHODS
from jax_longctx.text.child import ChatTemplate
from tests.goldens.harness_cases import MAX_LENGTH, RUNS, write_model, write_tasks
from tests.support import engine_over, joined

ROOT = Path(__file__).parents[3]
GOLDENS = json.loads((ROOT / "tests/goldens/data/lm_harness.json").read_text(encoding="utf-8"))
SYSTEM = {"role": "system", "content": "s"}
USER = {"role": "user", "content": "hello "}
REFUSES = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
# Of every batch here and of the goldens' too, so that few programs are compiled.
CHUNK, ROWS = 32, 3
PROMPT = "the other then is a longer prompt than this one, and on it is"


def model_of(loaded, **options):
    """Of as many rows as everywhere here, so that few programs are compiled."""
    return LongctxLM(loaded, **{"batch_size": ROWS, **options})


def under(loaded, method, settings, **options):
    engine = loaded.engine
    made = jax_longctx.make_method(method, settings)
    other = engine_over(engine.config, engine.params, made, engine.mesh, chunk=CHUNK)
    return model_of(jax_longctx.LongContext(other, loaded.tokenizer), **options)


def requests(kind, *arguments):
    return [Instance(kind, {}, args, index) for index, args in enumerate(arguments)]


def generations(model, *pairs):
    return model.generate_until(requests("generate_until", *pairs), disable_tqdm=True)


def likelihoods(model, *pairs):
    return model.loglikelihood(requests("loglikelihood", *pairs), disable_tqdm=True)


def evaluate(folder, model, tasks, **options):
    manager = TaskManager(include_path=str(folder / "tasks"), include_defaults=False)
    how = {"task_manager": manager, "bootstrap_iters": 0, **options}
    return lm_eval.simple_evaluate(model=model, tasks=tasks, **how)


def same(found, expected):
    """Log-likelihoods to 1e-4, all else as it is."""
    if isinstance(expected, float):
        return found == pytest.approx(expected, abs=1e-4, rel=0)
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(same, found, expected))
    return found == expected


class Asked(Exception):
    """Holds what the engine was asked: the first row of what it was given, and the options."""


def ask(rows, *more, questions, **options):
    raise Asked(rows[0], questions and questions[0], *more, options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("harness")
    write_tasks(folder / "tasks")
    for name in ("bos", "no_bos"):
        source = write_model(folder / f"{name}_hf", adds_bos=name == "bos")
        checkpoints_convert.convert(source, folder / name)
    return folder


@pytest.fixture(scope="module")
def loaded(folder):
    return jax_longctx.load(folder / "bos", chunk=CHUNK)


@pytest.fixture
def exact(loaded):
    return model_of(loaded)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("name", ["bos", pytest.param("no_bos", marks=pytest.mark.slow)])
def test_results_are_those_of_the_harness_own_model(folder, name, run):
    settings = {key: value for key, value in RUNS[run].items() if key != "tasks"}
    settings["batch_size"] = ROWS
    for task, golden in GOLDENS[f"{name}.{run}"].items():
        arguments = {"checkpoint": str(folder / name), "prefill_chunk": CHUNK}
        if "rolling" in task:
            arguments["max_length"] = MAX_LENGTH
        results = evaluate(folder, "jax-longctx", [task], model_args=arguments, **settings)
        samples = sorted(results["samples"][task], key=lambda sample: sample["doc_id"])
        assert [[list(a) for a in sample["arguments"]] for sample in samples] == golden["arguments"]
        responses = json.loads(json.dumps([sample["resps"] for sample in samples]))
        assert same(responses, golden["responses"])
        scores = {key: results["results"][task][key] for key in golden["scores"]}
        assert scores == pytest.approx(golden["scores"], abs=1e-6)


def test_every_way_to_score_agrees_under_exact_attention(loaded):
    pairs = [(PROMPT, " on the"), ("a", " stone")]
    decoded = likelihoods(model_of(loaded), *pairs)
    for way in ("question", "context"):
        found = likelihoods(model_of(loaded, through=way, question_tokens=3), *pairs)
        assert same([list(pair) for pair in found], [list(pair) for pair in decoded])
    text = requests("loglikelihood_rolling", (PROMPT * 2,))
    read = model_of(loaded, max_length=40).loglikelihood_rolling(text)
    told = model_of(loaded, max_length=40, rolling="decode").loglikelihood_rolling(text)
    assert read == pytest.approx(told, abs=1e-3)


def test_a_method_is_given_the_end_of_the_prompt_as_its_question(loaded, monkeypatch):
    settings = {"budget": 16, "chunk": 8}
    model = under(loaded, "citrus", settings, question_tokens=6)
    tokens = loaded.tokenizer.encode(PROMPT, bos=True)
    then = loaded.tokenizer.encode(" on the")
    engine = model.model.engine
    monkeypatch.setattr(engine, "prefill", create_autospec(engine.prefill, side_effect=ask))
    scores = create_autospec(
        lm_harness.loglikelihoods, side_effect=lambda engine, *rows, **how: ask(*rows, **how)
    )
    monkeypatch.setattr(lm_harness, "loglikelihoods", scores)
    with pytest.raises(Asked) as asked:
        generations(model, (PROMPT, {"max_gen_toks": 8}))
    *rows, options = asked.value.args
    assert rows == [tokens[:-6], tokens[-6:]] and options["total"] == [len(tokens)] * ROWS
    for way, read in ((model.through, tokens[:-6]), ("context", tokens)):
        model.through = way
        with pytest.raises(Asked) as asked:
            likelihoods(model, (PROMPT, " on the"))
        assert asked.value.args[:3] == (read, tokens[-6:], [then] * ROWS)
    assert under(loaded, "citrus", settings).question_tokens == 64
    assert under(loaded, "full", {}).question_tokens == 1
    # What a method cannot score is said with the way out.
    monkeypatch.undo()
    model = under(loaded, "citrus", settings, question_tokens=6, through="question")
    message = r"score through decode \(here question: through= and rolling= say how\)"
    with pytest.raises(InputError, match=message):
        likelihoods(model, (PROMPT, " on"))


def test_answers_end_before_the_first_stop_string(exact):
    def answer(**settings):
        return generations(exact, ("a", {"max_gen_toks": 12} | settings))[0]

    whole = answer()
    assert len(whole) > 8
    assert answer(until=[whole[6:8], whole[3:5], ""]) == whole[: whole.find(whole[3:5])]
    assert answer(until=whole[2]) == whole[: whole.find(whole[2])]
    short = answer(max_gen_toks=3)
    assert whole.startswith(short) and short != whole


def test_special_and_text_ending_tokens_end_an_answer(loaded, exact, monkeypatch, folder):
    ((prompt, _),) = GOLDENS["bos.plain"]["tiny_answer"]["arguments"][0]
    settings, rows = {"max_gen_toks": 12}, []
    for text in (prompt, "a"):
        row = loaded.tokenizer.encode(text, bos=True)
        rows.append(joined(loaded.engine.generate([row] * ROWS, max_tokens=12))[0])
    tokens, others = rows
    begin = tokens.index(loaded.tokenizer.bos_id)
    found = generations(exact, (prompt, settings | {"until": ["<|begin|>"]}))
    assert found == [loaded.tokenizer.decode(tokens[:begin])]
    answer = loaded.generate([prompt] * ROWS, max_tokens=12, stop=["<|begin|>"])[0]
    assert answer.finish == "stop" and answer.tokens == tokens[: begin + 1]
    monkeypatch.setattr(loaded.tokenizer, "eos_ids", (others[5],))
    (text,) = generations(exact, ("a", settings))
    assert text == loaded.tokenizer.decode(others[: others.index(others[5])])
    # Nothing to continue is the start of a text.
    model = LongctxLM(str(folder / "no_bos"), batch_size=ROWS, prefill_chunk=CHUNK)
    nothing, begin = generations(model, ("", settings), ("<|begin|>", settings))
    assert nothing == begin and len(begin) > 4


def test_draws_follow_the_seed_and_are_new_for_a_repeated_request(loaded):
    settings = {"do_sample": True, "temperature": 2.0, "max_gen_toks": 8}
    pairs = [("the sun", settings)] * (ROWS + 2)
    drawn = generations(model_of(loaded, sample_seed=1), *pairs)
    assert len(set(drawn)) == len(pairs)
    assert generations(model_of(loaded, sample_seed=1), *pairs) == drawn
    assert generations(model_of(loaded, sample_seed=5), *pairs) != drawn
    # Neither the batch nor its neighbours decide: longer prompts are answered first.
    among = generations(model_of(loaded, sample_seed=1), *pairs, *[(PROMPT, settings)] * 2)
    assert among[: len(pairs)] == drawn


def test_a_task_says_how_its_answers_are_drawn(exact, monkeypatch):
    told = create_autospec(exact._generate, return_value=["text"] * ROWS)
    monkeypatch.setattr(exact, "_generate", told)
    drawn = {"do_sample": True, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "max_new_tokens": 4}
    sure = {"do_sample": False, "temperature": 0.7, "num_beams": 1, "max_gen_toks": 4}
    exact.max_gen_toks = 7
    pairs = [(PROMPT, drawn), ("a", sure), ("is", {"until": ["."]}), ("a", drawn)]
    assert generations(exact, *pairs) == ["text"] * 4
    given = [call.args for call in told.call_args_list]
    assert [(len(rows), how["max_gen_toks"], sampling) for rows, how, sampling in given] == [
        (ROWS, 4, Sampling(temperature=0.7, top_k=5, top_p=0.9).at([(0,), (3,), (3,)])),
        (ROWS, 4, Sampling().at([(1,)] * ROWS)),
        (ROWS, 7, Sampling().at([(2,)] * ROWS)),
    ]
    # Settings that would be ignored are refused.
    for ignored, message in (("typical_p", "typical_p are not known"), ("num_beams", "=4 are not")):
        with pytest.raises(InputError, match=message):
            generations(exact, ("a", {"max_gen_toks": 8, ignored: 4}))


def test_what_is_too_long_is_cut_if_asked_for_or_refused(loaded, caplog, monkeypatch):
    model = model_of(loaded, max_length=20, truncation=True)
    tokens = loaded.tokenizer.encode(PROMPT, bos=True)
    with caplog.at_level(logging.WARNING):
        answers = generations(model, ("a", {"max_gen_toks": 8}), (PROMPT, {"max_gen_toks": 8}))
    assert "1 of 2 requests are longer than max_length=20" in caplog.text
    how = {"max_tokens": 8, "stop_ids": loaded.tokenizer.eos_ids}
    cut = joined(loaded.engine.generate([tokens[-12:]] * ROWS, **how))
    assert answers[1] == loaded.tokenizer.decode(cut[0])
    # The last token is only predicted: 20 are read.
    (found,) = likelihoods(model, (PROMPT, " on the"))
    then = loaded.tokenizer.encode(" on the")
    cut = [tokens[-(21 - len(then)) :]] * ROWS
    expected = loglikelihoods(loaded.engine, cut, [then] * ROWS)
    assert found[0] == pytest.approx(expected[0].total, abs=1e-5)
    # Before anything is computed.
    monkeypatch.setattr(loaded.engine, "prefill", None)
    model, eight = model_of(loaded, max_length=20), {"max_gen_toks": 8}
    message = r"1 of 2 requests are longer than max_length=20, one has \d+ tokens and 8 to follow"
    with pytest.raises(InputError, match=message):
        generations(model, ("a", eight), (PROMPT, eight))
    with pytest.raises(InputError, match=r"1 of 1 requests.* and 0 to follow"):
        likelihoods(model, (PROMPT, "a"))
    with pytest.raises(InputError, match="ask for shorter answers"):
        generations(model_of(loaded, max_length=8, truncation=True), ("a", eight))


def test_arguments_that_do_not_fit_are_named(folder, loaded, monkeypatch):
    for arguments, message in [
        ({"method": "nothing"}, "unknown method 'nothing'"),
        ({"method": "streaming-llm", "width": 3}, "has no setting 'width'"),
        ({"batch_size": "auto"}, "give batch_size a whole number"),
        ({"batch_size": 1, "max_batch_size": 8}, "give batch_size a whole number"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"dtype": "float8"}, "dtype=float8 is not one of auto, float32"),
        ({"device": "cuda:1"}, "device=cuda:1"),
        ({"mesh": "data=2/rows=2"}, "is not understood at 'rows=2'"),
        ({"mesh": "data=4/tensor=4"}, "needs 16 devices"),
        ({"through": "guess"}, "through=guess is not one of decode, question, context"),
        ({"rolling": "guess"}, "rolling=guess"),
    ]:
        with pytest.raises(ConfigError, match=message):
            LongctxLM(str(folder / "bos"), **arguments)
    with pytest.raises(ConfigError, match="has its method"):
        LongctxLM(loaded, "full")
    # `yarn` and `linear` go beyond `max_position`; where nothing limits a model, that is left.
    for trained, most in ((1024.0, 1024), (math.inf, 256)):
        known = property(lambda self, trained=trained: trained)
        monkeypatch.setattr(jax_longctx.ModelConfig, "trained_length", known)
        assert model_of(loaded).max_length == most
        assert model_of(loaded, max_length=77).max_length == 77


def test_method_mesh_and_dtype_are_those_asked_for(folder, loaded):
    checkpoint = str(folder / "bos")
    text = f"checkpoint={checkpoint},method=streaming-llm,budget=64,chunk=16,sink=2"
    text += ",mesh=data=2/tensor=2,dtype=bfloat16,device=cpu"
    model = LongctxLM.create_from_arg_string(text, {"batch_size": 2})
    facts = model.get_model_info()
    assert facts["method"]["name"] == "streaming-llm"
    assert facts["method"]["settings"]["budget"] == 64 and facts["method"]["settings"]["sink"] == 2
    assert facts["mesh"] == {"data": 2, "seq": 1, "tensor": 2}
    assert facts["model_dtype"] == "bfloat16"
    assert model.batch_size == 2 and model.max_length == 256
    json.dumps(facts)
    # What the harness's command line says for itself.
    plain = LongctxLM(checkpoint, dtype="auto", device="cuda:0").get_model_info()
    assert plain["model_dtype"] == "float32" and plain["method"]["name"] == "full"
    name, again = (LongctxLM(checkpoint).tokenizer_name for _ in range(2))
    assert name == again and name.startswith("bos-") and "/" not in name
    assert model_of(loaded).chat_template(True) == loaded.tokenizer.chat_template


def test_what_was_answered_is_not_asked_again(folder, loaded, monkeypatch):
    tasks = ["tiny_choice", "tiny_rolling", "tiny_answer"]
    cache = str(folder / "answers")
    first = evaluate(folder, model_of(loaded), tasks, use_cache=cache)
    again = model_of(loaded)
    for name in ("_generate", "_scores"):
        monkeypatch.setattr(again, name, None)
    second = evaluate(folder, again, tasks, use_cache=cache)
    assert second["results"] == first["results"]
    # Not of another model or method, or in another way; nor of who does not say.
    engine = loaded.engine
    scale = engine.params["final_norm"]["scale"].at[-1].add(1)
    params = {**engine.params, "final_norm": {"scale": scale}}
    full = jax_longctx.make_method("full")
    other = engine_over(engine.config, params, full, engine.mesh, chunk=CHUNK)
    for model, what in (
        (
            under(loaded, "streaming-llm", {"budget": 32, "chunk": 32}),
            "method.name 'full', now it is 'stre",
        ),
        (model_of(loaded, through="question"), "through 'decode', now it is 'question'"),
        (model_of(loaded, max_length=MAX_LENGTH - 1), "max_length "),
        (model_of(jax_longctx.LongContext(other, loaded.tokenizer)), "all_weights "),
    ):
        with pytest.raises(OriginError, match=f"answers_rank0.db was made with {what}"):
            evaluate(folder, model, tasks, use_cache=cache)
    with SqliteDict(f"{cache}_rank0.db", autocommit=True) as kept:
        del kept["made_from"]
    with pytest.raises(OriginError, match="name another file for --use_cache"):
        evaluate(folder, model_of(loaded), tasks, use_cache=cache)


def test_the_harness_finds_the_model_whose_arguments_hide_no_setting_of_a_method():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    ((name, value),) = project["entry-points"]["lm_eval.models"].items()
    point = metadata.EntryPoint(name, value, "lm_eval.models")
    assert get_model(name) is point.load() is LongctxLM
    assert {"hf", "dummy"} <= set(model_registry.keys())
    own = set(inspect.signature(LongctxLM.__init__).parameters) - {"self", "settings"}
    for name, method in METHODS.items():
        assert not own & {field.name for field in dataclasses.fields(method)}, name


def test_the_command_line_hands_its_arguments_over(monkeypatch):
    told, before = [], list(sys.argv)

    def evaluate():
        told.append(list(sys.argv))
        if "run" in sys.argv:
            raise InputError("too long")

    monkeypatch.setattr("lm_eval.__main__.cli_evaluate", evaluate)
    args = ["--model", "jax-longctx", "--model_args", "checkpoint=x,chunk=16", "--tasks", "a", "-h"]
    assert CliRunner().invoke(app, ["lm-eval", *args]).exit_code == 0
    refused = CliRunner().invoke(app, ["lm-eval", "run", "--help"])
    assert refused.exit_code == 2 and refused.stderr == "error: too long\n"
    assert told == [["lm_eval", *args], ["lm_eval", "run", "--help"]] and sys.argv == before
    monkeypatch.setitem(sys.modules, "lm_eval.__main__", None)
    result = CliRunner().invoke(app, ["lm-eval", "--tasks", "a"])
    assert result.exit_code == 2 and "pip install 'jax-longctx[harness]'" in result.stderr


@pytest.fixture
def template(exact, monkeypatch):
    return lambda source: monkeypatch.setattr(exact.tokenizer, "_chat", ChatTemplate(source, {}))


def test_templates_that_refuse_the_system_and_answers_that_are_left_open(exact, template, caplog):
    template(REFUSES + "{{ messages[0]['content'] }}!")
    with caplog.at_level(logging.WARNING):
        assert exact.apply_chat_template([SYSTEM, USER]) == "hello !"
    assert "no system; the system's message is left out" in " ".join(caplog.text.split())
    assert exact.apply_chat_template([USER]) == "hello !"
    # One that refuses everything is an error at once.
    caplog.clear()
    template("{{ raise_exception('never') }}")
    with caplog.at_level(logging.WARNING), pytest.raises(InputError, match="never"):
        exact.apply_chat_template([USER])
    assert caplog.text == ""
    # The start of an answer is left open.
    for source, text in [
        ("{{ messages[0]['content'] }}<end>", "hello "),
        ("{{ messages[0]['content'] | trim }}<end>", "hello"),
        ("hello {{ messages[0]['content'] | trim }}<end>", "hello hello"),
    ]:
        template(source)
        assert exact.apply_chat_template([USER], add_generation_prompt=False) == text
    name = exact.tokenizer_name
    template("{{ 'other' }}")
    # Prompts of a template of another name have another cache.
    assert exact.tokenizer_name != name
    with pytest.raises(InputError, match="changes the last message"):
        exact.apply_chat_template([USER], add_generation_prompt=False)


def test_a_text_begins_with_the_tokens_that_the_tokenizer_has(exact, monkeypatch):
    begin, end = exact.tokenizer.special_id("<|begin|>"), exact.tokenizer.special_id("<|end|>")
    assert (exact.prefix_token_id, exact.eot_token_id) == (begin, end)
    assert exact.tok_encode("a", add_special_tokens=False) == exact.tok_encode("a")[1:]
    assert exact.tok_encode("a")[0] == begin
    monkeypatch.setattr(exact.tokenizer, "bos_id", None)
    assert exact.prefix_token_id == end
    monkeypatch.setattr(exact.tokenizer, "eos_ids", ())
    with pytest.raises(ConfigError, match="no end-of-text token"):
        _ = exact.eot_token_id
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ConfigError, match="runs in one process"):
        LongctxLM(exact.model)
