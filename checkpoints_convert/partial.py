"""The unfinished conversion on disk: `DESTINATION.partial`, renamed when it is whole.

Arrays are written in groups. After each, `progress.json` records their digests. Arrays that were
being written at an interruption have no record, and are written again. At the end all arrays must
have these digests.
"""

import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jax_longctx.errors import CheckpointError
from jax_longctx.files import partial_of, read_text, reason, write_text
from jax_longctx.models import storage

SUFFIX = ".partial"
PROGRESS = "progress.json"
# Bytes of a group of parameters, also in an export: an interruption loses at most one.
GROUP = 64 << 20

OnProgress = Callable[[int, int], None]


def check_destination(destination: Path) -> None:
    """Raises CheckpointError unless the destination can be made."""
    if destination.is_dir() and not any(destination.iterdir()):
        return
    # Also a link to itself, which does not count as existing.
    if os.path.lexists(destination):
        raise CheckpointError(f"{destination} exists; choose another name or delete it")


class Partial:
    """An unfinished conversion; an interrupted one is continued.

    Args:
      made_from: source and options; a partial continues only where they are the same.

    Raises:
      CheckpointError: the interrupted conversion has another source or other options.
    """

    def __init__(self, destination: Path, made_from: Mapping[str, Any]):
        self.destination = destination
        self.folder = destination.with_name(destination.name + SUFFIX)
        self._made_from = json.loads(json.dumps(made_from))
        # By path.
        self._digests: dict[str, str] = {}
        self._check_ours()
        if not self._continue():
            self.discard()
            self.folder.mkdir(parents=True)
            self._note()

    @property
    def params(self) -> Path:
        """The folder of the arrays."""
        return self.folder / storage.PARAMS

    @property
    def finished(self) -> set[str]:
        """Paths of the parameters that are written."""
        return {*self._digests}

    def save(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Writes a group of parameters."""
        with storage.writing(self.destination):
            storage.save_arrays(self.params, arrays)
            self._digests |= storage.array_digests(self.params / storage.STATE, arrays)
        self._note()

    def check(self, entries: Mapping[str, storage.TensorEntry]) -> dict[str, storage.TensorEntry]:
        """The entries with their digests; CheckpointError unless all arrays are as written."""
        with storage.writing(self.destination):
            found = storage.array_digests(self.params / storage.STATE)
        if lacking := [path for path in entries if found.get(path) != self._digests[path]]:
            raise CheckpointError(
                f"{self.destination} was not written whole (lacking {lacking[:1]}); another "
                f"program may have changed it; convert again"
            )
        return {path: dataclasses.replace(it, digest=found[path]) for path, it in entries.items()}

    def publish(self) -> None:
        """Gives the whole folder its name."""
        (self.folder / PROGRESS).unlink()
        self.folder.rename(self.destination)

    def discard(self) -> None:
        """Deletes the folder."""
        if self.folder.exists():
            shutil.rmtree(self.folder)

    def _check_ours(self) -> None:
        """Raises CheckpointError where a folder of that name is not a partial."""
        known = {PROGRESS, partial_of(Path(PROGRESS)).name}
        if not self.folder.exists() or (self.folder / PROGRESS).exists():
            return
        if not self.folder.is_dir() or {path.name for path in self.folder.iterdir()} - known:
            raise CheckpointError(
                f"{self.folder} is in the way: it is no interrupted conversion; move it"
            )

    def _continue(self) -> bool:
        """Continues the existing partial; returns False where there is none to continue."""
        try:
            noted = json.loads(read_text(self.folder / PROGRESS))
        except FileNotFoundError:
            return False
        except (OSError, ValueError, RecursionError) as error:
            raise self._refusal(f"its {PROGRESS} cannot be read: {reason(error)}") from error
        try:
            # Earlier versions recorded groups.
            made_from, digests = noted["made_from"], dict(noted.get("digests", {}))
            changed = [key for key, value in self._made_from.items() if made_from[key] != value]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise self._refusal(f"its {PROGRESS} is damaged") from error
        if changed:
            raise self._refusal(f"it was begun with another {changed[0]}")
        if not self.params.is_dir():
            return False
        self._digests = digests
        return bool(digests)

    def _refusal(self, why: str) -> CheckpointError:
        return CheckpointError(
            f"{self.folder} holds an interrupted conversion that cannot be continued: {why}; "
            f"delete it to begin anew"
        )

    def _note(self) -> None:
        noted = {"made_from": self._made_from, "digests": self._digests}
        write_text(self.folder / PROGRESS, json.dumps(noted))
