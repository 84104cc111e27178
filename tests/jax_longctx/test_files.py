"""What is read is a plain file; what is written is whole, and never through a link.

Every path that reaches the storage library is whole, and names the folder that the system names.
"""

import os
import socket

import pytest

from jax_longctx.errors import InputError
from jax_longctx.files import open_plain, read_text, whole_path, write_whole
from jax_longctx.settings import read_toml

PATHS = {
    "../there": "there",
    "./../here/./x//y/": "here/x/y",
    "a b/ü 漢#?%&=:*": "here/a b/ü 漢#?%&=:*",
    "~/x": "home/x",
    "~nobody-here/~": "here/~nobody-here/~",
    "link": "far/in",
    # As the system has it: not `here`.
    "link/../x": "far/x",
    "dangling/x": "far/none/x",
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The working directory `here`, beside `home` and `far`, with links to the latter."""
    for name in ("here", "home", "far/in"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "here" / "link").symlink_to(tmp_path / "far" / "in")
    (tmp_path / "here" / "dangling").symlink_to("../far/none")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path


@pytest.mark.parametrize(("given", "found"), PATHS.items(), ids=str)
def test_a_path_is_whole(here, given, found):
    assert str(whole_path(given)) == str(here / found)
    # With the two slashes at its start that pathlib keeps.
    assert str(whole_path(f"/{here / found}")) == str(here / found)


@pytest.mark.parametrize("name", ["back\\slash", "x.__lock/y", "\udcff", "a\0b"])
def test_what_the_library_cannot_name_is_refused(here, name):
    with pytest.raises(InputError, match=r"cannot be used: .*; (rename|choose)") as caught:
        whole_path(f"../{name}")
    assert str(caught.value).isprintable()


def test_what_is_no_plain_file_is_named(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to(tmp_path / "fifo")
    with socket.socket(socket.AF_UNIX) as made:
        monkeypatch.chdir(tmp_path)  # a socket's path is short
        made.bind("socket")
    special = dict.fromkeys(("fifo", "link", "socket", "/dev/zero"), "a FIFO, a socket or a device")
    for name, said in {**special, ".": "Is a directory", "none": "No such file"}.items():
        with pytest.raises(OSError, match=said) as caught:
            open_plain(tmp_path / name)
        assert caught.value.filename == str(tmp_path / name)
    with pytest.raises(InputError, match="fifo cannot be read: it is a FIFO"):
        read_toml(tmp_path / "fifo")


def test_a_shells_pipe_and_a_link_to_a_file_are_read(tmp_path):
    read, write = os.pipe()
    os.write(write, b"a\r\nb")
    os.close(write)
    assert read_text(f"/dev/fd/{read}") == "a\nb"
    os.close(read)
    (tmp_path / "file").write_text("text")
    (tmp_path / "link").symlink_to("file")
    assert read_text(tmp_path / "link") == "text"


def test_a_link_is_not_written_through(tmp_path):
    (tmp_path / "precious").write_text("keep")
    (tmp_path / "out.png.partial").symlink_to("precious")
    with pytest.raises(InputError, match=r"out.png could not be .*: out.png.partial is a sym"):
        write_whole("new", tmp_path / "out.png")
    assert (tmp_path / "precious").read_text() == "keep"
    write_whole("new", tmp_path / "out.txt")
    assert (tmp_path / "out.txt").stat().st_mode == (tmp_path / "precious").stat().st_mode
