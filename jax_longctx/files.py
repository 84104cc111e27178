"""Files that users name: one that is read is a plain file, and one that is made is no link.

Opening a FIFO that nobody writes blocks for ever, and a device may never end. The errors are
OSErrors, so callers name the path and say what to do as for any other file.
"""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO, TextIO

KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


def check_plain(path: str | Path) -> None:
    """Raises OSError where the path is no plain file and no pipe of the shell's (`<(...)`)."""
    kind = stat.S_IFMT(os.stat(path).st_mode)
    # A pipe without a name has a writer: its link below /dev/fd leads to no path.
    unnamed = kind == stat.S_IFIFO and not os.path.exists(os.path.realpath(path))
    if kind != stat.S_IFREG and not unnamed:
        raise OSError(errno.EINVAL, f"it is {KINDS.get(kind, 'no plain file')}", str(path))


def open_plain(path: str | Path) -> BinaryIO:
    """A plain file, to read its bytes; raises OSError as `check_plain`."""
    check_plain(path)
    return open(path, "rb")


def read_bytes(path: str | Path) -> bytes:
    """The bytes of a plain file; raises OSError as `check_plain`."""
    with open_plain(path) as file:
        return file.read()


def read_text(path: str | Path, encoding: str = "utf-8") -> str:
    """The text of a plain file; raises OSError as `check_plain`, and UnicodeDecodeError."""
    return read_bytes(path).decode(encoding).replace("\r\n", "\n").replace("\r", "\n")


def create(path: Path) -> TextIO:
    """A file to write a text to, in UTF-8; raises OSError where the path is a symbolic link."""
    return open(path, "w", encoding="utf-8", opener=no_link)


def no_link(path: str, flags: int) -> int:
    """An opener that raises OSError for a symbolic link, whose target it would write to."""
    try:
        return os.open(path, flags | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise OSError(errno.ELOOP, "it is a symbolic link; remove it", path) from None
