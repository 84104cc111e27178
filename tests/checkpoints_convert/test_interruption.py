import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import create_autospec

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from checkpoints_convert import convert, export, importing
from checkpoints_convert.partial import Partial
from jax_longctx.errors import CheckpointError, InputError
from jax_longctx.locks import only_writer
from tests.checkpoints_convert.test_huggingface import assert_same_state, load_all
from tests.checkpoints_convert.tiny import full_disk, hf_config, random_state, write_checkpoint
from tests.chunks import exchange, pairs_in

ROOT = Path(__file__).parents[2]
SECOND = "model-00002-of-00002.safetensors"


@pytest.fixture
def source(tmp_path, monkeypatch):
    # Every tensor is a group of its own.
    monkeypatch.setattr(importing, "GROUP", 1)
    described = hf_config("llama")
    return write_checkpoint(tmp_path / "hf", described, random_state(described), shards=2)


@pytest.fixture
def saved(monkeypatch):
    groups = []
    save = Partial.save

    def spy(self, arrays):
        groups.append({*arrays})
        return save(self, arrays)

    monkeypatch.setattr(Partial, "save", spy)
    return groups


def interrupt(source, destination, share=0.6, **options):
    def progress(done, total):
        if done >= share * total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, destination, progress=progress, **options)


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def assert_converted(source, folder):
    assert names_in(folder) == ["hf", "ours"]
    export(folder / "ours", folder / "back")
    assert_same_state(load_all(folder / "back"), load_all(source))


def test_what_is_written_is_not_written_again(tmp_path, source, saved, monkeypatch):
    interrupt(source, tmp_path / "ours", 0.3)
    interrupt(source, tmp_path / "ours", 0.9)
    assert names_in(tmp_path) == ["hf", "ours.partial"]
    before = set().union(*saved)
    assert 5 < len(saved) == len(before)
    saved.clear()
    stop = create_autospec(Partial.check, side_effect=KeyboardInterrupt)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Partial, "check", stop)
        convert(source, tmp_path / "ours")
    again = set().union(*saved)
    assert before and again and not before & again
    saved.clear()
    convert(source, tmp_path / "ours")
    assert saved == []
    assert_converted(source, tmp_path)


