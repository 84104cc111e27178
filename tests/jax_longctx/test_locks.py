import contextlib
import errno
import fcntl
import multiprocessing
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from jax_longctx.errors import InputError
from jax_longctx.locks import only_writer
from tests.patience import patience


def test_the_second_writer_is_refused_and_the_next_is_not(tmp_path):
    path = tmp_path / "new" / "model"
    with pytest.raises(ZeroDivisionError), only_writer(path):
        _ = 1 / 0
    with only_writer(path):
        with pytest.raises(InputError, match=r"another process is writing .*/model; wait for it"):
            with only_writer(path):
                pass
        with only_writer(tmp_path / "new" / "other"):
            pass
    with only_writer(path):
        pass
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match=r"file/model cannot be written: "):
        with only_writer(tmp_path / "file" / "model"):
            pass


def test_a_link_or_a_users_file_under_the_locks_name_is_left_alone(tmp_path):
    (tmp_path / "precious").write_text("keep")
    (tmp_path / "a.lock").symlink_to(tmp_path / "precious")
    (tmp_path / "b.lock").symlink_to(tmp_path / "made")
    (tmp_path / "c.lock").write_text("keep")
    os.mkfifo(tmp_path / "d.lock")
    before = sorted(tmp_path.iterdir())
    for name, why in (
        ("a", "symbolic link"),
        ("b", "symbolic link"),
        ("c", "no lock"),
        ("d", "no"),
    ):
        with pytest.raises(InputError, match=rf"{name}[^ ]* .*{why}"), only_writer(tmp_path / name):
            pass
    assert sorted(tmp_path.iterdir()) == before
    assert (tmp_path / "precious").read_text() == (tmp_path / "c.lock").read_text() == "keep"


def hold(path, ready):
    with only_writer(path):
        ready.set()
        signal.pause()


def test_a_killed_writer_stops_nobody(tmp_path):
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    process = context.Process(target=hold, args=(tmp_path / "model", ready))
    process.start()
    assert ready.wait(patience(60))
    with pytest.raises(InputError, match="another process"), only_writer(tmp_path / "model"):
        pass
    process.kill()
    process.join()
    assert [path.name for path in tmp_path.iterdir()] == ["model.lock"]
    with only_writer(tmp_path / "model"):
        pass


def test_never_two_at_once(tmp_path):
    """Each holder deletes the file, so others come by with files that are gone."""
    holders, seen = [], []

    def take(number):
        for _ in range(300):
            with contextlib.suppress(InputError), only_writer(tmp_path / "model"):
                holders.append(number)
                seen.append(len(holders))
                os.sched_yield()
                holders.remove(number)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(take, range(8)))
    assert set(seen) == {1} and len(seen) > 1


def test_a_file_system_without_locks_is_written_all_the_same(tmp_path, monkeypatch):
    def refused(file, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refused)
    with only_writer(tmp_path / "model"), only_writer(tmp_path / "other"):
        pass
    assert list(tmp_path.iterdir()) == []
