import gc
import os
from pathlib import Path
from unittest.mock import create_autospec

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jax_longctx.cli import warm
from jax_longctx.engine import compiling, program_files
from jax_longctx.engine import stored as stored_programs
from jax_longctx.engine.compiling import CompileClock
from jax_longctx.engine.program_files import keep_compilations
from jax_longctx.errors import InputError
from tests.small_methods import KINDS, small_method
from tests.support import random_rows, swap, tiny_config, tiny_engine


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
    folder = tmp_path / "cache" / "jax_longctx"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    keep_compilations()
    assert jax.config.jax_compilation_cache_dir == str(folder)
    # Nobody else can write there any more.
    assert folder.stat().st_mode & 0o777 == 0o755
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    jax.config.update("jax_compilation_cache_dir", None)
    keep_compilations()
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "home/.cache/jax_longctx")


def test_another_users_folder_is_left_alone_and_named(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "jax_longctx"
    folder.mkdir()
    folder.chmod(0o777)
    monkeypatch.setattr(program_files.os, "geteuid", lambda: folder.stat().st_uid + 1)
    if folder.stat().st_uid == 0:
        os.chown(folder, 4321, -1)
    keep_compilations()
    assert jax.config.jax_compilation_cache_dir is None
    assert folder.stat().st_mode & 0o777 == 0o777
    (line,) = caplog.messages
    assert f"{folder} is not used: it belongs to user" in line


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
    monkeypatch.setattr(program_files, "MOST_BYTES", 300)
    keep_compilations()
    assert sorted(file.name for file in folder.iterdir()) == ["a", "b", "c", "tables"]
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setattr(program_files, "MOST_BYTES", 299)
    keep_compilations()
    assert sorted(file.name for file in folder.iterdir()) == ["a", "c", "tables"]


def test_programs_of_others_are_no_reason_not_to_begin(monkeypatch, tmp_path):
    folder = tmp_path / "jax_longctx"
    folder.mkdir()
    (folder / "theirs").write_bytes(b"x")
    refused = create_autospec(Path.unlink, side_effect=PermissionError("another user's"))
    monkeypatch.setattr(Path, "unlink", refused)
    monkeypatch.setattr(program_files, "MOST_BYTES", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    keep_compilations()
    assert jax.config.jax_compilation_cache_dir == str(folder) and (folder / "theirs").exists()


@pytest.fixture
def stored(tmp_path):
    """Two programs of the same shapes in JAX's cache, and what runs them anew."""
    program_files.seal_cache()
    compiled, folder = CompileClock(), tmp_path / "programs"
    jax.config.update("jax_compilation_cache_dir", str(folder))
    before = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    compilation_cache.reset_cache()
    x = np.arange(3.0, dtype=np.float32)

    def answers():
        jax.clear_caches()
        functions = (lambda x: x + 2, lambda x: x * 5)
        found = [np.asarray(jax.jit(function)(x)).tolist() for function in functions]
        assert found == [[2.0, 3.0, 4.0], [0.0, 5.0, 10.0]]
        return compiled.hits

    with compiled:
        yield folder, answers
    jax.config.update("jax_persistent_cache_min_compile_time_secs", before)
    compilation_cache.reset_cache()


FAULTS = {
    "swapped": swap,
    "cut": lambda *files: [os.truncate(file, 60) for file in files],
    "open to others": lambda *files: [file.chmod(0o666) for file in files],
    "pipes": lambda *files: [(file.unlink(), os.mkfifo(file)) for file in files],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_cannot_be_trusted_is_compiled_again_and_replaced(stored, fault, caplog):
    folder, answers = stored
    assert answers() == 0 and answers() == 2
    files = sorted(folder.iterdir())
    assert len(files) == 2
    FAULTS[fault](*files)
    # They were replaced; a warning of JAX would be an error.
    assert answers() == 2 and answers() == 4
    (line,) = caplog.messages
    assert str(folder) in line and "compiled again" in line
    assert sorted(folder.iterdir()) == files


def test_a_program_that_cannot_be_replaced_is_compiled_each_time(stored, caplog):
    folder, answers = stored
    assert answers() == 0
    for file in folder.iterdir():
        file.unlink()
        file.mkdir()
        (file / "another's").touch()
    assert answers() == answers() == 0 and len(caplog.messages) == 1


@pytest.mark.parametrize(("mode", "owner"), [(0o777, None), (0o775, None), (0o755, 4321)])
def test_no_program_runs_from_a_folder_that_others_can_write(
    stored, mode, owner, caplog, monkeypatch
):
    folder, answers = stored
    folder.mkdir()
    folder.chmod(mode)
    if owner is not None and os.geteuid() == 0:
        os.chown(folder, owner, -1)
    elif owner is not None:
        monkeypatch.setattr(program_files.os, "geteuid", lambda: owner)
    assert answers() == answers() == 0 and list(folder.iterdir()) == []
    (line,) = caplog.messages
    assert f"{folder} is not used" in line and "JAX_COMPILATION_CACHE_DIR" in line
    assert (f"mode {mode:o}" if owner is None else "belongs to user") in line
    with pytest.raises(InputError, match="there is no compilation cache to fill"):
        warm._cache_folder()


def test_no_pickle_is_read_that_others_can_have_written(tmp_path):
    file, made = tmp_path / "longctx-1", tmp_path / "made"
    # As `pickle` writes a call of `os.mkdir`.
    content = f"cos\nmkdir\n(S'{made}'\ntR.".encode()
    for name, mode in (("longctx-2", 0o600), (file.name, 0o646), (file.name, 0o600)):
        program_files.store(tmp_path / name, content)
        (tmp_path / name).rename(file).chmod(mode)
        assert stored_programs.read(file) is None
        # The last one was.
        assert made.exists() == file.exists() == (name == file.name and mode == 0o600)


def _mappings():
    return compiling.MAPPINGS.read_bytes().count(b"\n")


@pytest.mark.long
@pytest.mark.thorough
@pytest.mark.skipif(not compiling.MAPPINGS.exists(), reason="Linux alone limits mappings")
def test_method_upon_method_in_one_process_stays_within_its_mappings(monkeypatch, tmp_path):
    jax.clear_caches()
    # What earlier tests left must not go in the meantime.
    gc.collect()
    # Linux gives 65,530, which takes longer to use up: a limit that some four methods reach.
    limit = _mappings() + 1_000
    most = tmp_path / "max_map_count"
    most.write_text(str(2 * limit))
    monkeypatch.setattr(compiling, "MOST_MAPPINGS", most)
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
