"""The rows of a run on the disk: one JSON object for each method, task, length and prompt.

    DIR/rows.jsonl    a header with the run's fixed options, then one row a line as they are made

A row is written when its batch is done, and is not computed again. A run may be continued with more
methods, tasks, lengths or trials. A row is complete in itself:

    {"method": {"name", "settings"}, "label": "snapkv budget=L/8",
     "task": {"name", "settings"}, "task_label": "passkey", "metric", "length", "index", "seed",
     "prompt_sha256", "tokens": {"context", "question", "answer"}, "meta": {"depth": 0.5, ...},
     "outputs", "answer", "finish", "measures": {"score": 100.0},
     "seconds": {"first_token", "token"}, "compiled", "rows",
     "bytes": {"resident", "read"}, "checkpoint", "device", "mesh", "dtype", "versions"}

A prompt that could not be drawn or does not fit has `"refused"`, the reason, in place of the answer
and its measures. With `"short_of_memory": true` the free memory was not enough: the next run tries
the prompt again, and its row replaces the earlier one, which stays in the file. `measures` may hold
any numbers, `curves` series such as `{"perplexity": [[position, nats, tokens], ...]}`.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jax_longctx.batch import lines
from jax_longctx.errors import InputError, file_errors
from jax_longctx.files import check_plain
from jax_longctx.locks import lock

FORMAT = 1
NAME = "rows.jsonl"

# Label of the method, label of the task, length, index.
Key = tuple[str, str, int, int]


def key_of(row: Mapping[str, Any]) -> Key:
    """The key of a row, unique in its run."""
    return row["label"], row["task_label"], row["length"], row["index"]


class RowStore:
    """The rows of one folder, read and extended by a run.

    Args:
      given: options that every run into the folder must share, JSON values.

    Attributes:
      rows: the newest row of each key.
      resumed: whether an earlier run wrote here.

    Raises:
      InputError: the folder cannot be written, holds rows of another run, or another process is
        writing there.
    """

    def __init__(self, folder: Path, given: Mapping[str, Any]):
        self.path = folder / NAME
        rows: list[dict[str, Any]] = []
        with file_errors(f"{self.path} cannot be written"):
            folder.mkdir(parents=True, exist_ok=True)
            if self.path.exists():
                check_plain(self.path)
            self._file = self.path.open("ab", 0)
            alone = lock(self._file.fileno())
        try:
            if not alone:
                raise InputError(
                    f"{self.path} is being written by another run; wait for it, or give another "
                    f"folder as --output"
                )
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
        # A run tries each of these once more; within one run the memory stays as it is.
        self._again = {key for key, row in self._rows.items() if row.get("short_of_memory")}

    @property
    def rows(self) -> list[dict[str, Any]]:
        return list(self._rows.values())

    def __contains__(self, key: Key) -> bool:
        """Whether the row exists and is not to be tried again."""
        return key in self._rows and key not in self._again

    def check_prompt(self, key: Key, sha256: str) -> None:
        """Raises InputError if the row of that key exists and had another prompt."""
        if self._rows.get(key, {}).get("prompt_sha256") not in (None, sha256):
            _, task, length, index = key
            raise InputError(
                f"{self.path} has prompt {index} of {task} at {length:,} tokens in other words: "
                f"the text it was drawn from is not the same; give another folder as --output"
            )

    def add(self, rows: Iterable[dict[str, Any]]) -> None:
        """Writes rows; they are on the disk when this returns."""
        rows = list(rows)
        lines.append(self._file, rows)
        self._rows.update((key_of(row), row) for row in rows)
        self._again.difference_update(map(key_of, rows))

    def close(self) -> None:
        """Closes the file; the run can be continued later."""
        self._file.close()


def read_rows(folder: Path, *more: Path) -> list[dict[str, Any]]:
    """The rows of several folders of one model.

    Of rows with the same key and prompt the first folder's counts, unless it was short of memory.

    Raises:
      InputError: a folder has no rows, or differs from the first in model, dtype or chat layout,
        which tables do not show.
    """
    joined: dict[tuple[Key, str | None], dict[str, Any]] = {}
    first: Mapping[str, Any] = {}
    for each in (folder, *more):
        path = each / NAME
        with file_errors(f"{path} cannot be read", "give the --output of a run"):
            header, *rows = _read(path)
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
            if key not in joined or joined[key].get("short_of_memory"):
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
        raise InputError(f"{path} is not a file of rows: {error}") from error
    return [header, *rows]
