"""A tutorial's eviction rule, in a package of its own, is a method like those of the library."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jax_longctx.cli.main import app
from jax_longctx.methods import METHODS, describe, make_method, settings_of
from tests.jax_longctx.methods.evicting import CONTEXTS, NOTHING, kept_tokens
from tests.jax_longctx.methods.harness import steps
from tests.outside import files_of, install, offer
from tests.support import tiny_config, tiny_engine

ROOT = Path(__file__).parents[3]


@pytest.fixture
def every_second(tmp_path, monkeypatch):
    """The settings that a test gives, as the installed method."""
    assert offer("eviction_rule", tmp_path, monkeypatch) == ["every-second"]
    return lambda **settings: make_method("every-second", settings)


def test_a_rule_is_one_file_of_at_most_30_lines():
    rule = files_of("eviction_rule")["every_second.py"].splitlines()
    assert len(rule) <= 30
    assert max(map(len, rule)) <= 100


def test_it_keeps_every_second_token_and_the_newest_of_the_others(every_second):
    method = every_second(budget=12, chunk=4)
    engine = tiny_engine(method, config=tiny_config(num_layers=1), chunk=4)
    rows = []
    for step in steps(engine, CONTEXTS, NOTHING):
        rows = [head for row in kept_tokens(step.caches)[0] for head in row]
    # Of 37 tokens the newest even ones, of 20 all even ones and the newest of the others.
    assert rows[0] == rows[1] == tuple(range(14, 37, 2))
    assert rows[4] == rows[5] == (0, 2, 4, 6, 8, 10, 12, 14, 16, 17, 18, 19)
    assert rows[2] == tuple(range(9))


def test_it_is_described_and_comes_back_from_its_settings(every_second):
    described = describe("every-second")
    assert described["summary"] == "Tokens of even index, the newest first; then the others"
    assert not described["append_only"] and not described["keeps_all"]
    settings = {"budget": 1024, "chunk": 256, "positions": "true", "protocol": "own", "step": 2}
    assert {key: value["default"] for key, value in described["settings"].items()} == settings
    method = every_second(step=3)
    assert make_method(**settings_of(method)) == method


@pytest.mark.slow
def test_the_command_line_knows_it(every_second):
    def run(words):
        result = CliRunner().invoke(app, words.split())
        assert result.exit_code == 0, result.output
        return [json.loads(line) for line in result.stdout.splitlines()]

    assert [line["name"] for line in run("methods --json")] == list(METHODS)
    assert "every-second" in METHODS
    assert run("plan --model llama-3.2-1b --target h200 --context 4096 -m every-second --json")


@pytest.mark.thorough
def test_it_passes_the_matrix_of_every_method(tmp_path):
    """In a process that finds it as it finds an installed package."""
    install("eviction_rule", tmp_path)
    matrix = [Path(__file__).with_name(f"test_{name}.py") for name in ("every_method", "metadata")]
    path = os.pathsep.join([str(ROOT), str(tmp_path)])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "", "-k", "every-second", *matrix],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "11 passed" in done.stdout, done.stdout
