"""Where compiled programs are kept, when they are not, and when they are dropped."""

import os
from pathlib import Path
from unittest.mock import create_autospec

import jax
import pytest

from jax_longctx import api
from jax_longctx.api import keep_compilations
from jax_longctx.engine import programs
from tests.small_methods import KINDS, small_method
from tests.support import random_rows, tiny_config, tiny_engine


@pytest.fixture(autouse=True)
def untold():
    """JAX has not been told where to keep programs."""
    told = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    jax.config.update("jax_compilation_cache_dir", told)
    jax.config.update("jax_enable_compilation_cache", True)


def test_programs_are_kept_under_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    keep_compilations()
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "cache" / "jax_longctx")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    jax.config.update("jax_compilation_cache_dir", None)
    keep_compilations()
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "home/.cache/jax_longctx")


def test_who_told_jax_is_left_alone(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    jax.config.update("jax_enable_compilation_cache", False)
    keep_compilations()
    assert jax.config.jax_compilation_cache_dir is None
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "mine"))
    keep_compilations()
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "mine")
    assert not (tmp_path / "jax_longctx").exists()


def test_nothing_is_kept_where_nothing_can_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    keep_compilations()
    assert jax.config.jax_compilation_cache_dir is None
    # The tests may run as root, who may write anywhere.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    keep_compilations()
    assert jax.config.jax_compilation_cache_dir is None
    monkeypatch.delenv("XDG_CACHE_HOME")
    homeless = create_autospec(Path.home, side_effect=RuntimeError("no home directory"))
    monkeypatch.setattr(Path, "home", homeless)
    keep_compilations()
    assert jax.config.jax_compilation_cache_dir is None


def test_what_was_used_least_recently_leaves(monkeypatch, tmp_path):
    folder = tmp_path / "jax_longctx"
    # XLA may keep tables of its own there.
    (folder / "tables").mkdir(parents=True)
    # Written in this order; the first was read again since.
    for name, written, read in (("a", 10, 40), ("b", 20, 20), ("c", 30, 30)):
        (folder / name).write_bytes(b"x" * 100)
        os.utime(folder / name, (read, written))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(api, "MOST_BYTES", 300)
    keep_compilations()
    assert sorted(file.name for file in folder.iterdir()) == ["a", "b", "c", "tables"]
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setattr(api, "MOST_BYTES", 299)
    keep_compilations()
    assert sorted(file.name for file in folder.iterdir()) == ["a", "c", "tables"]


def test_programs_of_others_are_no_reason_not_to_begin(monkeypatch, tmp_path):
    folder = tmp_path / "jax_longctx"
    folder.mkdir()
    (folder / "theirs").write_bytes(b"x")
    refused = create_autospec(Path.unlink, side_effect=PermissionError("another user's"))
    monkeypatch.setattr(Path, "unlink", refused)
    monkeypatch.setattr(api, "MOST_BYTES", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    keep_compilations()
    assert jax.config.jax_compilation_cache_dir == str(folder) and (folder / "theirs").exists()


def _mappings():
    return programs.MAPPINGS.read_bytes().count(b"\n")


@pytest.mark.long
@pytest.mark.thorough
@pytest.mark.skipif(not programs.MAPPINGS.exists(), reason="Linux alone limits mappings")
def test_method_upon_method_in_one_process_stays_within_its_mappings(monkeypatch, tmp_path):
    jax.clear_caches()
    # Linux gives 65,530, which takes longer to use up: a limit that some four methods reach.
    limit = _mappings() + 1_000
    most = tmp_path / "max_map_count"
    most.write_text(str(2 * limit))
    monkeypatch.setattr(programs, "MOST_MAPPINGS", most)
    config, contexts, questions = tiny_config(num_layers=1), *map(random_rows, ([90], [3]))
    counts, answers = [], {}
    for name in [*KINDS, "full"]:
        engine = tiny_engine(small_method(name), config=config, chunk=16)
        context = engine.prefill(contexts, reserve=24, questions=questions)
        answer = list(engine.stream(context, questions, max_tokens=8))
        # Full attention comes again at the end, when its programs have been dropped.
        assert answers.setdefault(name, answer) == answer
        counts.append(_mappings())
    # Over the limit by what three methods compile, at most.
    assert limit < max(counts) < limit + 1_000
