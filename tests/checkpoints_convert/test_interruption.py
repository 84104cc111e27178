"""A conversion that is interrupted is continued, and one that fails leaves nothing."""

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp
from safetensors.numpy import load_file, save_file

from checkpoints_convert import convert, export, importing
from checkpoints_convert.partial import Partial
from jax_longctx.errors import CheckpointError, InputError
from jax_longctx.locks import only_writer
from tests.checkpoints_convert.test_huggingface import assert_same_state, load_all
from tests.checkpoints_convert.tiny import hf_config, random_state, write_checkpoint

ROOT = Path(__file__).parents[2]
also = partial(pytest.param, marks=pytest.mark.slow)


@pytest.fixture
def source(tmp_path, monkeypatch):
    # Every tensor is a group of its own.
    monkeypatch.setattr(importing, "group_limit", lambda largest: 1)
    described = hf_config("llama")
    return write_checkpoint(tmp_path / "hf", described, random_state(described), shards=2)


@pytest.fixture
def saved(monkeypatch):
    """The groups of paths that Orbax is given."""
    groups = []
    save = ocp.partial.save

    def spy(path, tree):
        from tests.checkpoints_convert.test_names import flat

        groups.append({name for name, _ in flat(tree)})
        return save(path, tree)

    monkeypatch.setattr(ocp.partial, "save", spy)
    return groups


def stop_at(share):
    def progress(done, total):
        if done >= share * total:
            raise KeyboardInterrupt

    return progress


def interrupt(source, destination, share=0.6, **options):
    with pytest.raises(KeyboardInterrupt):
        convert(source, destination, progress=stop_at(share), **options)


def assert_converted(source, destination, scratch):
    export(destination, scratch)
    assert_same_state(load_all(scratch), load_all(source))


def test_what_is_written_is_not_written_again(tmp_path, source, saved):
    interrupt(source, tmp_path / "ours", 0.9)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "ours.partial"]
    before = set().union(*saved)
    assert len(saved) > 5
    saved.clear()
    first = []
    convert(source, tmp_path / "ours", progress=lambda done, total: first.append(done))
    again = set().union(*saved)
    assert before and again and not before & again
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "ours"]
    assert_converted(source, tmp_path / "ours", tmp_path / "back")


@pytest.mark.slow
def test_interrupted_twice(tmp_path, source):
    interrupt(source, tmp_path / "ours", 0.3)
    interrupt(source, tmp_path / "ours", 0.8)
    convert(source, tmp_path / "ours")
    assert_converted(source, tmp_path / "ours", tmp_path / "back")


def test_a_group_that_was_being_written_is_written_again(tmp_path, source):
    """What a kill leaves: a group that Orbax had begun, and one that was not noted."""
    interrupt(source, tmp_path / "ours")
    groups = tmp_path / "ours.partial" / "params.partial_save"
    (tmp_path / "ours.partial" / "params.partial_save.orbax-checkpoint-tmp" / "state").mkdir(
        parents=True
    )
    (groups / "params.partial_save.pending_9_unnoted" / "state").mkdir(parents=True)
    convert(source, tmp_path / "ours")
    assert_converted(source, tmp_path / "ours", tmp_path / "back")


def test_another_type_is_refused_until_the_partial_is_gone(tmp_path, source):
    interrupt(source, tmp_path / "ours")
    with pytest.raises(CheckpointError, match=r"begun with another dtype; delete it"):
        convert(source, tmp_path / "ours", dtype="bfloat16")
    assert (tmp_path / "ours.partial").exists()
    convert(source, tmp_path / "ours", dtype="bfloat16", resume=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "ours"]


def test_a_changed_source_is_refused(tmp_path, source):
    interrupt(source, tmp_path / "ours")
    path = source / "model-00002-of-00002.safetensors"
    state = {name: value + 1 for name, value in load_file(path).items()}
    save_file(state, path)
    os.utime(path, ns=(1, 1))
    with pytest.raises(CheckpointError, match="begun with another source"):
        convert(source, tmp_path / "ours")


