"""`warm` fills the cache without weights: an `ask` of that shape then compiles nothing."""

import json

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jax_longctx.engine.programs import CompileClock

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
        result = run("warm", checkpoint, "-m", "snapkv", *SIZES, *SAMPLING, "--json")
        assert result.exit_code == 0, result.output
        record = json.loads(result.stdout)
        (case,) = record["cases"]
        assert case["programs"] > 10
        assert case["found"] == (case["programs"] if again else 0)
        assert (case["method"], case["length"], record["answer"]) == ("snapkv", 52, 8)
        assert record["sampling"]["top_k"] == 5
        assert record["folder"] == str(cache)
        assert record["cache_bytes"] > 10_000
    jax.clear_caches()
    given = ("-c", checkpoint, "-m", "snapkv", "--max-tokens", 8, *SAMPLING, "--json")
    with CompileClock() as clock:
        result = run("ask", book, "What is the pass key?", *given)
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert answer["tokens"] == {"context": 52, "question": 26, "answer": 8}
    assert clock.programs == clock.hits > 10
    assert 0 < answer["seconds"]["compile"]


@pytest.mark.slow
def test_programs_of_an_offloaded_context_are_warmed(run, checkpoint, cache):
    tier = ["--offload", "host", "--working-set", 64]
    quest = "quest:budget=16,sink=2,local=16"
    result = run("warm", checkpoint, "-m", quest, *SIZES, *tier, "--json")
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert (record["offload"], record["working_set"]) == ("host", 64)
    result = run("warm", checkpoint, "-m", "snapkv", *SIZES, *tier)
    assert result.exit_code == 2 and "snapkv cannot be offloaded" in result.stderr


def test_what_cannot_be_warmed_is_refused(run, tmp_path):
    result = run("warm", "llama-9")
    assert result.exit_code == 2 and "llama-3.1-8b" in result.output
    result = run("warm", tmp_path)
    assert result.exit_code == 2 and "is not a converted checkpoint" in result.output
