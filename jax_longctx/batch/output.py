"""The files of a batch run.

    OUT.jsonl.partial    finished rows in the order of the input; becomes OUT.jsonl at the end
    OUT.jsonl.journal    the run's origin and what it answered (`jax_longctx.jobs.journal`): the
                         line of a row, or answers to some of its questions
    OUT.jsonl.origin     written at the end: the origin of OUT.jsonl, its SHA-256, and a digest of
                         the rows of the input that were answered

After a kill the partial file is written again from the journal.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax_longctx.errors import OriginError
from jax_longctx.files import file_errors, sha256_of, write_text
from jax_longctx.jobs import lines
from jax_longctx.jobs.journal import GIVEN, Journal
from jax_longctx.origin import MADE_FROM, OVERWRITE, check_result

DIGEST, ANSWERED = "sha256", "answered"


def files_of(output: Path) -> list[Path]:
    """The files of a run, finished or not, from the output on."""
    ends = ("", ".partial", ".journal", ".origin")
    return [output.with_name(output.name + end) for end in ends]


def check_complete(
    output: Path, given: Mapping[str, Any], free: tuple[str, ...]
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
    return lines.read(output), found


def finish(output: Path, journal: Journal, answered: str) -> None:
    """Renames the partial file to the output, whose origin is written first."""
    _, partial, path, origin = files_of(output)
    with file_errors(f"{output} cannot be written", "run again to go on"):
        fields = {MADE_FROM: journal.header[GIVEN], DIGEST: sha256_of(partial), ANSWERED: answered}
        write_text(origin, json.dumps(fields, indent=1))
        os.replace(partial, output)
        path.unlink()
