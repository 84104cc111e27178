"""The journal of a run: what it was made from, and the results of every finished piece.

    {"format": 4, "given": {...}, "crc32": ...}    the origin of the run (`jax_longctx.origin`)
    {..., "crc32": ...}                            a result

After a kill the same command goes on behind the last whole line. A run of another origin may not,
unless there are no results yet. A line's CRC-32 begins with the first line's, so damage and lines
of other runs are noticed.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jax_longctx.errors import InputError, OriginError
from jax_longctx.files import file_errors, no_link, write_text
from jax_longctx.jobs import lines
from jax_longctx.origin import check_same

# Key of the origin in the header.
GIVEN = "given"


class Journal:
    """A journal that is written, a context manager. One without results is removed at its end.

    Args:
      path: of the file, which is made where there is none.
      version: of its format.
      given: the origin, JSON values.
      advice: what the user can do where the file is another run's or damaged, for the error.
      free: facts of the origin that may differ from the run that it goes on with.
      more: further fields of a new header.

    Attributes:
      header: its first line.
      entries: the results that it began with; it does not hold what is added.
      resumed: whether it goes on with an earlier run.

    Raises:
      OriginError: the file is of another origin, or damaged.
      InputError: it cannot be written.
    """

    def __init__(
        self,
        path: Path,
        version: int,
        given: Mapping[str, Any],
        advice: str,
        *,
        free: tuple[str, ...] = (),
        more: Mapping[str, Any] | None = None,
    ):
        self.path, self._file, self._added = path, None, False
        check_own(path)
        with file_errors(f"{path} cannot be written"):
            begun = lines.cut(path) > 0
        if begun:
            self.header, *self.entries = read_journal(path, version, advice)
        self.resumed = begun and bool(self.entries)
        if self.resumed:
            check_same(path, self.header[GIVEN], given, advice, free=free)
        else:
            self._begin({"format": version, GIVEN: given, **(more or {})}, [])

    def add(self, entries: Iterable[dict[str, Any]]) -> None:
        """Adds results; they are on the disk when it returns."""
        entries, first = list(entries), lines.checksum(self.header)
        if self._file is None:
            with file_errors(f"{self.path} cannot be written"):
                self._file = open(self.path, "ab", 0, opener=no_link)
        lines.append(self._file, [lines.checked(entry, first) for entry in entries])
        self._added |= bool(entries)

    def restart(self, entries: Sequence[dict[str, Any]], **changed: Any) -> None:
        """Replaces all results, and fields of the header."""
        self._close()
        self._begin({**self.header, **changed}, entries)

    def _begin(self, header: dict[str, Any], entries: Sequence[dict[str, Any]]) -> None:
        # JSON turns tuples into lists, as in a file that is read.
        self.header, self.entries = json.loads(json.dumps(header)), list(entries)
        first = lines.checksum(self.header)
        whole = [lines.checked(self.header), *(lines.checked(each, first) for each in entries)]
        with file_errors(f"{self.path} could not be written", "run again to go on"):
            text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in whole)
            write_text(self.path, text)

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *error: object) -> None:
        self._close()
        if not (self.entries or self._added):
            self.path.unlink(missing_ok=True)


class Unwritten(Journal):
    """In place of a journal, in a replica: what is added is not written, but taken."""

    def __init__(self, path: Path):
        self.path, self._taken = path, []

    def add(self, entries: Iterable[dict[str, Any]]) -> None:
        self._taken += entries

    def taken(self) -> list[dict[str, Any]]:
        """What was added since the last call."""
        taken, self._taken = self._taken, []
        return taken


def read_journal(path: Path, version: int, advice: str) -> list[dict[str, Any]]:
    """The header and the results.

    Raises:
      OriginError: a line is damaged or of another file, or the format is another.
    """
    try:
        found = lines.read(path)
        if (told := next(iter(found), {}).get("format")) != version:
            raise OriginError(
                f"{path} has format {told!r:.20}, expected {version}: another version or program "
                f"wrote it; go on with that one, or {advice}"
            )
        return lines.verified(found)
    except ValueError as error:
        # Without the header no other line is a result.
        again = "" if "line 1 " in str(error) else "remove that line to compute it again, or "
        raise OriginError(f"{path} is damaged: {error}; {again}{advice}") from error


def check_own(path: Path) -> None:
    """Raises InputError where a run would write through a link, or to no plain file."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise InputError(f"{path} is a link or no plain file; remove it")


def begun[T](make: Callable[[], T], files: Iterable[Path], *, overwrite: bool) -> T:
    """What `make` returns; with `overwrite` the `files` of another origin are removed first.

    Raises:
      OriginError: as `make`.
    """
    try:
        return make()
    except OriginError:
        if not overwrite:
            raise
        for path in files:
            path.unlink(missing_ok=True)
        return make()
