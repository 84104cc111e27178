"""JSON lines on disk that survive a kill at any moment: an incomplete last line is dropped.

The first line of a file that can be resumed holds the origin of its run (`jax_longctx.origin`).
`Journal` keeps the files of a batch run:

    OUT.jsonl.partial    finished rows in the order of the input; becomes OUT.jsonl at the end
    OUT.jsonl.journal    the run's origin, the answers of the window's finished batches, and the
                         size of the partial file
    OUT.jsonl.origin     written at the end: the origin of OUT.jsonl, its SHA-256, and a digest of
                         the rows of the input that were answered

A batch is written to the journal before its rows are written to the partial file. After a kill the
partial file is cut to the size in the journal, and the batches in the journal are not computed
again. Each window of rows starts a new journal, so it stays small. Each of its lines has a CRC-32,
and so has the partial file: a run does not resume from files that were changed. A line's CRC-32
begins with its file's first line, so a line of another run's file is noticed too.
"""

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jax_longctx.errors import InputError, OriginError
from jax_longctx.files import file_errors, no_link, open_plain, sha256_of, write_all, write_text
from jax_longctx.origin import MADE_FROM, OVERWRITE, check_result, check_same

# 1 had no checksums; 2 had other facts, and checksums that did not begin with the header.
FORMAT = 3
CHECKSUM, DIGEST, ANSWERED = "crc32", "sha256", "answered"
# Key of the origin in the header; a run with another may not resume.
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


def checked(entry: Mapping[str, Any], first: int = 0) -> dict[str, Any]:
    """The entry with a CRC-32 that begins with `first`, the `checksum` of its file's header."""
    return {**entry, CHECKSUM: checksum(entry, first)}


def checksum(entry: Mapping[str, Any], first: int = 0) -> int:
    """The CRC-32 of an entry."""
    return zlib.crc32(json.dumps(entry).encode(), first)


def read_checked(path: Path, first: int | None = None) -> list[dict[str, Any]]:
    """Every whole line, without its CRC-32.

    Args:
      first: what checksums begin with; that of the first line where it is a header.

    Raises:
      ValueError: a line is damaged, or of another file; it is named by its number.
    """
    found = read(path)
    for number, entry in enumerate(found, start=1):
        told = entry.pop(CHECKSUM, None)
        if told != checksum(entry, first or 0):
            raise ValueError(f"line {number} is not what was written (its {CHECKSUM} differs)")
        first = told if first is None else first
    return found


def files_of(output: Path) -> list[Path]:
    """The files of a run, finished or not, from the output on."""
    ends = ("", ".partial", ".journal", ".origin")
    return [output.with_name(output.name + end) for end in ends]


