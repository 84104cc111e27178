"""What a measurement hands over: files, and a record or a table on stdout, from one process."""

import importlib.util
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jax_longctx.cli import processes
from jax_longctx.cli.terminal import Terminal
from jax_longctx.errors import InputError

__all__ = [
    "check_file",
    "check_folder",
    "check_matplotlib",
    "check_plot",
    "hand_over",
    "save",
]


def check_file(out: Path | None, option: str = "--out") -> None:
    """InputError where the file could not be written once the work is done; makes its folder."""
    if out is None:
        return
    if out.is_dir():
        raise InputError(f"{option} {out} is a folder; name a file")
    _check_writable(out.parent, f"{option} {out}")


def check_folder(out: Path | None, option: str = "--out") -> None:
    """The same for a folder that files go to, which is made where it is not there."""
    if out is not None:
        _check_writable(out, f"{option} {out}")


def _check_writable(folder: Path, what: str) -> None:
    """InputError unless a file can be made there; of a job's processes the first tries it."""
    if not processes.is_leader():
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Permissions do not tell of read-only and of virtual file systems.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError(
            f"{what}: nothing can be written to the folder {folder}: {error.strerror}; name another"
        ) from error


def check_plot(plot: Path | None, option: str) -> None:
    """`check_file` of a picture, which also needs matplotlib."""
    check_file(plot, option)
    if plot is not None:
        check_matplotlib(option)


def check_matplotlib(what: str) -> None:
    """InputError where it is missing: before hours of work rather than after them."""
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError(f"{what} needs matplotlib; run: pip install 'jax-longctx[eval]'")


def save(record: Any, out: Path | None) -> None:
    """Writes JSON, whole or not at all; of a job's processes only the first does.

    Raises:
      InputError: the file cannot be written.
    """
    if out is None or not processes.is_leader():
        return
    text = json.dumps(record, indent=1)
    partial = out.with_name(out.name + ".partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(out)
    except OSError as error:
        raise InputError(f"{out} could not be written: {error.strerror}") from error


def hand_over(
    terminal: Terminal, result: Any, out: Path | None, show: Callable[[Any], None]
) -> None:
    """Writes `result` to `out` as JSON and shows it; of a job's processes only the first does.

    In JSON mode it is recorded instead of shown. The file is whole or not there.
    """
    if not processes.is_leader():
        return
    save(result, out)
    if terminal.as_json:
        terminal.record(result)
    else:
        show(result)
