"""The rows of a run on the disk: one JSON object for each method, task, length and prompt.

    DIR/rows.jsonl    a header with the run's origin, then one row a line as they are made

A row is written when its batch is done, and is not computed again. A run may be continued with more
methods, tasks, lengths or trials. Each line has a CRC-32 (`batch.lines`). A row is complete in
itself:

    {"method": {"name", "settings"}, "label": "snapkv budget=L/8",
     "task": {"name", "settings", "files": {SETTING: digest}}, "task_label": "passkey",
     "metric", "length", "index", "seed", "prompt_sha256",
     "tokens": {"context", "question", "answer"}, "meta": {"depth": 0.5, ...},
     "outputs", "answer", "finish", "measures": {"score": 100.0},
     "seconds": {"first_token", "token"}, "compiled", "rows",
     "bytes": {"resident", "read"}, "checkpoint", "device", "mesh", "dtype", "versions"}

A prompt that could not be drawn or does not fit has `"refused"`, the reason, in place of the answer
and its measures. With `"short_of_memory": true` the free memory was not enough: the next run tries
the prompt again, and its row replaces the earlier one, which stays in the file. `measures` may hold
any numbers, `curves` series such as `{"perplexity": [[position, nats, tokens], ...]}`.
"""

import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jax_longctx.batch import lines
from jax_longctx.errors import InputError, OriginError
from jax_longctx.files import check_plain, file_errors, folder_made
from jax_longctx.locks import lock
from jax_longctx.origin import check_same

# 1 had no checksums.
FORMAT = 2
OTHER = "give another folder as --output, or --overwrite to begin anew"
NAME = "rows.jsonl"

# Label of the method, label of the task, length, index.
Key = tuple[str, str, int, int]


def key_of(row: Mapping[str, Any]) -> Key:
    """The key of a row, unique in its run."""
    return row["label"], row["task_label"], row["length"], row["index"]


class RowStore:
    """The rows of one folder, read and extended by a run.

    Args:
      given: the origin that every run into the folder must share, JSON values.
      files: digests of the files that each task reads, by the task's label and the setting.
      overwrite: begin anew where the folder holds rows of another origin.

    Attributes:
      rows: the newest row of each key.
      resumed: whether an earlier run wrote here.

    Raises:
      OriginError: the folder holds rows of another origin, or damaged ones.
      InputError: the folder cannot be written, or another process is writing there.
    """

    def __init__(
        self,
        folder: Path,
        given: Mapping[str, Any],
        files: Mapping[str, Mapping[str, str]],
        *,
        overwrite: bool = False,
    ):
        self.path, self._rows = folder / NAME, {}
        with contextlib.ExitStack() as held:
            with file_errors(f"{self.path} cannot be written"):
                held.enter_context(folder_made(folder))
                if self.path.exists():
                    check_plain(self.path)
                self._file = held.enter_context(self.path.open("ab", 0))
                alone = lock(self._file.fileno())
            if not alone:
                raise InputError(
                    f"{self.path} is being written by another run; wait for it, or give another "
                    f"folder as --output"
                )
            header = None
            with contextlib.suppress(*[OriginError] * overwrite):
                header = self._resume(given, files)
            self.resumed = header is not None
            if header is None:
                header, self._rows = {"format": FORMAT, "given": given}, {}
                self._file.truncate(0)
                held.callback(self._remove_without_rows)
                lines.append(self._file, [lines.checked(header)])
            self._held = held.pop_all()
        self._first = lines.checksum(header)
        # A run tries each of these once more; within one run the memory stays as it is.
        self._again = {key for key, row in self._rows.items() if row.get("short_of_memory")}

    def _resume(
        self, given: Mapping[str, Any], files: Mapping[str, Mapping[str, str]]
    ) -> dict[str, Any] | None:
        """Takes the rows that are there, and returns their header; None without one."""
        if not lines.cut(self.path):
            return None
        header, *rows = _read(self.path)
        check_same(self.path, header["given"], given, OTHER)
        self._rows = {key_of(row): row for row in rows}
        found = {row["task_label"]: row["task"]["files"] for row in rows}
        now = {label: files[label] for label in found if label in files}
        check_same(self.path, {label: found[label] for label in now}, now, OTHER)
        return header

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
        rows, first = list(rows), self._first
        lines.append(self._file, [lines.checked(row, first) for row in rows])
        self._rows.update((key_of(row), row) for row in rows)
        self._again.difference_update(map(key_of, rows))

    def close(self) -> None:
        """Closes the file; the run can be continued later. A new one without rows is removed."""
        self._held.close()

    def _remove_without_rows(self) -> None:
        if not self._rows:
            self.path.unlink(missing_ok=True)


def read_rows(folder: Path, *more: Path) -> list[dict[str, Any]]:
    """The rows of several folders of one model.

    Of rows with the same key and prompt the first folder's counts, unless it was short of memory.

    Raises:
      OriginError: a folder differs from the first in model, dtype, chat layout or another fact that
        tables do not show, or a line is damaged.
      InputError: a folder has no rows.
    """
    joined: dict[tuple[Key, str | None], dict[str, Any]] = {}
    first: Mapping[str, Any] = {}
    for each in (folder, *more):
        path = each / NAME
        with file_errors(f"{path} cannot be read", "give the --output of a run"):
            header, *rows = _read(path)
        if not rows:
            raise InputError(f"{path} holds no rows yet")
        known = {key: value for key, value in header["given"].items() if key != "seed"}
        first = first or known
        why = "write a report of each: one report is of one model, asked in one way"
        check_same(folder, first, known, why)
        for row in rows:
            key = key_of(row), row.get("prompt_sha256")
            if key not in joined or joined[key].get("short_of_memory"):
                joined[key] = row
    return list(joined.values())


def check_model(folder: Path, file: Path, made_from: Mapping[str, Any]) -> None:
    """Raises OriginError where results were not made by the model of the folder's rows."""
    known = _read(folder / NAME)[0]["given"]
    # Earlier versions wrote results without an origin.
    both = [key for key in ("dtype", "model", "all_weights", "tokenizer") if key in made_from]
    one, other = ({key: facts.get(key) for key in both} for facts in (made_from, known))
    check_same(file, one, other, f"leave {file} out: {folder} has another model's rows")


def _read(path: Path) -> list[dict[str, Any]]:
    """The header and the rows. Raises OriginError where a line is damaged or of another file."""
    try:
        if (version := next(iter(lines.read(path)), {}).get("format")) != FORMAT:
            raise OriginError(
                f"{path} has format {version!r:.20}, expected {FORMAT}: another version or program "
                f"wrote it; {OTHER}"
            )
        return lines.read_checked(path)
    except ValueError as error:
        raise OriginError(
            f"{path} is damaged: {error}; remove that line to compute its row again, or {OTHER}"
        ) from error
