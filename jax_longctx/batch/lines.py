"""JSON lines on the disk that survive a kill at any moment: whole ones count, a torn one goes.

The first line of a file that a run goes on with says what it was begun with. `Journal` holds what
a batch run leaves on the disk:

    OUT.jsonl.partial    finished rows in the order of the input; becomes OUT.jsonl at the end
    OUT.jsonl.journal    what the run was begun with, the answers of the window's finished batches,
                         and how much of the partial file is written

A batch is in the journal, on the disk, before its rows appear in the partial file. After a kill the
partial file is cut to what the journal says and goes on from there; the journal's batches are not
computed again. The journal is begun anew with each window of rows, so it stays small. Each of its
lines has a CRC-32, and one line has that of the partial file: what was changed is not gone on with.
"""

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jax_longctx.errors import InputError

# 1 had no checksums.
FORMAT = 2
CHECKSUM = "crc32"
# What a run with other values may not go on with; the rest of the header is what it chose itself.
GIVEN = "given"


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


class Journal:
    """The files of one run.

    Args:
      output: where the finished file will be.
      given: options and input of the run, JSON values.
      chosen: what the run chooses where it begins here.

    Attributes:
      chosen: what it chose where it was begun.
      rows: lines of the partial file.
      resumed: whether an earlier run had begun.

    Raises:
      InputError: the files belong to a run with other options, are damaged, or cannot be written.
    """

    def __init__(self, output: Path, given: dict[str, Any], chosen: dict[str, Any]):
        self.output = output
        self.partial = output.with_name(output.name + ".partial")
        self.journal = output.with_name(output.name + ".journal")
        self._anew = f"remove it and {self.partial.name} to begin anew"
        # As the header is read back: tuples are lists in JSON.
        given = json.loads(json.dumps(given))
        # How much of the partial file is written, and the CRC-32 of it.
        self._written = {"rows": 0, "bytes": 0, "of": 0}
        self._entries: list[dict[str, Any]] = []
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
            self._out = self.partial.open("ab")
            self._log = self.journal.open("ab")
        except OSError as error:
            raise InputError(f"{error.filename} cannot be written: {error.strerror}") from error

    @property
    def rows(self) -> int:
        return self._written["rows"]

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
        append(self._log, [_checked(entry)])

    def write(self, rows: Sequence[dict[str, Any]]) -> None:
        """The next rows of the output."""
        text = append(self._out, rows)
        self._written = {
            "rows": self.rows + len(rows),
            "bytes": self._written["bytes"] + len(text),
            "of": zlib.crc32(text, self._written["of"]),
        }
        append(self._log, [_checked(self._written)])

    def finish(self) -> None:
        """All rows are written: the output gets its name."""
        self.close()
        os.replace(self.partial, self.output)
        self.journal.unlink()

    def close(self) -> None:
        """Closes the files; the run can go on later."""
        self._out.close()
        self._log.close()

    def _read(self) -> dict[str, Any]:
        """The header; takes over the other  A line that a kill tore is left out."""
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
        """Cuts the partial file behind what the journal knows; the rest is written again."""
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
        with fresh.open("wb") as file:
            kept = [self._header, *self._entries, self._written]
            append(file, [_checked(entry) for entry in kept])
        os.replace(fresh, self.journal)


def _checked(entry: dict[str, Any]) -> dict[str, Any]:
    """The entry and its CRC-32."""
    return {**entry, CHECKSUM: _checksum(entry)}


def _checksum(entry: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(entry).encode())