def check_complete(
    output: Path, given: Mapping[str, Any], free: tuple[str, ...] = ()
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The rows of a finished output, and what its origin's file holds.

    Args:
      free: facts of the origin that may differ.

    Raises:
      OriginError: it was made from something else, or was changed since.
    """
    *_, origin = files_of(output)
    found = check_result(output, given, origin, free=free)
    if found.get(DIGEST) != sha256_of(output):
        raise OriginError(f"{output} was changed after it was written; {OVERWRITE}")
    return read(output), found


class Journal:
    """The files of one run.

    Args:
      output: path of the finished file.
      given: the origin, JSON values.
      chosen: values that a new run chooses by itself.
      free: facts of the origin in which the run that it resumes may differ.

    Attributes:
      given, chosen: the origin, and the values that the first run chose.
      answered: a digest of the rows that have an answer in the partial file.
      rows: lines of the partial file.
      resumed: whether it resumes an earlier run.

    Raises:
      OriginError: the files belong to a run with another origin, or are damaged.
      InputError: they cannot be written.
    """

    def __init__(
        self,
        output: Path,
        given: dict[str, Any],
        chosen: dict[str, Any],
        free: tuple[str, ...] = (),
    ):
        self.output, self.partial, self.journal, self._origin = files_of(output)
        both = f"{self.partial.name} and {self.journal.name}"
        self._anew = f"remove {both}, or give --overwrite, to begin anew"
        # JSON turns tuples into lists, as in the header that is read back.
        given = json.loads(json.dumps(given))
        # Size and CRC-32 of the partial file.
        self._written: dict[str, Any] = {"rows": 0, "bytes": 0, "of": 0}
        self._entries: list[dict[str, Any]] = []
        for path in (self.partial, self.journal):
            if path.is_symlink() or (path.exists() and not path.is_file()):
                raise InputError(f"{path} is a link or no plain file; remove it")
        try:
            self.resumed = self.journal.exists()
            if self.resumed:
                self._header = self._read()
                check_same(self.journal, self._header[GIVEN], given, self._anew, free=free)
                self._check_partial()
            elif self.partial.exists():
                raise OriginError(
                    f"{self.partial} is there without its {self.journal.name}; {self._anew}"
                )
            else:
                self._header = {"format": FORMAT, GIVEN: given, "chosen": chosen}
                self._begin_journal()
            self.given, self.chosen = self._header[GIVEN], self._header["chosen"]
            self._out = self.partial.open("ab", 0)
            self._log = self.journal.open("ab", 0)
        except OSError as error:
            what = error.filename or self.partial
            raise InputError(f"{what} cannot be written: {error.strerror}") from error

    @property
    def rows(self) -> int:
        return self._written["rows"]

    @property
    def answered(self) -> str:
        return self._written.get(ANSWERED, "")

    def finished(self, window: int) -> dict[int, Any]:
        """The answers in the journal of the window's batches, by the batch's number."""
        return {
            entry["batch"]: entry["answers"] for entry in self._entries if entry["window"] == window
        }

    def begin_window(self, window: int) -> None:
        """Drops the batches of earlier windows, whose rows are all in the partial file."""
        if any(entry["window"] != window for entry in self._entries):
            self._go_on_with([entry for entry in self._entries if entry["window"] == window])

    def rebind(self, given: dict[str, Any]) -> None:
        """Goes on with another origin, and drops the batches that are not in the partial file."""
        self.given = self._header[GIVEN] = given
        self._go_on_with([])

    def _go_on_with(self, entries: list[dict[str, Any]]) -> None:
        self._log.close()
        self._entries = entries
        self._begin_journal()
        self._log = self.journal.open("ab", 0)

    def keep(self, window: int, batch: int, answers: Any) -> None:
        """Adds a finished batch to the journal, on disk when it returns."""
        entry = {"window": window, "batch": batch, "answers": answers}
        self._entries.append(entry)
        append(self._log, [self._checked(entry)])

    def write(self, rows: Sequence[dict[str, Any]], answered: str) -> None:
        """Appends the next rows of the output to the partial file, which then has `answered`."""
        text = append(self._out, rows)
        self._written = {
            "rows": self.rows + len(rows),
            "bytes": self._written["bytes"] + len(text),
            "of": zlib.crc32(text, self._written["of"]),
            ANSWERED: answered,
        }
        append(self._log, [self._checked(self._written)])

    def finish(self) -> None:
        """Renames the partial file to the output, whose origin is written first."""
        self.close()
        with file_errors(f"{self.output} cannot be written", "run again to go on"):
            fields = {MADE_FROM: self.given, DIGEST: sha256_of(self.partial)}
            fields[ANSWERED] = self.answered
            write_text(self._origin, json.dumps(fields, indent=1))
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
            if (version := found[0].get("format")) != FORMAT:
                raise OriginError(
                    f"{self.journal} has format {version!r:.20}, expected {FORMAT}: another "
                    f"version wrote it; go on with that version, or {self._anew}"
                )
            header, *entries = read_checked(self.journal)
        except ValueError as error:
            raise OriginError(f"{self.journal} is damaged: {error}; {self._anew}") from error
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
                raise OriginError(
                    f"{self.partial} is damaged: its first {known:,} bytes are not what was "
                    f"written; {self._anew}"
                )
            file.truncate(known)

    def _begin_journal(self) -> None:
        fresh = self.journal.with_name(self.journal.name + ".new")
        with open(fresh, "wb", 0, opener=no_link) as file:
            kept = map(self._checked, [*self._entries, self._written])
            append(file, [checked(self._header), *kept])
        os.replace(fresh, self.journal)

    def _checked(self, entry: dict[str, Any]) -> dict[str, Any]:
        return checked(entry, checksum(self._header))
