import json
from unittest.mock import Mock

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jax_longctx import api
from jax_longctx.batch import answering as batch
from jax_longctx.cli.terminal import Compiling
from jax_longctx.engine.compiling import CompileClock
from jax_longctx.evaluation import runner
from jax_longctx.evaluation.rows import read_rows

LARGE = {f"jit({name})" for name in ("_through_layer", "_segment", "_decode_block", "_finish")}


@pytest.mark.parametrize("command", ["ask", pytest.param("generate", marks=pytest.mark.slow)])
def test_programs_compile_while_weights_load(command, checkpoint, book, run, monkeypatch):
    words = {"ask": (book, "Who?"), "generate": ("The pass key",)}[command]
    args = [command, *words, "-c", checkpoint, "--max-tokens", 4, "--json"]
    expected = run(*args, code=0)
    jax.clear_caches()
    waits, order = [], []
    wait, load = Compiling.wait, api.load_params
    monkeypatch.setattr(api.LongContext, "compiles_ahead", True)
    monkeypatch.setattr(api, "load_params", lambda *a: order.append("load") or load(*a))

    def waited(self, **how):
        if self._begun is not None:
            waits.append((len(self._begun), how))
        wait(self, **how)

    monkeypatch.setattr(Compiling, "wait", waited)
    found, plain = json.loads(run(*args, code=0).stdout), json.loads(expected.stdout)
    assert found["answer"] == plain["answer"] and order == ["load"]
    seconds = found["seconds"]
    assert seconds["compile"] > max(seconds["prefill"], seconds["first_token"], 0.1)
    assert waits[0][0] > 3 and len(waits) == (2 if command == "ask" else 1)


@pytest.mark.parametrize("command", ["batch", "eval"])
@pytest.mark.slow
def test_every_shape_is_compiled_first(command, checkpoint, run, tmp_path, monkeypatch):
    folder = tmp_path / "work"
    folder.mkdir()
    lines = [{"prompt": "The pass key is"}, {"context": "A book. " * 40, "question": "Who?"}]
    (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def results(name):
        jax.clear_caches()
        given = folder / "in.jsonl", folder / name, "--max-tokens", 4, "--rows", 2
        if command == "eval":
            given = ("run", "-t", "passkey", "--length", 512, "--trials", 2, "--batch", 1)
            given += ("-m", "full", "-m", "streaming-llm:budget=64,chunk=16", "-o", folder / name)
        run(command, *given, "-c", checkpoint, code=0)
        if command == "batch":
            return (folder / name).read_text()
        rows = read_rows(folder / name)
        assert not [row["refused"] for row in rows if "refused" in row]
        fields = "answer", "tokens", "rows", "bytes", "compiled"
        return [[row[name] for name in fields] for row in rows]

    expected, order, names = results("alone"), [], []
    # Both name the module that computes a batch.
    module, compute = {"batch": (batch, "_compute"), "eval": (runner, "answer_batch")}[command]
    answer, load, compile_ = getattr(module, compute), api.load_params, api.compile_ahead

    def compiled(*args, **how):
        made = compile_(*args, **how)
        order.append("compile")
        return made

    def answered(*args):
        names.clear()
        found = answer(*args)
        order.append("answer")
        assert not LARGE & set(names), names
        return found

    def listen(event, duration_secs, **about):
        names.append(about.get("fun_name"))

    monkeypatch.setattr(api.LongContext, "compiles_ahead", True)
    monkeypatch.setattr(api, "compile_ahead", compiled)
    monkeypatch.setattr(module, compute, answered)
    monkeypatch.setattr(api, "load_params", lambda *a: order.append("load") or load(*a))
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        assert results("ahead") == expected
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    # Once for every shape, which the run finds compiled; an evaluation compiles for both methods
    # before it answers.
    apart = ["compile", "answer"] * 2
    assert order == ["load", *(["compile"] * 2 + ["answer"] * 4 if command == "eval" else apart)]


def test_an_error_of_loading_is_raised(checkpoint, monkeypatch):
    seen, fails = [], Mock(side_effect=api.InputError("the weights are gone"))
    monkeypatch.setattr(api, "load_params", fails)
    with pytest.raises(api.InputError, match="are gone"):
        api.load(checkpoint, ahead=seen.append)
    assert len(seen) == 1


# As the text and the question of an `ask` below are laid out.
SIZES = ["--length", 52, "--question", 26, "--answer", 8]
SAMPLING = ["--temperature", 0.8, "--top-k", 5, "--top-p", 0.9, "--repetition-penalty", 1.2]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The user's cache, empty; other tests go on with their own as they did."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    told = {name: jax.config.values[name] for name in names}
    jax.config.update(names[0], None)
    compilation_cache.reset_cache()
    yield tmp_path / "cache" / "jax_longctx"
    for name, value in told.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.mark.slow
def test_after_warm_nothing_is_compiled_neither_by_warm_nor_by_an_ask(run, checkpoint, book, cache):
    for again in (False, True):
        # What this process has compiled is forgotten, not what the cache holds.
        jax.clear_caches()
        result = run("warm", checkpoint, "-m", "snapkv", *SIZES, *SAMPLING, "--json", code=0)
        record = json.loads(result.stdout)
        (case,) = record["cases"]
        assert case["programs"] > 10
        assert case["found"] == (case["programs"] if again else 0)
        assert (case["method"], case["length"], record["answer"]) == ("snapkv", 52, 8)
        assert record["sampling"]["top_k"] == 5
        assert record["folder"] == str(cache) and record["cache_bytes"] > 10_000
    jax.clear_caches()
    given = ("-c", checkpoint, "-m", "snapkv", "--max-tokens", 8, *SAMPLING, "--json")
    with CompileClock() as clock:
        answer = json.loads(run("ask", book, "What is the pass key?", *given, code=0).stdout)
    assert answer["tokens"] == {"context": 52, "question": 26, "answer": 8}
    assert clock.programs == clock.hits > 10
    assert 0 < answer["seconds"]["compile"]


@pytest.mark.slow
def test_programs_of_an_offloaded_context_are_warmed(run, checkpoint, cache):
    tier = ["--offload", "host", "--working-set", 64]
    quest = "quest:budget=16,sink=2,local=16"
    result = run("warm", checkpoint, "-m", quest, *SIZES, *tier, "--json", code=0)
    record = json.loads(result.stdout)
    assert (record["offload"], record["working_set"]) == ("host", 64)
    result = run("warm", checkpoint, "-m", "snapkv", *SIZES, *tier)
    assert result.exit_code == 2 and "snapkv cannot be offloaded" in result.stderr


def test_what_cannot_be_warmed_is_refused(run, tmp_path):
    for model, message in (
        ("llama-9", "llama-3.1-8b"),
        (tmp_path, "is not a converted checkpoint"),
    ):
        assert message in run("warm", model, code=2).output
