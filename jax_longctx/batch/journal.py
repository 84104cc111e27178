"""What a batch run leaves on disk, so that it can be killed at any moment.

    OUT.jsonl.partial    finished rows in the order of the input; becomes OUT.jsonl at the end
    OUT.jsonl.journal    what the run was begun with, and the answers of finished batches whose rows
                         still wait for earlier ones

A batch is in the journal, on the disk, before its rows appear in the partial file. After a kill the
partial file is cut behind its last whole line and goes on from there; the journal's batches are not
computed again. The journal is begun anew with each window of rows, so it stays small.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jax_longctx.batch import lines
from jax_longctx.errors import InputError

__all__ = ["Journal"]

FORMAT = 1
# What a run with other values may not go on with; the rest of the header is what it chose itself.
GIVEN = "given"


class Journal:
    """The files of one run.

    Args:
      output: where the finished file will be.
      given: options and input of the run, JSON values.
      chosen: what the run chooses where it begins here.

    Attributes:
      chosen: what it chose where it was begun.
      rows: whole lines in the partial file.
      resumed: whether an earlier run had begun.

    Raises:
      InputError: the files belong to a run with other options, or cannot be written.
    """

    def __init__(self, output: Path, given: dict[str, Any], chosen: dict[str, Any]):
        self.output = output
        self.partial = output.with_name(output.name + ".partial")
        self.journal = output.with_name(output.name + ".journal")
        # As the header is read back: tuples are lists in JSON.
        given = json.loads(json.dumps(given))
        try:
            header, self._entries = self._read()
            self.resumed = header is not None
            if header is None:
                if self.partial.exists():
                    raise InputError(
                        f"{self.partial} is there without its {self.journal.name}; remove it to "
                        f"begin anew"
                    )
                header = {"format": FORMAT, GIVEN: given, "chosen": chosen}
            anew = f"remove it and {self.partial.name} to begin anew"
            lines.check_given(self.journal, header.get(GIVEN, {}), given, anew)
            self._header, self.chosen = header, header["chosen"]
            self.rows = lines.cut(self.partial)
            if not self._entries:
                self._begin_journal()
            self._out = self.partial.open("ab")
            self._log = self.journal.open("ab")
        except OSError as error:
            raise InputError(f"{error.filename} cannot be written: {error.strerror}") from error

    def finished(self, window: int) -> dict[int, Any]:
        """Answers of the window's batches that are in the journal, by the batch's number."""
        return {
            entry["batch"]: entry["answers"] for entry in self._entries if entry["window"] == window
        }

    def begin_window(self, window: int) -> None:
        """Drops the batches of other windows, whose rows are all in the partial file."""
        if any(entry["window"] != window for entry in self._entries):
            self._log.close()
            self._entries = [entry for entry in self._entries if entry["window"] == window]
            self._begin_journal()
            self._log = self.journal.open("ab")

    def keep(self, window: int, batch: int, answers: Any) -> None:
        """A finished batch; on the disk when this returns."""
        entry = {"window": window, "batch": batch, "answers": answers}
        self._entries.append(entry)
        lines.append(self._log, [entry])

    def write(self, rows: Sequence[dict[str, Any]]) -> None:
        """The next rows of the output."""
        lines.append(self._out, rows)
        self.rows += len(rows)

    def finish(self) -> None:
        """All rows are written: the output gets its name."""
        self.close()
        os.replace(self.partial, self.output)
        self.journal.unlink()

    def close(self) -> None:
        """Closes the files; the run can go on later."""
        self._out.close()
        self._log.close()

    def _read(self) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
        """Header and entries; a line that a kill tore is left out."""
        if not self.journal.exists():
            return None, []
        lines.cut(self.journal)
        try:
            header, *entries = lines.read(self.journal)
        except ValueError as error:
            raise InputError(
                f"{self.journal} is damaged: {error}; remove it and {self.partial.name} to "
                f"begin anew"
            ) from error
        return header, entries

    def _begin_journal(self) -> None:
        fresh = self.journal.with_name(self.journal.name + ".new")
        with fresh.open("wb") as file:
            lines.append(file, [self._header, *self._entries])
        os.replace(fresh, self.journal)
