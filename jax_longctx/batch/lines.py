"""JSON lines on disk that survive a kill at any moment: an incomplete last line is dropped.

The first line of a file that can be resumed holds the options of its run. `Journal` keeps the files
of a batch run:

    OUT.jsonl.partial    finished rows in the order of the input; becomes OUT.jsonl at the end
    OUT.jsonl.journal    the run's options, the answers of the window's finished batches, and the
                         size of the partial file

A batch is written to the journal before its rows are written to the partial file. After a kill the
partial file is cut to the size in the journal, and the batches in the journal are not computed
again. Each window of rows starts a new journal, so it stays small. Each of its lines has a CRC-32,
and so has the partial file: a run does not resume from files that were changed.
"""

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jax_longctx.errors import InputError, file_errors
from jax_longctx.files import no_link, open_plain, write_all

# 1 had no checksums.
FORMAT = 2
CHECKSUM = "crc32"
# Key of the options in the header; a run with other options may not resume.
GIVEN = "given"


def append(file: Any, lines: Sequence[Mapping[str, Any]]) -> bytes:
    """Appends whole lines and returns their bytes; they are on disk when it returns.

    Raises:
      InputError: the file cannot be written.
    """
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode("utf-8")
    with file_errors(f"{file.name} could not be written", "run again to go on"):
        write_all(file, text)
        os.fsync(file.fileno())
    return text


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


def check_given(path: Path, known: Mapping[str, Any], given: Mapping[str, Any], other: str) -> None:
    """Raises InputError where the `known` options of a run differ from the `given` ones.

    Args:
      other: what the user can do instead, for the error.
    """
    for key in [*given, *known]:
        if known.get(key) != given.get(key):
            raise InputError(
                f"{path} was begun with {key} {known.get(key)!r:.80}, now it is "
                f"{given.get(key)!r:.80}; run with the same, or {other}"
            )


class Journal:
    """The files of one run.

    Args:
      output: path of the finished file.
      given: options and input of the run, JSON values.
      chosen: values that a new run chooses by itself.

    Attributes:
      chosen: the values that the first run chose.
      rows: lines of the partial file.
      resumed: whether it resumes an earlier run.

    Raises:
      InputError: the files belong to a run with other options, are damaged, or cannot be written.
    """

    def __init__(self, output: Path, given: dict[str, Any], chosen: dict[str, Any]):
        self.output = output
        self.partial = output.with_name(output.name + ".partial")
        self.journal = output.with_name(output.name + ".journal")
        self._anew = f"remove it and {self.partial.name} to begin anew"
        # JSON turns tuples into lists, as in the header that is read back.
        given = json.loads(json.dumps(given))
        # Size and CRC-32 of the partial file.
        self._written = {"rows": 0, "bytes": 0, "of": 0}
        self._entries: list[dict[str, Any]] = []
        for path in (self.partial, self.journal):
            if path.is_symlink() or (path.exists() and not path.is_file()):
                raise InputError(f"{path} is a link or no plain file; remove it")
        try:
            self.resumed = self.journal.exists()
            if self.resumed:
                self._header = self._read()
                check_given(self.journal, self._header[GIVEN], given, self._anew)
                self._check_partial()
            elif self.partial.exists():
                raise InputError(
                    f"{self.partial} is there without its {self.journal.name}; remove it to "
                    f"begin anew"
                )
            else:
                self._header = {"format": FORMAT, GIVEN: given, "chosen": chosen}
                self._begin_journal()
            self.chosen = self._header["chosen"]
            self._out = self.partial.open("ab", 0)
            self._log = self.journal.open("ab", 0)
        except OSError as error:
            what = error.filename or self.partial
            raise InputError(f"{what} cannot be written: {error.strerror}") from error

    @property
    def rows(self) -> int:
        return self._written["rows"]

    def finished(self, window: int) -> dict[int, Any]:
        """The answers in the journal of the window's batches, by the batch's number."""
        return {
            entry["batch"]: entry["answers"] for entry in self._entries if entry["window"] == window
        }

    def begin_window(self, window: int) -> None:
        """Drops the batches of earlier windows, whose rows are all in the partial file."""
        if any(entry["window"] != window for entry in self._entries):
            self._log.close()
            self._entries = [entry for entry in self._entries if entry["window"] == window]
            self._begin_journal()
            self._log = self.journal.open("ab", 0)

    def keep(self, window: int, batch: int, answers: Any) -> None:
        """Adds a finished batch to the journal, on disk when it returns."""
        entry = {"window": window, "batch": batch, "answers": answers}
        self._entries.append(entry)
        append(self._log, [_checked(entry)])

    def write(self, rows: Sequence[dict[str, Any]]) -> None:
        """Appends the next rows of the output to the partial file."""
        text = append(self._out, rows)
        self._written = {
            "rows": self.rows + len(rows),
            "bytes": self._written["bytes"] + len(text),
            "of": zlib.crc32(text, self._written["of"]),
        }
        append(self._log, [_checked(self._written)])

    def finish(self) -> None:
        """Renames the partial file to the output; all rows are written."""
        self.close()
        os.replace(self.partial, self.output)
        self.journal.unlink()

    def close(self) -> None:
        """Closes the files; the run can resume later."""
        self._out.close()
        self._log.close()

    def _read(self) -> dict[str, Any]:
        """Reads the journal's entries and returns its header; drops an incomplete last line."""
        cut(self.journal)
        try:
            found = read(self.journal)
            if not found:
                raise ValueError("it holds no whole line")
            header, *entries = found
            if header.get("format") != FORMAT:
                raise ValueError(f"format {header.get('format')!r:.20}, expected {FORMAT}")
            for number, entry in enumerate(found, start=1):
                if entry.pop(CHECKSUM, None) != _checksum(entry):
                    raise ValueError(f"line {number} is not what was written")
        except ValueError as error:
            raise InputError(f"{self.journal} is damaged: {error}; {self._anew}") from error
        self._entries = [entry for entry in entries if "batch" in entry]
        self._written = [self._written, *(entry for entry in entries if "of" in entry)][-1]
        return header

    def _check_partial(self) -> None:
        """Cuts the partial file to the size in the journal; later rows are written again."""
        known = self._written["bytes"]
        self.partial.touch()
        with self.partial.open("r+b") as file:
            found, left = 0, known
            while piece := file.read(min(left, 1 << 20)):
                found, left = zlib.crc32(piece, found), left - len(piece)
            if left or found != self._written["of"]:
                raise InputError(
                    f"{self.partial} is damaged: its first {known:,} bytes are not what was "
                    f"written; remove it and {self.journal.name} to begin anew"
                )
            file.truncate(known)

    def _begin_journal(self) -> None:
        fresh = self.journal.with_name(self.journal.name + ".new")
        with open(fresh, "wb", 0, opener=no_link) as file:
            kept = [self._header, *self._entries, self._written]
            append(file, [_checked(entry) for entry in kept])
        os.replace(fresh, self.journal)


def _checked(entry: dict[str, Any]) -> dict[str, Any]:
    """The entry and its CRC-32."""
    return {**entry, CHECKSUM: _checksum(entry)}


def _checksum(entry: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(entry).encode())
