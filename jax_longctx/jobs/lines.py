"""JSON lines on disk that survive a kill at any moment: an incomplete last line is dropped."""

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jax_longctx.files import file_errors, open_plain, write_all

CHECKSUM = "crc32"


def append(file: Any, lines: Sequence[Mapping[str, Any]]) -> None:
    """Appends whole lines; they are on disk when it returns.

    Raises:
      InputError: the file cannot be written.
    """
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    with file_errors(f"{file.name} could not be written", "run again to go on"):
        write_all(file, text.encode("utf-8"))
        os.fsync(file.fileno())


def cut(path: Path) -> int:
    """Cuts a file after its last line break; returns the number of lines that remain."""
    if not path.exists():
        return 0
    with path.open("r+b") as file:
        lines = whole = 0
        for line in file:
            if line.endswith(b"\n"):
                lines, whole = lines + 1, whole + len(line)
        file.truncate(whole)
    return lines


def read(path: Path) -> list[dict[str, Any]]:
    """Every whole line. Raises ValueError for one that is no JSON object."""
    found = []
    with open_plain(path) as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                break
            try:
                found.append(json.loads(line))
            except (ValueError, RecursionError) as error:
                raise ValueError(f"line {number} is no JSON: {error}") from None
            if not isinstance(found[-1], dict):
                raise ValueError(f"line {number} is no JSON object")
    return found


def checked(entry: Mapping[str, Any], first: int = 0) -> dict[str, Any]:
    """The entry with a CRC-32 that begins with `first`, the `checksum` of its file's header."""
    return {**entry, CHECKSUM: checksum(entry, first)}


def checksum(entry: Mapping[str, Any], first: int = 0) -> int:
    """The CRC-32 of an entry."""
    return zlib.crc32(json.dumps(entry).encode(), first)


def verified(found: list[dict[str, Any]], first: int | None = None) -> list[dict[str, Any]]:
    """The lines of a file without their CRC-32s.

    Args:
      first: what checksums begin with; the first line's checksum where it is a header.

    Raises:
      ValueError: a line is damaged, or of another file; it is named by its number.
    """
    for number, entry in enumerate(found, start=1):
        told = entry.pop(CHECKSUM, None)
        if told != checksum(entry, first or 0):
            raise ValueError(f"line {number} is not what was written (its {CHECKSUM} differs)")
        first = told if first is None else first
    return found
