"""Tutorials' methods, in packages of their own, are methods like those of the library."""

import ast
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

from jax_longctx.cli.main import app
from jax_longctx.engine.runs import per_layer
from jax_longctx.errors import ConfigError
from jax_longctx.methods import METHODS, describe, make_method, settings_of
from jax_longctx.methods.full import Full
from tests.jax_longctx.methods.evicting import CONTEXTS, NOTHING, kept_tokens
from tests.jax_longctx.methods.harness import prefill, steps, under
from tests.jax_longctx.methods.oracles.selection import softmax_output
from tests.jax_longctx.methods.selecting import HEADS, case, layer_shape, step
from tests.outside import files_of, install, offer
from tests.support import tiny_config, tiny_engine

ROOT = Path(__file__).parents[3]
FIXED = {"sink": 3, "local": 5}
GIVEN = case((50, 33, 9, 64), answered=2)


@pytest.fixture
def every_second(tmp_path, monkeypatch):
    assert offer("eviction_rule", tmp_path, monkeypatch) == ["every-second"]
    return lambda **settings: make_method("every-second", settings)


def test_a_rule_and_a_selector_are_one_file_of_at_most_30_lines():
    rule = files_of("eviction_rule")["every_second.py"].splitlines()
    assert len(rule) <= 30
    assert max(map(len, rule)) <= 100
    text = files_of("selector")["random_pages.py"]
    assert len(text.splitlines()) <= 30 and max(map(len, text.splitlines())) <= 100
    imported = {node.module for node in ast.walk(ast.parse(text)) if hasattr(node, "module")}
    ours = {name for name in imported if name.startswith("jax_longctx")}
    assert ours == {"jax_longctx.contract", "jax_longctx.parts.selecting"}


def test_a_rule_for_a_whole_text_keeps_the_largest_values(every_second):
    rule = importlib.import_module("value_norms").ValueNorms(budget=12, sink=0)
    engine = tiny_engine(rule, config=tiny_config(num_layers=1), chunk=16)
    kept, every = (
        per_layer(prefill(under(engine, method), CONTEXTS).usable_caches())[0]
        for method in (rule, Full())
    )
    for b, count in enumerate(np.asarray(kept.length)):
        values = np.asarray(every.v)[b, :, : len(CONTEXTS[b])]
        order = np.argsort(-np.linalg.norm(values, axis=-1), axis=-1, kind="stable")
        expected = np.take_along_axis(values, np.sort(order[:, :count])[..., None], axis=1)
        np.testing.assert_array_equal(np.asarray(kept.v)[b, :, :count], expected)


def test_it_keeps_every_second_token_and_comes_back_from_its_settings(every_second):
    method = every_second(budget=12, chunk=4)
    engine = tiny_engine(method, config=tiny_config(num_layers=1), chunk=4)
    rows = []
    for each in steps(engine, CONTEXTS, NOTHING):
        rows = [head for row in kept_tokens(each.caches)[0] for head in row]
    # Of 37 tokens the newest even ones, of 20 all even ones and the newest of the others.
    assert rows[0] == rows[1] == tuple(range(14, 37, 2))
    assert rows[4] == rows[5] == (0, 2, 4, 6, 8, 10, 12, 14, 16, 17, 18, 19)
    assert rows[2] == tuple(range(9))
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


@pytest.fixture
def random_pages(tmp_path, monkeypatch):
    assert offer("selector", tmp_path, monkeypatch) == ["random-pages"]
    return lambda **settings: make_method("random-pages", {"page_size": 4, **FIXED, **settings})


@pytest.mark.parametrize(
    "sizes",
    [(2, 2, 2), *(pytest.param(it, marks=pytest.mark.slow) for it in ((1, 1, 1), (1, 4, 1)))],
)
def test_a_selector_reads_the_pages_drawn_first_whatever_query_and_mesh(random_pages, sizes):
    got = step(random_pages(budget=12, seed=3), GIVEN, sizes)
    key = jax.random.key(3)
    draws = [float(jax.random.uniform(jax.random.fold_in(key, page))) for page in range(16)]
    for row, length in enumerate(GIVEN.lengths):
        start, stop = min(3, length), max(3, length - 5)
        pages = [p for p in range(16) if p * 4 < stop and (p + 1) * 4 > start]
        kept = np.zeros((HEADS, length), bool)
        kept[:, :start] = kept[:, stop:] = True
        for page in sorted(pages, key=lambda page: -draws[page])[:3]:
            kept[:, max(page * 4, start) : min(page * 4 + 4, stop)] = True
        q, k, v = (x.astype(float) for x in (GIVEN.q, GIVEN.k[:, :length], GIVEN.v[:, :length]))
        np.testing.assert_array_equal(got.kept[row], kept.sum(1))
        np.testing.assert_allclose(
            got.out[row], softmax_output(q[row], k[row], v[row], kept), atol=2e-5
        )


def test_a_selector_says_what_is_true_of_it(random_pages):
    described = describe("random-pages")
    assert "random-pages" in METHODS
    assert described["summary"].startswith("Decode reads pages drawn at random")
    assert described["phase"] == "decode" and described["keeps_all"] and described["append_only"]
    assert not described["query_aware"]
    assert set(described["settings"]) == {*describe("quest")["settings"], "seed"}
    with pytest.raises(ConfigError, match="random-pages: page_size must divide 128, got 48"):
        random_pages(page_size=48)
    method = random_pages(budget=1024, page_size=16, granularity="kv_head")
    shape = layer_shape(*(jnp.zeros(size) for size in [(1, HEADS, 8), (1, 2, 8192, 8)]))
    cache = method.init_cache(shape)
    assert cache.digests is None
    whole = cache.store.k.nbytes + cache.store.v.nbytes
    assert method.read_bytes(cache, 8192) == whole * (1024 + 8) // 8192


@pytest.mark.thorough
def test_both_pass_the_matrix_of_every_method(tmp_path):
    names = [*install("eviction_rule", tmp_path), *install("selector", tmp_path)]
    matrix = [Path(__file__).with_name(f"test_{name}.py") for name in ("every_method", "metadata")]
    options = ["-q", "-n", "0", "-m", "", "-k", " or ".join(names)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *matrix],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "16 passed" in done.stdout, done.stdout
