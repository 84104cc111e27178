"""`warm` fills the cache without weights: an `ask` of that shape then compiles nothing."""

import json
import os
import subprocess
import sys

import pytest

# The command line, and at the end how many programs were asked for and found, on stderr.
COUNTING = """
import sys
from jax_longctx.engine.ahead import CompileClock
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


def test_after_warm_an_ask_compiles_nothing(checkpoint, book, tmp_path):
    cache = tmp_path / "cache"
    sampling = ["--temperature", 0.8, "--top-k", 5, "--top-p", 0.9, "--repetition-penalty", 1.2]
    # As the text and the question are laid out below.
    args = ["-m", "snapkv", "--length", 52, "--question", 26, "--answer", 8, *sampling, "--json"]
    first, _, found = run(cache, "warm", checkpoint, *args)
    (case,) = first["cases"]
    assert found == 0 < case["programs"] and first["cache_bytes"] > 10_000
    assert first["sampling"]["top_k"] == 5
    assert first["folder"] == str(cache / "jax_longctx")
    second, _, _ = run(cache, "warm", checkpoint, *args)
    (again,) = second["cases"]
    assert again["found"] == again["programs"] > 10
    ask = ["ask", book, "What is the pass key?", "-c", checkpoint, "-m", "snapkv", "--json"]
    answer, asked, found = run(cache, *ask, "--max-tokens", 8, *sampling)
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
