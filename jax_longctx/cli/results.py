"""What a benchmark hands over: a file, and a record or a table on stdout, from one process."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jax_longctx.cli import processes
from jax_longctx.cli.terminal import Terminal
from jax_longctx.errors import InputError

__all__ = ["check_folder", "hand_over"]


def check_folder(out: Path | None) -> None:
    """InputError where the file could not be written once the work is done."""
    if out is not None and not out.parent.is_dir():
        raise InputError(f"--out {out}: there is no folder {out.parent}; make it first")


def hand_over(
    terminal: Terminal, result: Any, out: Path | None, show: Callable[[Any], None]
) -> None:
    """Writes `result` to `out` as JSON and shows it; of a job's processes only the first does.

    In JSON mode it is recorded instead of shown. The file is whole or not there.
    """
    if not processes.is_leader():
        return
    if out is not None:
        partial = out.with_name(out.name + ".partial")
        partial.write_text(json.dumps(result, indent=1), encoding="utf-8")
        partial.replace(out)
    if terminal.as_json:
        terminal.record(result)
    else:
        show(result)