def test_damaged_progress_is_refused(tmp_path, source):
    interrupt(source, tmp_path / "ours")
    for text in ("{", "[]", "{}"):
        (tmp_path / "ours.partial" / "progress.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"progress\.json (cannot|is damaged).*delete it"):
            convert(source, tmp_path / "ours")


@pytest.mark.parametrize("resume", [True, also(False)])
def test_a_folder_that_only_has_the_name_of_a_partial_is_kept(tmp_path, source, resume):
    (tmp_path / "ours.partial").mkdir()
    (tmp_path / "ours.partial" / "thesis.tex").write_text("keep")
    with pytest.raises(CheckpointError, match="in the way"):
        convert(source, tmp_path / "ours", resume=resume)
    assert (tmp_path / "ours.partial" / "thesis.tex").read_text() == "keep"
    (tmp_path / "ours.partial" / "thesis.tex").unlink()
    convert(source, tmp_path / "ours", resume=resume)


def test_room_that_a_partial_takes_is_counted_as_free(tmp_path, source, monkeypatch):
    interrupt(source, tmp_path / "ours", 0.9)
    total = sum(value.nbytes for value in random_state(hf_config("llama")).values())
    usage = type("Usage", (), {"free": total // 2})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    convert(source, tmp_path / "ours")


@pytest.mark.parametrize("state", ["merging", also("lost")])
def test_what_cannot_be_continued_is_begun_anew(tmp_path, source, saved, state):
    interrupt(source, tmp_path / "ours")
    noted = tmp_path / "ours.partial" / "progress.json"
    values = json.loads(noted.read_text())
    if state == "merging":
        noted.write_text(json.dumps(values | {"state": "merging"}))
    else:
        groups = tmp_path / "ours.partial" / "params.partial_save"
        next(groups.iterdir()).rename(tmp_path / "elsewhere")
    saved.clear()
    convert(source, tmp_path / "ours")
    assert len(set().union(*saved)) == len(random_state(hf_config("llama")))
    assert_converted(source, tmp_path / "ours", tmp_path / "back")


def test_interrupted_after_the_tensors(tmp_path, source, saved, monkeypatch):
    def stop(self, entries):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Partial, "check", stop)
        with pytest.raises(KeyboardInterrupt):
            convert(source, tmp_path / "ours")
    saved.clear()
    convert(source, tmp_path / "ours")
    assert saved == []
    assert_converted(source, tmp_path / "ours", tmp_path / "back")


def test_an_error_after_resuming_leaves_nothing(tmp_path, source):
    state = load_file(source / "model-00002-of-00002.safetensors")
    spoiled = sorted(state)[0]
    state[spoiled].flat[0] = np.nan
    save_file(state, source / "model-00002-of-00002.safetensors")
    interrupt(source, tmp_path / "ours", 0.3)
    with pytest.raises(CheckpointError, match="NaN"):
        convert(source, tmp_path / "ours")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


def run(code, *arguments, **options):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code), *map(str, arguments)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def test_a_killed_process_is_continued(tmp_path, source, saved):
    process = run(
        """
        import sys, time
        from checkpoints_convert import convert, importing
        importing.group_limit = lambda largest: 1
        def progress(done, total):
            if done > total / 2:
                print("half", flush=True)
                time.sleep(60)
        convert(sys.argv[1], sys.argv[2], progress=progress)
        """,
        source,
        tmp_path / "ours",
    )
    assert process.stdout.readline() == "half\n", process.stderr.read()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    # The file of the lock stays, the lock does not.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "ours.lock", "ours.partial"]
    noted = json.loads((tmp_path / "ours.partial" / "progress.json").read_text())
    written = {path for group in noted["groups"].values() for path in group}
    convert(source, tmp_path / "ours")
    assert written and not written & set().union(*saved)
    assert_converted(source, tmp_path / "ours", tmp_path / "back")


@pytest.mark.slow
def test_two_conversions_into_one_folder(tmp_path, source):
    """The second is refused at once; the first ends whole."""
    process = run(
        """
        import sys
        from checkpoints_convert import convert
        def progress(done, total):
            if done == total:
                print("all", flush=True)
                sys.stdin.readline()
        convert(sys.argv[1], sys.argv[2], progress=progress)
        """,
        source,
        tmp_path / "ours",
        stdin=subprocess.PIPE,
    )
    assert process.stdout.readline() == "all\n", process.stderr.read()
    for resume in (True, False):
        with pytest.raises(InputError, match=r"another process is writing .*/ours; wait for it"):
            convert(source, tmp_path / "ours", resume=resume)
    _, errors = process.communicate("go on\n", timeout=120)
    assert process.returncode == 0, errors
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "ours"]
    assert_converted(source, tmp_path / "ours", tmp_path / "back")


def test_an_export_beside_another_is_refused(tmp_path, source):
    convert(source, tmp_path / "ours")
    with only_writer(tmp_path / "back"):
        with pytest.raises(InputError, match="another process is writing"):
            export(tmp_path / "ours", tmp_path / "back")
    assert_converted(source, tmp_path / "ours", tmp_path / "back")


@pytest.mark.parametrize("fault", ["truncated", also("lost"), also("replaced")])
def test_success_is_only_told_over_a_whole_checkpoint(tmp_path, source, monkeypatch, fault):
    """Something spoils what Orbax wrote, before it gets its name."""
    merge = Partial.merge

    def spoiled(self):
        merge(self)
        files = [path for path in (self.folder / "params").rglob("*") if path.is_file()]
        largest = max(files, key=lambda path: path.stat().st_size)
        if fault == "truncated":
            os.truncate(largest, largest.stat().st_size // 2)
        elif fault == "lost":
            largest.unlink()
        else:
            largest.write_bytes(b"")

    monkeypatch.setattr(Partial, "merge", spoiled)
    with pytest.raises(CheckpointError, match=r"ours (could not be|was not) written") as caught:
        convert(source, tmp_path / "ours")
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


@pytest.mark.slow
def test_a_disk_that_fills_up_leaves_nothing(tmp_path, source):
    """The system refuses to write more than this to a file, as a full disk would."""
    process = run(
        """
        import resource, signal, sys
        from checkpoints_convert import convert
        from jax_longctx.errors import CheckpointError
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        # Python would keep a module's bytecode cut off, and never be able to import it again.
        sys.dont_write_bytecode = True
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
        try:
            convert(sys.argv[1], sys.argv[2])
        except CheckpointError as error:
            print(error)
        """,
        source,
        tmp_path / "ours",
    )
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert "could not be written" in out and "File too large" in out
    assert out.count("\n") == 1 and "Traceback" not in errors
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]
