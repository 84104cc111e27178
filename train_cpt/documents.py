"""Documents in: plain text and JSON lines, one at a time, named so that errors can say where."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from jax_longctx.errors import InputError

__all__ = ["TEXT_SUFFIXES", "read_documents"]

TEXT_SUFFIXES = (".txt", ".md", ".rst")
LINES_SUFFIXES = (".jsonl", ".ndjson")


def read_documents(sources: Iterable[Path], field: str = "text") -> Iterator[tuple[str, str]]:
    """(name, text) of every document of the files and folders given, in a fixed order.

    A text file is one document, every line of a JSON-lines file another. Folders are searched for
    both kinds; a file that is named itself must be of one.

    Args:
      field: where a JSON object has its text.

    Raises:
      InputError: a file is missing, of another kind, not UTF-8 or not JSON with that field.
    """
    for source in sources:
        if not source.exists():
            raise InputError(f"{source} does not exist; give text or JSON-lines files or folders")
        for path in _files(source):
            if path.suffix in LINES_SUFFIXES:
                yield from _lines(path, field)
            elif path.suffix in TEXT_SUFFIXES:
                yield str(path), _read(path)
            else:
                raise InputError(
                    f"{path} is no kind of document that is read here; "
                    f"expected {', '.join((*TEXT_SUFFIXES, *LINES_SUFFIXES))}"
                )


def _files(source: Path) -> list[Path]:
    if not source.is_dir():
        return [source]
    kinds = (*TEXT_SUFFIXES, *LINES_SUFFIXES)
    return sorted(path for path in source.rglob("*") if path.suffix in kinds and path.is_file())


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text (byte {error.start})") from error


def _lines(path: Path, field: str) -> Iterator[tuple[str, str]]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield f"{path}:{number}", _text_of(line, field, f"{path}:{number}")
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error


def _text_of(line: bytes, field: str, where: str) -> str:
    try:
        value = json.loads(line)
    except ValueError as error:  # bad UTF-8 too
        raise InputError(f"{where}: this line is not JSON: {error}") from error
    text = value.get(field) if isinstance(value, dict) else None
    if not isinstance(text, str):
        raise InputError(f"{where}: expected an object with a text {field!r}; name the field")
    return text
