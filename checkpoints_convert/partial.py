"""The unfinished conversion on disk: `DESTINATION.partial`, renamed when it is whole.

Orbax's partial save writes each group of tensors into a folder of its own. After each group,
`progress.json` records the arrays of that folder and their digests. A group that was interrupted
has no record and is deleted on resuming. At the end Orbax merges the folders into one checkpoint,
whose arrays must have these digests.
"""

import contextlib
import dataclasses
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import tensorstore as ts
from flax import traverse_util
from orbax.checkpoint import v1 as ocp

from jax_longctx.errors import CheckpointError
from jax_longctx.files import partial_of, read_text, write_text
from jax_longctx.models import storage

SUFFIX = ".partial"
# Seconds to watch a deleted partial after a failed write (see `Partial.discard`).
SETTLE = 0.5
PROGRESS = "progress.json"
# Orbax's folder of groups, until they are merged.
GROUPS = storage.PARAMS + ".partial_save"
# In the folder of a group: the arrays of the only process that converts.
OWN = f"{storage.STATE}/ocdbt.process_0"
# Bytes of a group of parameters, also in an export. Each group costs Orbax some tens of
# milliseconds; an interruption loses at most one.
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
    """An unfinished conversion.

    Args:
      made_from: source and options, which must be those of a partial to continue.
      resume: continue an interrupted conversion; otherwise start anew.

    Raises:
      CheckpointError: the interrupted conversion has another source or other options.
    """

    def __init__(self, destination: Path, made_from: Mapping[str, Any], *, resume: bool):
        self.destination = destination
        self.folder = destination.with_name(destination.name + SUFFIX)
        self._made_from = json.loads(json.dumps(made_from))
        # The digest of each array of a folder.
        self._groups: dict[str, dict[str, str]] = {}
        self._state = "writing"
        self._settle = 0.0
        self._check_ours()
        if not (resume and self._continue()):
            self._groups, self._state = {}, "writing"
            self.discard()
            self.folder.mkdir(parents=True)
            self._note()

    @property
    def finished(self) -> set[str]:
        """Paths of the parameters that are written."""
        return {path for paths in self._groups.values() for path in paths}

    @property
    def merged(self) -> bool:
        """Whether `merge` is done."""
        return self._state == "merged"

    def save(self, arrays: Mapping[str, jax.Array]) -> None:
        """Writes a group of parameters."""
        before = self._folders()
        with self._orbax():
            tree = traverse_util.unflatten_dict(dict(arrays), sep=".")
            ocp.partial.save(str(self.folder / storage.PARAMS), tree)
            (new,) = self._folders() - before
            self._groups[new] = storage.array_digests(self.folder / GROUPS / new / OWN)
        self._note()

    def merge(self) -> None:
        """Makes one checkpoint of all groups."""
        self._state = "merging"
        self._note()
        with self._orbax():
            ocp.partial.finalize(str(self.folder / storage.PARAMS))
        self._state = "merged"
        self._note()

    def check(self, entries: Mapping[str, storage.TensorEntry]) -> dict[str, storage.TensorEntry]:
        """The entries with their digests; CheckpointError unless all arrays are stored whole."""
        folder = self.folder / storage.PARAMS
        base = {"driver": "file", "path": f"{folder / storage.STATE}/"}
        lacking, wanted = [], 0
        with self._orbax():
            for path, entry in entries.items():
                store = {"driver": "ocdbt", "base": base, "path": f"{path}/"}
                array = ts.open({"driver": "zarr3", "kvstore": store}, open=True).result()
                told = array.storage_statistics(query_fully_stored=True).result()
                found = array.shape, array.dtype.name, told.fully_stored
                if found != (entry.shape, entry.dtype, True):
                    lacking.append(path)
                wanted += array.size * array.dtype.numpy_dtype.itemsize
            digests = storage.array_digests(folder / storage.STATE)
        noted = [each for group in self._groups.values() for each in group.items()]
        lacking += [path for path, digest in noted if digests.get(path) != digest]
        # Nothing is compressed.
        written = storage.bytes_below(folder)
        if lacking or written < wanted:
            raise CheckpointError(
                f"{self.destination} was not written whole ({written} of at least {wanted} bytes, "
                f"lacking {lacking[:1]}); another program may have changed it; convert again"
            )
        return {path: dataclasses.replace(it, digest=digests[path]) for path, it in entries.items()}

    def publish(self) -> None:
        """Gives the whole folder its name."""
        (self.folder / PROGRESS).unlink()
        self.folder.rename(self.destination)

    def discard(self) -> None:
        """Deletes the folder.

        After a failed save, this repeats until the folder stays away for a while: writers that
        Orbax did not wait for make their folders again.
        """
        while True:
            if self.folder.exists():
                shutil.rmtree(self.folder, ignore_errors=self._settle > 0)
            end = time.monotonic() + self._settle
            while not self.folder.exists() and time.monotonic() < end:
                time.sleep(0.02)
            if not self.folder.exists():
                return

    @contextlib.contextmanager
    def _orbax(self) -> Iterator[None]:
        context = ocp.Context()
        # Weights hardly compress: compression takes longer than writing the bytes it saves.
        context.array.saving.use_compression = False
        try:
            with storage.writing(self.destination), context:
                yield
        except CheckpointError:
            self._settle = SETTLE
            raise

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
        except (OSError, ValueError) as error:
            raise self._refusal(f"its {PROGRESS} cannot be read: {error}") from error
        try:
            made_from, state, groups = noted["made_from"], noted["state"], noted["groups"]
            changed = [key for key, value in self._made_from.items() if made_from[key] != value]
        except (KeyError, TypeError) as error:
            raise self._refusal(f"its {PROGRESS} is damaged") from error
        if changed:
            raise self._refusal(f"it was begun with another {changed[0]}")
        if state == "merging" or not all(isinstance(group, dict) for group in groups.values()):
            # Orbax moves files while it merges, and does not record how far it came. Earlier
            # versions recorded no digests.
            return False
        self._groups, self._state = groups, state
        if self.merged:
            return (self.folder / storage.PARAMS).is_dir()
        for name in self._folders() - set(self._groups):
            shutil.rmtree(self.folder / GROUPS / name)
        for path in self.folder.glob(GROUPS + ".*"):
            shutil.rmtree(path)
        return self._folders() == set(self._groups)

    def _refusal(self, why: str) -> CheckpointError:
        return CheckpointError(
            f"{self.folder} holds an interrupted conversion that cannot be continued: {why}; "
            f"delete it to begin anew"
        )

    def _folders(self) -> set[str]:
        groups = self.folder / GROUPS
        return {path.name for path in groups.iterdir()} if groups.is_dir() else set()

    def _note(self) -> None:
        noted = {"made_from": self._made_from, "state": self._state, "groups": self._groups}
        write_text(self.folder / PROGRESS, json.dumps(noted))
