"""Reading files once: byte ranges in order, the checksum on the way, errors that name the file."""

import hashlib
import json
from pathlib import Path
from types import TracebackType
from typing import Any

from jax_longctx.errors import CheckpointError

__all__ = ["HashedFile", "first_line", "parse_json", "read_json", "sha256_of", "unreadable"]

# Bytes that are skipped at a time, when only the checksum wants them.
STEP = 8 << 20


class HashedFile:
    """A file read front to back by byte ranges; what lies between them is only hashed.

    Ranges are read, not mapped: mapped pages of a whole shard would count as this process's memory.
    """

    def __init__(self, path: Path):
        self.path = path
        self._hash = hashlib.sha256()
        self._position = 0
        try:
            self._file = path.open("rb", buffering=0)
        except OSError as error:
            raise unreadable(path, error) from error

    def read(self, offset: int, size: int) -> bytearray:
        """The bytes `offset` to `offset + size`; offsets only grow from call to call."""
        assert offset >= self._position, "ranges are read in the order of the file"
        while self._position < offset:
            self._next(min(STEP, offset - self._position))
        return self._next(size)

    def finish(self) -> str:
        """The SHA-256 of the whole file."""
        while self._advance(STEP):
            pass
        return self._hash.hexdigest()

    def _next(self, size: int) -> bytearray:
        data = self._advance(size)
        if len(data) < size:
            raise CheckpointError(
                f"{self.path} is truncated: it ends at byte {self._position}, "
                f"expected at least {self._position - len(data) + size}; fetch it again"
            )
        return data

    def _advance(self, size: int) -> bytearray:
        """Up to `size` bytes; fewer only at the end of the file."""
        data = bytearray(size)
        filled = 0
        with memoryview(data) as view:
            while filled < size:
                try:
                    count = self._file.readinto(view[filled:])
                except OSError as error:
                    raise unreadable(self.path, error) from error
                if not count:
                    break
                filled += count
        del data[filled:]
        self._hash.update(data)
        self._position += filled
        return data

    def __enter__(self) -> "HashedFile":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()


def unreadable(path: Path, error: OSError) -> CheckpointError:
    """The one line for a file that the system does not let us read."""
    return CheckpointError(f"{path} cannot be read: {error.strerror or error}")


def first_line(error: Exception) -> str:
    """What an error says, in one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:400]


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file."""
    with HashedFile(path) as file:
        return file.finish()


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object that a file holds."""
    try:
        return parse_json(path.read_bytes(), f"{path} is not a JSON file")
    except OSError as error:
        raise unreadable(path, error) from error


def parse_json(raw: bytes, fault: str) -> dict[str, Any]:
    """A JSON object; raises CheckpointError, which begins with `fault`, on anything else."""
    try:
        value = json.loads(raw.decode("utf-8"))
    except ValueError as error:  # no UTF-8, or no JSON
        raise CheckpointError(f"{fault}: {error}") from error
    except RecursionError as error:
        raise CheckpointError(f"{fault}: it is nested too deeply") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{fault}: it holds a {type(value).__name__}, expected an object")
    return value
