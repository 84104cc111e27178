"""A tutorial's selector, in a package of its own, is a method like those of the library."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_longctx.errors import ConfigError
from jax_longctx.methods import METHODS, describe, make_method
from tests.jax_longctx.methods.oracles.selection import softmax_output
from tests.jax_longctx.methods.selecting import HEADS, case, layer_shape, step
from tests.outside import files_of, install, offer

ROOT = Path(__file__).parents[3]
FIXED = {"sink": 3, "local": 5}
GIVEN = case((50, 33, 9, 64), answered=2)


@pytest.fixture
def random_pages(tmp_path, monkeypatch):
    """The settings that a test gives, as the installed method."""
    assert offer("selector", tmp_path, monkeypatch) == ["random-pages"]
    return lambda **settings: make_method("random-pages", {"page_size": 4, **FIXED, **settings})


def test_a_selector_is_one_file_of_at_most_30_lines_that_imports_its_kind():
    text = files_of("selector")["random_pages.py"]
    assert len(text.splitlines()) <= 30 and max(map(len, text.splitlines())) <= 100
    imported = {node.module for node in ast.walk(ast.parse(text)) if hasattr(node, "module")}
    ours = {name for name in imported if name.startswith("jax_longctx")}
    assert ours == {"jax_longctx.contract", "jax_longctx.parts.selecting"}


@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 4, 1), (2, 2, 2)])
def test_it_reads_the_pages_drawn_first_whatever_the_query_and_the_mesh(random_pages, sizes):
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


def test_it_says_what_is_true_of_it_and_has_its_kinds_settings(random_pages):
    described = describe("random-pages")
    assert "random-pages" in METHODS
    assert described["summary"].startswith("Decode reads pages drawn at random")
    assert described["phase"] == "decode" and described["keeps_all"] and described["append_only"]
    assert not described["query_aware"]
    assert set(described["settings"]) == {*describe("quest")["settings"], "seed"}
    with pytest.raises(ConfigError, match="random-pages: page_size must divide 128, got 48"):
        random_pages(page_size=48)


def test_it_reads_no_key_but_the_budgets(random_pages):
    method = random_pages(budget=1024, page_size=16, granularity="kv_head")
    shape = layer_shape(*(jnp.zeros(size) for size in [(1, HEADS, 8), (1, 2, 8192, 8)]))
    cache = method.init_cache(shape)
    assert cache.digests is None
    whole = cache.store.k.nbytes + cache.store.v.nbytes
    assert method.read_bytes(cache, 8192) == whole * (1024 + 8) // 8192


@pytest.mark.thorough
def test_it_passes_the_matrix_of_every_method(tmp_path):
    """In a process that finds it as it finds an installed package."""
    install("selector", tmp_path)
    matrix = [Path(__file__).with_name(f"test_{name}.py") for name in ("every_method", "metadata")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "", "-k", "random-pages", *matrix],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "11 passed" in done.stdout, done.stdout
