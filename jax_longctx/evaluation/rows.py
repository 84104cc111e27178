"""The rows of a run on the disk: one JSON object for each method, task, length and prompt.

    DIR/rows.jsonl    first what the run was begun with, then a row a line, in order of their making

A row is there when its batch is done, and is not computed again; a run may go on with more
methods, tasks, lengths or trials than it was begun with. A row says all about itself:

    {"method": {"name", "settings"}, "label": "snapkv budget=L/8",
     "task": {"name", "settings"}, "task_label": "passkey", "metric", "length", "index", "seed",
     "prompt_sha256", "tokens": {"context", "question", "answer"}, "meta": {"depth": 0.5, ...},
     "outputs", "answer", "finish", "measures": {"score": 100.0},
     "seconds": {"first_token", "token"}, "compiled", "rows",
     "bytes": {"resident", "read"}, "checkpoint", "device", "mesh", "dtype", "versions"}

and in place of the answer and what follows from it `"refused"`, a sentence, where the prompt could
not be drawn or does not fit. With `"short_of_memory": true` beside it the memory free at that time
was not enough: the next run tries that prompt again, and its row takes the place of the earlier
one, which stays in the file. `measures` may hold any numbers of a prompt, `curves` any of their
courses: `{"perplexity": [[position, nats, tokens], ...]}`.
"""

import fcntl
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from jax_longctx.batch import lines
from jax_longctx.errors import InputError

FORMAT = 1
NAME = "rows.jsonl"

# Label of the method, label of the task, length, index.
Key = tuple[str, str, int, int]


def key_of(row: Mapping[str, Any]) -> Key:
    """What tells a row from the others of its run."""
    return row["label"], row["task_label"], row["length"], row["index"]


class RowStore:
    """The rows of one folder, for a run that goes on there.

    Args:
      given: what all rows have in common, JSON values: model, seed.

    Attributes:
      rows: all that there are; of a prompt that was tried again the newest.
      resumed: whether an earlier run had begun.

    Raises:
      InputError: the folder cannot be written, holds rows of another run, or another process is
        writing there.
    """

    def __init__(self, folder: Path, given: Mapping[str, Any]):
        self.path = folder / NAME
        rows: list[dict[str, Any]] = []
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("ab")
        except OSError as error:
            raise InputError(f"{error.filename} cannot be written: {error.strerror}") from error
        try:
            _lock(self._file)
            self.resumed = lines.cut(self.path) > 0
            if self.resumed:
                header, *rows = _read(self.path)
                lines.check_given(
                    self.path, header["given"], given, "give another folder as --output"
                )
            else:
                lines.append(self._file, [{"format": FORMAT, "given": given}])
        except BaseException:
            self._file.close()
            raise
        self._rows = {key_of(row): row for row in rows}
        # Tried once in a run: in the run that refused it, more memory is not to be expected.
        self._again = {key for key, row in self._rows.items() if _was_short(row)}

    @property
    def rows(self) -> list[dict[str, Any]]:
        return list(self._rows.values())

    def __contains__(self, key: Key) -> bool:
        """Whether the row is there, and not to be tried again."""
        return key in self._rows and key not in self._again

    def check_prompt(self, key: Key, sha256: str) -> None:
        """Raises InputError where the row of that key is there and was of another prompt."""
        if self._rows.get(key, {}).get("prompt_sha256") not in (None, sha256):
            _, task, length, index = key
            raise InputError(
                f"{self.path} has prompt {index} of {task} at {length:,} tokens in other words: "
                f"the text it was drawn from is not the same; give another folder as --output"
            )

    def add(self, rows: Iterable[dict[str, Any]]) -> None:
        """More rows; on the disk when this returns."""
        rows = list(rows)
        lines.append(self._file, rows)
        self._rows.update((key_of(row), row) for row in rows)
        self._again.difference_update(map(key_of, rows))

    def close(self) -> None:
        """Closes the file; the run can go on later."""
        self._file.close()


def _lock(file: IO[bytes]) -> None:
    """Of two runs into one folder each would cut the other's line; it holds until the file closes.

    Raises:
      InputError: another run holds it.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise InputError(
            f"{file.name} is being written by another run; wait for it, or give another folder as "
            f"--output"
        ) from error
    except OSError:
        # Some network file systems have no locks; rows are written there as on any other.
        return


def _was_short(row: Mapping[str, Any]) -> bool:
    """Whether the row was refused for the memory of its time."""
    return bool(row.get("short_of_memory"))


def read_rows(folder: Path, *more: Path) -> list[dict[str, Any]]:
    """The rows of a folder, and of others of the same model; one that several hold counts once.

    The first folder's does, but for rows that were short of memory where another's was not.

    Raises:
      InputError: a folder has no rows, or was run with another model, dtype or chat layout than the
        first, which no table could tell apart.
    """
    joined: dict[tuple[Key, str | None], dict[str, Any]] = {}
    first: Mapping[str, Any] = {}
    for each in (folder, *more):
        path = each / NAME
        try:
            header, *rows = _read(path)
        except OSError as error:
            raise InputError(
                f"{path} cannot be read: {error.strerror}; give the --output of a run"
            ) from error
        if not rows:
            raise InputError(f"{path} holds no rows yet")
        first = first or header["given"]
        for key in ("checkpoint", "dtype", "chat"):
            one, other = first.get(key), header["given"].get(key)
            if one != other:
                raise InputError(
                    f"{folder} was run with {key} {one!r:.20}, {each} with {other!r:.20}; a report "
                    f"is of one model, asked in one way: write one of each"
                )
        for row in rows:
            key = key_of(row), row.get("prompt_sha256")
            if key not in joined or _was_short(joined[key]):
                joined[key] = row
    return list(joined.values())


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        header, *rows = lines.read(path)
        if header["format"] != FORMAT:
            raise ValueError(f"format {header['format']}, expected {FORMAT}")
        dict(header["given"])
        for row in rows:
            key_of(row)
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} is no file of rows: {error}") from error
    return [header, *rows]
