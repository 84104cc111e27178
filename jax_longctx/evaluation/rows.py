"""The rows of a run on the disk: one JSON object for each method, task, length and prompt.

    DIR/rows.jsonl    a header with the run's origin, then one row a line as they are made

A row is written when its batch is done, and is not computed again. A run may be continued with more
methods, tasks, lengths or trials. It is a journal (`jobs.journal`). A row is complete in
itself:

    {"method": {"name", "settings"}, "label": "snapkv budget=L/8",
     "task": {"name", "settings", "files": {SETTING: digest}}, "task_label": "passkey",
     "metric", "length", "index", "seed", "prompt_sha256",
     "tokens": {"context", "question", "answer"}, "meta": {"depth": 0.5, ...},
     "prompt": {"context", "question"},
     "outputs", "answer", "finish", "measures": {"score": 100.0},
     "seconds": {"first_token", "token"}, "compiled", "rows",
     "bytes": {"resident", "read"}, "checkpoint", "device", "mesh", "dtype", "versions"}

The prompt's context is shortened. `first_token` counts from the start of its prefill, which several
questions over one text share.

A prompt that could not be drawn or does not fit has `"refused"`, the reason, in place of the answer
and its measures. With `"short_of_memory": true` the free memory was not enough: the next run tries
the prompt again, and its row replaces the earlier one, which stays in the file. `measures` may hold
any numbers, `curves` series such as `{"perplexity": [[position, nats, tokens], ...]}`.
"""

import contextlib
import copy
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jax_longctx.errors import InputError
from jax_longctx.files import file_errors
from jax_longctx.jobs.journal import Journal, Unwritten, begun, read_journal
from jax_longctx.locks import only_writer
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
    """The rows of a journal, read and extended by a run.

    Args:
      files: digests of the files that each task reads, by the task's label and the setting.

    Attributes:
      rows: the newest row of each key.

    Raises:
      OriginError: rows were made from other files.
    """

    def __init__(self, journal: Journal, files: Mapping[str, Mapping[str, str]]):
        self.journal, rows = journal, journal.entries
        found = {row["task_label"]: row["task"]["files"] for row in rows}
        now = {label: files[label] for label in found if label in files}
        check_same(journal.path, {label: found[label] for label in now}, now, OTHER)
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
                f"{self.journal.path} has prompt {index} of {task} at {length:,} tokens in other "
                f"words: the text it was drawn from is another; give another folder as --output"
            )

    def add(self, rows: Iterable[dict[str, Any]]) -> None:
        """Writes rows; they are on the disk when this returns."""
        rows = list(rows)
        self.journal.add(rows)
        self._rows.update((key_of(row), row) for row in rows)
        self._again.difference_update(map(key_of, rows))

    def snapshot(self) -> "RowStore":
        """The rows now. What is added to it is not written."""
        known = copy.copy(self)
        known.journal, known._rows = Unwritten(self.journal.path), dict(self._rows)
        known._again = set(self._again)
        return known

    def reorder(self, places: Mapping[Key, Any]) -> None:
        """Writes the journal anew with the rows of these keys last, in the order of the places."""
        rest = [row for key, row in self._rows.items() if key not in places]
        rows = rest + [self._rows[key] for key in sorted(places, key=places.__getitem__)]
        if rows != self.rows:
            self.journal.restart(rows)
            self._rows = {key_of(row): row for row in rows}


@contextlib.contextmanager
def open_rows(
    folder: Path,
    given: Mapping[str, Any],
    files: Mapping[str, Mapping[str, str]],
    *,
    overwrite: bool = False,
) -> Iterator[RowStore]:
    """The rows of a folder for one run; `files` are as in `RowStore`.

    Args:
      given: the origin that every run into the folder must share, JSON values.
      overwrite: begin anew where the folder holds rows of another origin.

    Raises:
      OriginError: the folder holds rows of another origin, or damaged ones.
      InputError: the folder cannot be written, or another process is writing there.
    """
    path = folder / NAME

    def opened() -> RowStore:
        return RowStore(Journal(path, FORMAT, given, OTHER), files)

    with only_writer(path):
        store = begun(opened, [path], overwrite=overwrite)
        with store.journal:
            yield store


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
            header, *rows = read_journal(path, FORMAT, OTHER)
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
    known = read_journal(folder / NAME, FORMAT, OTHER)[0]["given"]
    # Earlier versions wrote results without an origin.
    both = [key for key in ("dtype", "model", "all_weights", "tokenizer") if key in made_from]
    one, other = ({key: facts.get(key) for key in both} for facts in (made_from, known))
    check_same(file, one, other, f"leave {file} out: {folder} has another model's rows")
