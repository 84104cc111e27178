"""Texts are read whole, or refused in one line."""

import pytest

from jax_longctx.cli.terminal import read_text
from jax_longctx.errors import InputError


def test_reads_utf8_and_drops_the_byte_order_mark(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffGröße\r\n".encode())
    assert read_text(str(path)) == "Größe\r\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b" \n\t", "is empty"),
        (b"abc\xff", r"not UTF-8 text \(byte 3 is 0xff\)"),
        ("ÿ".encode("utf-16"), "not UTF-8"),
    ],
)
def test_refuses(tmp_path, content, message):
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_text(str(path))


def test_unreadable(tmp_path):
    with pytest.raises(InputError, match=r"none\.txt cannot be read: No such file"):
        read_text(str(tmp_path / "none.txt"))
    with pytest.raises(InputError, match="cannot be read: Is a directory"):
        read_text(str(tmp_path))
