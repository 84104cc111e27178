"""`warm` fills the cache without weights: an `ask` of that shape then compiles nothing."""

import json
import os
import subprocess
import sys

import jax
import pytest

# The command line, and at the end how many programs were asked for and found, on stderr.
COUNTING = """
import sys
from jax_longctx.engine.programs import CompileClock
from jax_longctx.cli.main import app
with CompileClock() as clock:
    try:
        app(sys.argv[1:])
    finally:
        print(f"asked {clock.programs} found {clock.hits}", file=sys.stderr)
"""


def run(folder, *args):
    """Standard output as JSON, and the programs asked for and found."""
    # As users set it, but for JAX's least time, which the tests' own settings do not reach.
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder)}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    done = subprocess.run(
        [sys.executable, "-c", COUNTING, *map(str, args)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    words = done.stderr.split()
    asked, found = int(words[words.index("asked") + 1]), int(words[words.index("found") + 1])
    return json.loads(done.stdout), asked, found


# As the text and the question of an `ask` below are laid out.
SIZES = ["--length", 52, "--question", 26, "--answer", 8]
SAMPLING = ["--temperature", 0.8, "--top-k", 5, "--top-p", 0.9, "--repetition-penalty", 1.2]


@pytest.fixture
def least_time():
    """`warm` keeps every program; other tests go on as they did."""
    told = jax.config.values["jax_persistent_cache_min_compile_time_secs"]
    yield
    jax.config.update("jax_persistent_cache_min_compile_time_secs", told)


@pytest.mark.slow
def test_a_second_warm_finds_all_that_the_first_compiled(run_cli, checkpoint, least_time):
    for again in (False, True):
        # What this process has compiled is forgotten, not what the cache holds.
        jax.clear_caches()
        result = run_cli("warm", checkpoint, "-m", "snapkv", *SIZES, *SAMPLING, "--json")
        assert result.exit_code == 0, result.output
        record = json.loads(result.stdout)
        (case,) = record["cases"]
        assert case["programs"] > 10 and (not again or case["found"] == case["programs"])
        assert (case["method"], case["length"], record["answer"]) == ("snapkv", 52, 8)
        assert record["sampling"]["top_k"] == 5
        assert record["folder"] == jax.config.values["jax_compilation_cache_dir"]
        assert record["cache_bytes"] > 10_000


@pytest.mark.slow
def test_programs_of_an_offloaded_context_are_warmed(run_cli, checkpoint, least_time):
    tier = ["--offload", "host", "--working-set", 64]
    quest = "quest:budget=16,sink=2,local=16"
    result = run_cli("warm", checkpoint, "-m", quest, *SIZES, *tier, "--json")
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert (record["offload"], record["working_set"]) == ("host", 64)
    result = run_cli("warm", checkpoint, "-m", "snapkv", *SIZES, *tier)
    assert result.exit_code == 2 and "snapkv cannot be offloaded" in result.stderr


@pytest.mark.slow
def test_after_warm_an_ask_compiles_nothing(checkpoint, book, tmp_path):
    cache = tmp_path / "cache"
    args = ["-m", "snapkv", *SIZES, *SAMPLING, "--json"]
    first, _, found = run(cache, "warm", checkpoint, *args)
    (case,) = first["cases"]
    assert found == 0 < case["programs"] and first["cache_bytes"] > 10_000
    assert first["sampling"]["top_k"] == 5
    assert first["folder"] == str(cache / "jax_longctx")
    second, _, _ = run(cache, "warm", checkpoint, *args)
    (again,) = second["cases"]
    assert again["found"] == again["programs"] > 10
    ask = ["ask", book, "What is the pass key?", "-c", checkpoint, "-m", "snapkv", "--json"]
    answer, asked, found = run(cache, *ask, "--max-tokens", 8, *SAMPLING)
    assert answer["tokens"] == {"context": 52, "question": 26, "answer": 8}
    assert asked == found > 10
    assert 0 < answer["seconds"]["compile"]


def test_what_cannot_be_warmed_is_refused(run_cli, tmp_path):
    result = run_cli("warm", "llama-9")
    assert result.exit_code == 2 and "llama-3.1-8b" in result.output
    result = run_cli("warm", tmp_path)
    assert result.exit_code == 2 and "is not a converted checkpoint" in result.output


@pytest.fixture
def run_cli():
    from typer.testing import CliRunner

    from jax_longctx.cli.main import app

    return lambda *args: CliRunner().invoke(app, [str(arg) for arg in args])
