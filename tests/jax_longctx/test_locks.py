"""One writer at a time."""

import errno
import fcntl
import multiprocessing
import os
import signal
import threading

import pytest

from jax_longctx.errors import InputError
from jax_longctx.locks import only_writer


def test_the_second_writer_is_refused_and_the_next_is_not(tmp_path):
    path = tmp_path / "new" / "model"
    with only_writer(path):
        with pytest.raises(InputError, match=r"another process is writing .*/model; wait for it"):
            with only_writer(path):
                pass
        with only_writer(tmp_path / "new" / "other"):
            pass
    with only_writer(path):
        pass
    assert list((tmp_path / "new").iterdir()) == []


def test_it_is_free_after_an_error(tmp_path):
    with pytest.raises(ZeroDivisionError), only_writer(tmp_path / "model"):
        _ = 1 / 0
    with only_writer(tmp_path / "model"):
        pass


def hold(path, ready):
    with only_writer(path):
        ready.set()
        signal.pause()


def test_a_killed_writer_stops_nobody(tmp_path):
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    process = context.Process(target=hold, args=(tmp_path / "model", ready))
    process.start()
    assert ready.wait(60)
    with pytest.raises(InputError, match="another process"), only_writer(tmp_path / "model"):
        pass
    process.kill()
    process.join()
    assert [path.name for path in tmp_path.iterdir()] == ["model.lock"]
    with only_writer(tmp_path / "model"):
        pass


def test_never_two_at_once(tmp_path):
    """Each holder deletes the file, so others come by with files that are gone."""
    holders, most, held = [0], [0], [0]

    def take():
        for _ in range(300):
            try:
                with only_writer(tmp_path / "model"):
                    holders[0] += 1
                    most[0], held[0] = max(most[0], holders[0]), held[0] + 1
                    os.sched_yield()
                    holders[0] -= 1
            except InputError:
                pass

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most[0] == 1 and held[0] > 1


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match=r"file/model cannot be written: "):
        with only_writer(tmp_path / "file" / "model"):
            pass


def test_a_file_system_without_locks_is_written_all_the_same(tmp_path, monkeypatch):
    def refused(file, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refused)
    with only_writer(tmp_path / "model"), only_writer(tmp_path / "other"):
        pass
    assert list(tmp_path.iterdir()) == []
