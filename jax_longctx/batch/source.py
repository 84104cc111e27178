"""The lines of a run's input: JSON lines or Parquet, on this machine or in an object store.

A row of a Parquet file is the line of JSON with its columns, without those that are null. Addresses
(`s3://`, `gs://`, `file://` ...) are opened by pyarrow's file systems, with their own credentials.
JSON lines come from a store in pieces of `PIECE` bytes, Parquet in groups of its rows.
"""

import importlib
import io
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jax_longctx.errors import InputError
from jax_longctx.files import open_plain

# The ending of Parquet files.
PARQUET = ".parquet"
# Bytes of a piece; the seconds after which Google's store is not asked again, pyarrow's are 900.
PIECE, AGAIN = 2**20, "retry_limit_seconds=20"


def seeks(source: Path | str) -> bool:
    """Whether a line is found by its place at little cost."""
    return isinstance(source, Path) and source.suffix != PARQUET


def lines_from(source: Path | str, place: int) -> Iterator[tuple[int, bytes]]:
    """Each line with its place in the input, from one on.

    Args:
      source: a path, or an address as text.
      place: the first byte of a line of JSON, the number of a Parquet row.

    Raises:
      InputError: Parquet or an address cannot be read.
      OSError: a file of JSON lines cannot be read.
    """
    if seeks(source):
        with open_plain(source) as file:
            yield from _lines(file, place)
        return
    try:
        arrow: Any = importlib.import_module("pyarrow")
        systems: Any = importlib.import_module("pyarrow.fs")
    except ImportError as error:
        told = f"{source} needs the package pyarrow: pip install 'jax-longctx[parquet]'"
        raise InputError(told) from error
    where = source if isinstance(source, str) else str(source.absolute())
    if where.startswith(("gs:", "gcs:")) and "retry_limit_seconds=" not in where:
        where += ("&" if "?" in where else "?") + AGAIN
    try:
        system, name = systems.FileSystem.from_uri(where)
        with system.open_input_file(name) as file:
            parquet, buffered = name.endswith(PARQUET), io.BufferedReader(file, PIECE)
            yield from _rows(file, place) if parquet else _lines(buffered, place)
    except (OSError, ValueError, OverflowError, arrow.ArrowException) as error:
        # Google's have more behind what is wrong.
        told = str(getattr(error, "strerror", None) or error).partition(" error_info=")[0]
        told, advice = " ".join(told.split()), f"or Parquet as *{PARQUET}"
        advice += ", at an address that your credentials open" * isinstance(source, str)
        raise InputError(
            f"{source} cannot be read: {told:.500}; give JSON lines, {advice}"
        ) from error


def _lines(file: Any, place: int) -> Iterator[tuple[int, bytes]]:
    if place:
        file.seek(place)
    for raw in file:
        yield place, raw
        place += len(raw)


def _rows(file: Any, place: int) -> Iterator[tuple[int, bytes]]:
    parquet, first = importlib.import_module("pyarrow.parquet").ParquetFile(file), 0
    for group in range(parquet.num_row_groups):
        count = parquet.metadata.row_group(group).num_rows
        if first + count > place:
            pieces = parquet.iter_batches(1024, row_groups=[group])
            rows = itertools.chain.from_iterable(each.to_pylist() for each in pieces)
            for number, row in enumerate(rows, start=first):
                if number >= place:
                    told = json.dumps(_filled(row), ensure_ascii=False, default=_foreign)
                    yield number, f"{told}\n".encode()
        first += count


def _foreign(value: Any) -> Any:
    """A value that JSON has not, as a time: no text, so that the row's error shows it."""
    return {type(value).__name__: str(value)}


def _filled(value: Any) -> Any:
    """A column's value without what is null in it."""
    if isinstance(value, dict):
        return {key: _filled(each) for key, each in value.items() if each is not None}
    return [_filled(each) for each in value] if isinstance(value, list) else value
