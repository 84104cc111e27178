"""What is read is a plain file; what is written is whole, and never through a link."""

import os
import socket

import pytest

from jax_longctx.errors import InputError
from jax_longctx.files import open_plain, read_text, write_whole
from jax_longctx.settings import read_toml


def test_what_is_no_plain_file_is_named(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to(tmp_path / "fifo")
    with socket.socket(socket.AF_UNIX) as made:
        os.chdir(tmp_path)
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
