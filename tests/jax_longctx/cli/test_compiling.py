"""Compilation beside loading, as `ask` and `generate` show it; its seconds stand apart."""

import json

import jax
import pytest

from jax_longctx import api
from jax_longctx.batch import run as batch
from jax_longctx.cli.terminal import Compiling
from jax_longctx.engine import Engine
from jax_longctx.engine.ahead import MOST_TIMES, TIMES, read_times, write_time
from jax_longctx.evaluation import runner

LARGE = {f"jit({name})" for name in ("_through_layer", "_segment", "_decode_block", "_finish")}


@pytest.fixture
def cache(tmp_path):
    """An empty folder as the persistent cache's."""
    told = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", told)


@pytest.mark.parametrize("command", ["ask", pytest.param("generate", marks=pytest.mark.slow)])
def test_programs_compile_while_weights_load(command, checkpoint, book, run, cache, monkeypatch):
    words = {"ask": (book, "Who?"), "generate": ("The pass key",)}[command]
    args = [command, *words, "-c", checkpoint, "--max-tokens", 4, "--json"]
    expected = run(*args)
    assert expected.exit_code == 0, expected.output
    assert not (cache / TIMES).exists()
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
    result = run(*args)
    assert result.exit_code == 0, result.output
    found, plain = json.loads(result.stdout), json.loads(expected.stdout)
    assert found["answer"] == plain["answer"] and order == ["load"]
    seconds = found["seconds"]
    assert seconds["compile"] > max(seconds["prefill"], seconds["first_token"], 0.1)
    assert waits[0][0] > 3 and len(waits) == (2 if command == "ask" else 1)
    # The next run of the same model tells how long it took.
    (took,) = json.loads((cache / TIMES).read_text()).values()
    assert 0 < took < 600


@pytest.mark.parametrize("command", ["batch", pytest.param("eval", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_every_shape_is_compiled_before_its_first_batch(
    command, checkpoint, run, cache, tmp_path_factory, monkeypatch
):
    folder = tmp_path_factory.mktemp(command)
    lines = [{"prompt": "The pass key is"}, {"context": "A book. " * 40, "question": "Who?"}]
    (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def results(name):
        """What the command writes, less times."""
        jax.clear_caches()
        given = folder / "in.jsonl", folder / name, "--max-tokens", 4, "--rows", 2
        if command == "eval":
            given = ("passkey", "--noise", "--length", 512, "--trials", 2, "-m", "full")
            given += ("-m", "streaming-llm:budget=64,chunk=16", "--out", folder / name)
        result = run(command, *given, "-c", checkpoint)
        assert result.exit_code == 0, result.output
        text = (folder / name).read_text()
        if command == "batch":
            return text
        rows = json.loads(text)["rows"]
        assert not [row["refused"] for row in rows if "refused" in row]
        fields = "answer", "tokens", "rows", "bytes", "compiled"
        return [[row[name] for name in fields] for row in rows]

    expected, order = results("alone"), []
    # Both name the module that computes a batch.
    module, compute = {"batch": (batch, "_compute"), "eval": (runner, "answer_batch")}[command]
    answer, load, compile_ = getattr(module, compute), api.load_params, Engine.compile

    def compiled(self, *args, **how):
        made = compile_(self, *args, **how)
        order.append("compile")
        return made

    def answered(*args):
        names.clear()
        found = answer(*args)
        order.append("answer")
        assert not LARGE & set(names), names
        return found

    names = []

    def listen(event, duration_secs, **about):
        names.append(about.get("fun_name"))

    monkeypatch.setattr(api.LongContext, "compiles_ahead", True)
    monkeypatch.setattr(Engine, "compile", compiled)
    monkeypatch.setattr(module, compute, answered)
    monkeypatch.setattr(api, "load_params", lambda *a: order.append("load") or load(*a))
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        assert results("ahead") == expected
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    # Beside loading, and once for every shape, which the run finds compiled; an evaluation compiles
    # for both methods before it answers.
    assert sorted(order[:2]) == ["compile", "load"]
    apart = ["compile", "answer"] * 2
    assert order[2:] == (["compile"] * 2 + ["answer"] * 4 if command == "eval" else apart)


def test_an_error_of_loading_is_raised(checkpoint, monkeypatch):
    def fails(*args):
        raise api.InputError("the weights are gone")

    monkeypatch.setattr(api, "load_params", fails)
    seen = []
    with pytest.raises(api.InputError, match="are gone"):
        api.load(checkpoint, ahead=seen.append)
    assert len(seen) == 1


def test_times_are_kept_and_bounded(cache):
    assert read_times() == {}
    for number in range(MOST_TIMES + 3):
        (cache / TIMES).write_text(json.dumps({str(n): 1.0 for n in range(number)}))
        if number >= MOST_TIMES - 1:
            write_time("new", 2.5)
            times = read_times()
            assert times["new"] == 2.5 and len(times) == min(number + 1, MOST_TIMES)
    (cache / TIMES).write_text("damaged")
    assert read_times() == {}
    write_time("new", 3.0)
    assert read_times() == {"new": 3.0}
    (cache / TIMES).write_text("[1]")
    assert read_times() == {}
