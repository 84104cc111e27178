"""Documents in: text, JSON lines, Parquet and Hugging Face `datasets` folders, one at a time.

A text file is one document; every line of a JSON-lines file is another, and every row of a Parquet
or Arrow file. A folder that `Dataset.save_to_disk` wrote has a `state.json`, which lists the files
that count; the splits of a `DatasetDict` are subfolders and are read alike, since texts are split
anew by their own hash. Files are read a piece at a time. Each document has a name, so that errors
can say where.
"""

import hashlib
import importlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jax_longctx.errors import InputError

__all__ = ["document_files", "file_record", "read_documents"]

TEXT_SUFFIXES = (".txt", ".md", ".rst")
LINES_SUFFIXES = (".jsonl", ".ndjson")
TABLE_SUFFIXES = (".parquet", ".arrow")
KINDS = (*TEXT_SUFFIXES, *LINES_SUFFIXES, *TABLE_SUFFIXES)
# What `Dataset.save_to_disk` leaves in its folder.
STATE = "state.json"
# Rows of a table that are in memory at once.
ROWS = 64


def document_files(sources: Iterable[Path]) -> list[Path]:
    """The files of the sources, in a fixed order; folders are searched for all kinds.

    Raises:
      InputError: a source is missing, a file that is named itself is of another kind, or a
        `state.json` cannot be read.
    """
    found: list[Path] = []
    for source in sources:
        if source.is_dir():
            found += _files_below(source)
        elif not source.exists():
            raise InputError(
                f"{source} does not exist; give files or folders of text, JSON lines or Parquet"
            )
        elif source.suffix not in KINDS:
            raise InputError(
                f"{source} is no kind of document that is read here; expected {', '.join(KINDS)}"
            )
        else:
            found.append(source)
    return found


def read_documents(files: Iterable[Path], field: str = "text") -> Iterator[tuple[str, str]]:
    """(name, text) of every document of `document_files`.

    Args:
      field: where a JSON object, or a row, has its text.

    Raises:
      InputError: a file cannot be read, is damaged, or has no such field of text; pyarrow is
        missing where there are tables.
    """
    for path in files:
        try:
            if path.suffix in LINES_SUFFIXES:
                yield from _lines(path, field)
            elif path.suffix in TABLE_SUFFIXES:
                yield from _rows(path, field)
            else:
                yield str(path), _read(path)
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror or error}") from error


def file_record(path: Path) -> dict[str, Any]:
    """Name, size and SHA-256 of a file, JSON-able; raises InputError where it cannot be read."""
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"path": str(path), "bytes": path.stat().st_size, "sha256": digest}
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error


def _files_below(folder: Path) -> list[Path]:
    states = {path.parent: _listed(path) for path in folder.rglob(STATE)}
    # Beside the listed files there may be caches of transformations.
    others = [
        path
        for path in folder.rglob("*")
        if path.suffix in KINDS
        and path.is_file()
        and (path.suffix != ".arrow" or path.parent not in states)
    ]
    return sorted([*others, *(path for listed in states.values() for path in listed)])


def _listed(state: Path) -> list[Path]:
    """The files of a saved `Dataset`; none where the file is somebody else's."""
    try:
        fields = json.loads(state.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{state} cannot be read: {error}") from error
    entries = fields.get("_data_files", []) if isinstance(fields, dict) else []
    return [state.parent / entry["filename"] for entry in entries]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text (byte {error.start})") from error


def _lines(path: Path, field: str) -> Iterator[tuple[str, str]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield f"{path}:{number}", _text_of(line, field, f"{path}:{number}")


def _text_of(line: bytes, field: str, where: str) -> str:
    try:
        value = json.loads(line)
    except ValueError as error:  # bad UTF-8 too
        raise InputError(f"{where}: this line is not JSON: {error}") from error
    text = value.get(field) if isinstance(value, dict) else None
    if not isinstance(text, str):
        raise InputError(f"{where}: expected an object with a text {field!r}; name the field")
    return text


def _rows(path: Path, field: str) -> Iterator[tuple[str, str]]:
    """Every row of a Parquet or Arrow file."""
    arrow = _pyarrow("pyarrow")
    number = 0
    try:
        for texts in _columns(path, field):
            for text in texts:
                number += 1
                if not isinstance(text, str):
                    raise InputError(f"{path}: row {number} has no text {field!r}; drop such rows")
                yield f"{path}:{number}", text
    except arrow.ArrowException as error:
        raise InputError(f"{path} is damaged: {str(error).splitlines()[0]:.200}") from error


def _columns(path: Path, field: str) -> Iterator[Sequence[Any]]:
    """The texts of a file, some rows at a time."""
    arrow = _pyarrow("pyarrow")
    if path.suffix == ".parquet":
        with _pyarrow("pyarrow.parquet").ParquetFile(path) as table:
            _check_column(path, field, table.schema_arrow, arrow)
            for batch in table.iter_batches(batch_size=ROWS, columns=[field]):
                yield batch.column(0).to_pylist()
        return
    # Arrow's streaming format, which `datasets` writes.
    with arrow.memory_map(str(path)) as source, arrow.ipc.open_stream(source) as batches:
        _check_column(path, field, batches.schema, arrow)
        for batch in batches:
            for start in range(0, batch.num_rows, ROWS):
                yield batch.column(field).slice(start, ROWS).to_pylist()


def _check_column(path: Path, field: str, schema: Any, arrow: Any) -> None:
    """Raises InputError unless there is one column of that name, of text."""
    if field not in schema.names:
        raise InputError(
            f"{path} has no column {field!r} but {', '.join(schema.names)}; name the field"
        )
    kind = schema.field(field).type
    if kind not in (arrow.string(), arrow.large_string(), arrow.string_view()):
        raise InputError(f"{path}: column {field!r} is of {kind}, expected text; name the field")


def _pyarrow(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise InputError(
            f"Parquet and `datasets` folders need the package {error.name}; install it: "
            f"pip install 'jax-longctx[parquet]'"
        ) from error
