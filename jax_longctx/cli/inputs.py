"""Texts that a command is given: files, stdin and arguments; UTF-8, with one-line errors."""

import sys
from pathlib import Path

from jax_longctx.cli import processes
from jax_longctx.errors import InputError

__all__ = ["check_argument", "read_text"]


def read_text(source: str) -> str:
    """The text of a file, or of stdin for "-"; a byte order mark is dropped.

    Of several processes the first reads it, for all: a launcher may give stdin to it alone.

    Raises:
      InputError: it cannot be read, is not UTF-8, or is empty.
    """
    if processes.process() is None:
        return _read(source)
    from jax_longctx.engine.distributed import from_leader

    return from_leader(lambda: _read(source))


def _read(source: str) -> str:
    name = "stdin" if source == "-" else source
    if source == "-" and sys.stdin is None:
        raise InputError("stdin is closed; pipe a text in, or give a text file")
    try:
        raw = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
    except OSError as error:
        raise InputError(
            f"{name} cannot be read: {error.strerror}; give a text file, or - for stdin"
        ) from error
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{name} is not UTF-8 text (byte {error.start} is 0x{raw[error.start]:02x}); "
            f"convert it first, e.g. with iconv -t utf-8"
        ) from error
    if not text.strip():
        raise InputError(f"{name} is empty; give a text")
    return text


def check_argument(name: str, text: str) -> str:
    """A text from the command line. Raises InputError when its bytes are not UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        # Python carries bytes that do not decode as half surrogate pairs.
        raise InputError(f"{name} is not UTF-8 text; check the terminal's encoding") from error
    return text