def test_a_group_that_was_being_written_is_written_again(tmp_path, source, monkeypatch):
    """A kill leaves arrays that are not noted; the room that the partial takes counts as free."""
    interrupt(source, tmp_path / "ours", 0.9)
    progress = tmp_path / "ours.partial" / "progress.json"
    noted = json.loads(progress.read_text())
    lost = [*noted["digests"]][-3:]
    for path in lost:
        del noted["digests"][path]
    progress.write_text(json.dumps(noted))
    total = sum(value.nbytes for value in random_state(hf_config("llama")).values())
    usage = type("Usage", (), {"free": total // 2})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    convert(source, tmp_path / "ours")
    assert_converted(source, tmp_path)


def test_what_does_not_fit_a_partial_is_refused_until_it_is_gone(tmp_path, source):
    interrupt(source, tmp_path / "ours")
    with pytest.raises(CheckpointError, match=r"begun with another dtype; delete it"):
        convert(source, tmp_path / "ours", dtype="bfloat16")
    noted = tmp_path / "ours.partial" / "progress.json"
    whole = noted.read_text()
    for text in ("{", "[]", "{}", "[" * 100_000):
        noted.write_text(text)
        with pytest.raises(CheckpointError, match=r"progress\.json (cannot|is damaged).*delete it"):
            convert(source, tmp_path / "ours")
    noted.write_text(whole)
    path = source / SECOND
    save_file({name: value + 1 for name, value in load_file(path).items()}, path)
    os.utime(path, ns=(1, 1))
    with pytest.raises(CheckpointError, match="begun with another source"):
        convert(source, tmp_path / "ours")
    assert (tmp_path / "ours.partial").exists()
    shutil.rmtree(tmp_path / "ours.partial")
    convert(source, tmp_path / "ours", dtype="bfloat16")
    assert names_in(tmp_path) == ["hf", "ours"]


def test_an_array_that_was_changed_in_a_partial_is_found(tmp_path, source):
    interrupt(source, tmp_path / "ours", 0.9)
    one, another = pairs_in(tmp_path / "ours.partial" / "params" / "state")[0]
    exchange(one, another)
    with pytest.raises(CheckpointError, match=r"not written whole .*lacking \['"):
        convert(source, tmp_path / "ours")
    assert names_in(tmp_path) == ["hf"]


def test_a_folder_that_only_has_the_name_of_a_partial_is_kept(tmp_path, source):
    thesis = tmp_path / "ours.partial" / "thesis.tex"
    thesis.parent.mkdir()
    thesis.write_text("keep")
    with pytest.raises(CheckpointError, match="in the way"):
        convert(source, tmp_path / "ours")
    assert thesis.read_text() == "keep"
    thesis.unlink()
    convert(source, tmp_path / "ours")


@pytest.mark.parametrize("state", ["older", pytest.param("lost", marks=pytest.mark.slow)])
def test_what_cannot_be_continued_is_begun_anew(tmp_path, source, saved, state):
    interrupt(source, tmp_path / "ours")
    progress = tmp_path / "ours.partial" / "progress.json"
    if state == "older":
        noted = json.loads(progress.read_text())
        progress.write_text(json.dumps({"made_from": noted["made_from"], "groups": {}}))
    else:
        shutil.rmtree(tmp_path / "ours.partial" / "params")
    saved.clear()
    convert(source, tmp_path / "ours")
    assert len(set().union(*saved)) == len(random_state(hf_config("llama")))
    assert_converted(source, tmp_path)


def test_an_error_after_resuming_leaves_nothing(tmp_path, source):
    state = load_file(source / SECOND)
    min(state.items())[1].flat[0] = np.nan
    save_file(state, source / SECOND)
    interrupt(source, tmp_path / "ours", 0.3)
    with pytest.raises(CheckpointError, match="NaN"):
        convert(source, tmp_path / "ours")
    assert names_in(tmp_path) == ["hf"]


KILLED = """
import sys, time
from checkpoints_convert import convert, importing
importing.GROUP = 1
def progress(done, total):
    if done > total / 2:
        print("half", flush=True)
        time.sleep(60)
convert(sys.argv[1], sys.argv[2], progress=progress)
"""


def test_a_killed_process_is_continued(tmp_path, source, saved):
    command = [sys.executable, "-W", "error", "-c", KILLED, source, tmp_path / "ours"]
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    process = subprocess.Popen(command, env={**os.environ, "JAX_PLATFORMS": "cpu"}, **how)
    assert process.stdout.readline() == "half\n", process.stderr.read()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    # The file of the lock stays, the lock does not.
    assert names_in(tmp_path) == ["hf", "ours.lock", "ours.partial"]
    noted = json.loads((tmp_path / "ours.partial" / "progress.json").read_text())
    written = {*noted["digests"]}
    convert(source, tmp_path / "ours")
    assert written and not written & set().union(*saved)
    assert_converted(source, tmp_path)


def test_a_second_conversion_or_export_into_one_folder_is_refused(tmp_path, source):
    refusals = []

    def progress(done, total):
        if done == total:
            with pytest.raises(InputError, match=r"another process is writing .*/ours; wait"):
                convert(source, tmp_path / "ours")
            refusals.append(done)

    convert(source, tmp_path / "ours", progress=progress)
    assert len(refusals) == 1
    assert names_in(tmp_path) == ["hf", "ours"]
    with only_writer(tmp_path / "back"):
        with pytest.raises(InputError, match="another process is writing"):
            export(tmp_path / "ours", tmp_path / "back")
    assert_converted(source, tmp_path)


def test_success_is_only_told_over_a_whole_checkpoint(tmp_path, monkeypatch):
    described, check = hf_config("llama"), Partial.check
    source = write_checkpoint(tmp_path / "hf", described, random_state(described))
    for spoil in (
        lambda path: os.truncate(path, path.stat().st_size // 2),
        Path.unlink,
        lambda path: path.write_bytes(b""),
    ):

        def spoiled(self, entries, spoil=spoil):
            files = [path for path in self.params.rglob("*") if path.is_file()]
            spoil(max(files, key=lambda path: path.stat().st_size))
            return check(self, entries)

        monkeypatch.setattr(Partial, "check", spoiled)
        with pytest.raises(CheckpointError, match=r"ours (could not be|was not) written") as caught:
            convert(source, tmp_path / "ours")
        assert "\n" not in str(caught.value)
        assert names_in(tmp_path) == ["hf"]


def test_a_disk_that_fills_up_leaves_nothing(tmp_path, source, capfd):
    with full_disk(), pytest.raises(CheckpointError, match="could not be written") as caught:
        convert(source, tmp_path / "ours")
    said = str(caught.value)
    assert "File too large" in said and "\n" not in said
    assert "Traceback" not in capfd.readouterr().err
    assert names_in(tmp_path) == ["hf"]
