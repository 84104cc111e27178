"""JSON lines on the disk that survive a kill at any moment: whole ones count, a torn one goes.

The first line of a file that a run goes on with says what it was begun with.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jax_longctx.errors import InputError

__all__ = ["append", "check_given", "cut", "read"]


def append(file: Any, lines: Sequence[Mapping[str, Any]]) -> bytes:
    """Whole lines, on the disk when this returns. Raises InputError when they cannot be.

    Returns:
      what was written.
    """
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode("utf-8")
    try:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    except OSError as error:
        raise InputError(
            f"{file.name} could not be written: {error.strerror}; run again to go on"
        ) from error
    return text


def cut(path: Path) -> int:
    """Cuts a file behind its last line break; the number of lines that are left."""
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
    """Every whole line. Raises ValueError when one is no JSON object."""
    found = []
    with path.open("rb") as lines:
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


def check_given(path: Path, known: Mapping[str, Any], given: Mapping[str, Any], other: str) -> None:
    """Raises InputError where a run was begun with other values than it is given now.

    Args:
      other: what goes with `path` and would be removed with it, for the error.
    """
    for key in [*given, *known]:
        if known.get(key) != given.get(key):
            raise InputError(
                f"{path} was begun with {key} {known.get(key)!r:.80}, now it is "
                f"{given.get(key)!r:.80}; run with the same, or {other}"
            )
