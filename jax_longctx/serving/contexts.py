"""The texts that the server has prefilled, by token ids, and the ids that clients name them by.

A `Text` is one row of token ids. It is unread, in memory, on the disk, or both. An `Entry` is what
`POST /v1/contexts` made: an id with a time to live, which names a text. Several entries may name
one text. A text without an entry was read for a request, and is kept for later ones as long as
there is room. The store keeps the books; the scheduler reads, saves and loads.

Any thread may change the books. On the disk a text is a folder `KEY` with the saved context, and a
file `KEY.json` with its entries. The file is written last and removed first, so that a folder
without a file is rubbish. An id is removed from the file before it leaves the books, in any thread
(`remove`). The scheduler's thread alone removes folders, and leaves those that are being saved or
loaded (`Text.busy`).

All lie in a folder named by model and method, so that a server finds only contexts that it can use.
What it finds at its start must be whole, made by the same model and method, and of the text that
its name says, because KEY is a hash of the text. Anything else is left where it lies, with a line
in the log.

Replicas (`common`) have a folder for all, and each a numbered one of its own in it, which the next
replica takes over when it has ended. They save each context at once. What one does not know, it
looks for in the folders of the others, and takes it up with links to the files. A context that was
deleted has a file `ID.deleted` in the folder for all.
"""

import contextlib
import dataclasses
import json
import logging
import math
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pydantic

from jax_longctx.engine.context_io import saved_manifest
from jax_longctx.errors import CheckpointError, InputError
from jax_longctx.files import (
    distrust,
    file_errors,
    private_folder,
    read_sealed,
    read_text,
    reading,
    seal,
    whole_path,
    write_text,
)
from jax_longctx.gone import current
from jax_longctx.locks import only_writer
from jax_longctx.serving.schema import RequestError
from jax_longctx.serving.texts import Entry, Text, Tokens, key_of

log = logging.getLogger(__name__)

# Of KEY.json; those before it had neither a format nor a digest.
FORMAT = 1
REMEDY = "read its text again"
# The lock of the server that keeps its contexts in the folder is on this name.
SERVER = "server"
# Folders of replicas.
PLACES = 10_000


class _SavedEntry(pydantic.BaseModel, extra="forbid", strict=True):
    """An entry in KEY.json."""

    id: str = pydantic.Field(pattern=r"^ctx_[0-9a-f]{24}$")
    chat: bool
    created: pydantic.FiniteFloat
    ttl: float = pydantic.Field(gt=0)
    save: bool


class _SavedText(pydantic.BaseModel, extra="forbid", strict=True):
    """KEY.json."""

    key: str
    total: int
    tokenizer: str | None = None
    entries: list[_SavedEntry] = pydantic.Field(min_length=1)


@dataclasses.dataclass(eq=False)
class Contexts:
    """The books of all texts and entries; any thread may call it.

    Attributes:
      folder: for saved contexts; made if need be, and held by one server at a time.
      made_by: model, weights and method, as saved contexts state them.
      tokenizer: a digest of the tokenizer and chat template that lay out texts and questions.
      ttl: seconds that an entry lives after its last use, where it does not say.
      max_ttl: most seconds that an entry may say.
      max_contexts: entries at a time.
      common: whether other servers have a part of `folder` too.

    Raises:
      InputError: the folder cannot be written, or another server uses it.
    """

    folder: Path
    made_by: dict[str, Any]
    tokenizer: str | None = dataclasses.field(default=None, kw_only=True)
    ttl: float
    max_ttl: float = math.inf
    max_contexts: int = 1024
    common: bool = False

    def __post_init__(self) -> None:
        self.lock = threading.RLock()
        self._texts: dict[str, Text] = {}
        self._entries: dict[str, Entry] = {}
        # Texts whose folder is rubbish by now.
        self._unnamed: set[Text] = set()
        self.folder = whole_path(self.folder)
        with file_errors(f"{self.folder} cannot be used", "give another folder as --contexts"):
            self.folder.parent.mkdir(0o700, parents=True, exist_ok=True)
            private_folder(self.folder, 0o700, own=True)
        with contextlib.ExitStack() as held:
            self._hold(held)
            self._find_saved()
            self._held = held.pop_all()

    def _hold(self, held: contextlib.ExitStack) -> None:
        """Holds the folder, or the first place in it that no other server holds."""
        folder, told = self.folder, f"another server keeps its contexts in {self.folder}"
        if not self.common:
            held.enter_context(only_writer(folder / SERVER, f"{told}; name another"))
            return
        for file in folder.glob("*.deleted"):
            # Its copies have ended too.
            if file.stat().st_mtime < time.time() - self.max_ttl:
                file.unlink(missing_ok=True)
        for number in range(PLACES):
            self.folder = folder / str(number)
            private_folder(self.folder, 0o700, own=True)
            with contextlib.suppress(InputError):
                held.enter_context(only_writer(self.folder / SERVER))
                return
        raise InputError(f"{PLACES:,} servers keep their contexts in {folder}; name another")

    def close(self) -> None:
        """Releases the folder."""
        self._held.close()

    # -- texts -------------------------------------------------------------------------------------

    def text(
        self,
        tokens: Iterable[int],
        total: int,
        *,
        question: list[int] | None = None,
        scored: tuple[int, int] | None = None,
    ) -> Text:
        """The text of these tokens, known or new; a ticket is counted that uses it."""
        made = Text("", np.asarray(tokens, np.int32), total, question, scored)
        # One that is not shared is read anew each time.
        salt = b"" if made.shared else secrets.token_bytes(16)
        made.key = key_of(made.tokens, total, salt)
        with self.lock:
            if self.common and made.key not in self._texts:
                self._take_up(made.key)
            return self.use(self._texts.setdefault(made.key, made))

    def use(self, text: Text) -> Text:
        """Counts a ticket that uses the text, or the one that has its key by now."""
        with self.lock:
            text = self._texts.setdefault(text.key, text)
            text.tickets, text.used = text.tickets + 1, time.monotonic()
        return text

    def release(self, text: Text) -> None:
        """Counts a ticket of the text that has ended."""
        with self.lock:
            text.tickets, text.used = text.tickets - 1, time.monotonic()

    def shared(self, tokens: Tokens, shortest: int) -> int:
        """How many tokens at the start of `tokens`, one left, a text has too.

        A text that is known or being read and is whole in `tokens` goes before a longer part of
        another one. 0 where fewer than `shortest` are shared.
        """
        best = False, 0
        for text in self.texts:
            if text.shared:
                size = min(len(text.tokens), len(tokens) - 1)
                differ = np.flatnonzero(text.tokens[:size] != tokens[:size])
                size = int(differ[0]) if differ.size else size
                if size >= shortest:
                    best = max(best, (text.begun and size == len(text.tokens), size))
        return best[1]

    @property
    def texts(self) -> list[Text]:
        """All texts, as they are now."""
        with self.lock:
            return [*self._texts.values()]

    def idle(self) -> list[Text]:
        """Texts in memory that no row is answered from, the least recently used first.

        Those without an entry come before the others.
        """
        texts = [text for text in self.texts if text.resident and not text.rows]
        return sorted(texts, key=lambda text: (bool(text.entries), text.used))

    @property
    def resident_bytes(self) -> int:
        """Bytes on each device of all texts in memory."""
        return sum(text.resident for text in self.texts)

    def useless(self) -> list[Text]:
        """Takes texts that nobody needs out of the books, and removes their files.

        Nobody names them or waits for them, and they are not in memory for later requests.
        """
        with self.lock:
            gone = [
                text
                for text in self._texts.values()
                if not (text.entries or text.tickets or text.busy)
                and (text.prefilling or not text.resident or not text.keep)
            ]
            for text in gone:
                del self._texts[text.key]
            self._unnamed -= {*gone}
        for text in gone:
            self.remove_files(text)
        return gone

    # -- entries -----------------------------------------------------------------------------------

    def enter(
        self, text: Text, *, chat: bool, ttl: float | None, save: bool, route: str | None = None
    ) -> Entry:
        """A new id for the text, whose time to live begins with `touch`.

        Args:
          route: eight hexadecimal digits that the id begins with; any unless given.

        Raises:
          RequestError: the time is too long (400), or there are as many ids as may be (429).
        """
        now, lives = time.time(), self.ttl if ttl is None else ttl
        if lives > self.max_ttl:
            raise RequestError(
                f"ttl is {lives:g} s, this server keeps contexts for at most {self.max_ttl:g} s",
                param="ttl",
            )
        name = f"ctx_{route or secrets.token_hex(4)}{text.key[:8]}{secrets.token_hex(4)}"
        entry = Entry(name, text, chat, now, lives, math.inf, save or self.common)
        with self.lock:
            if len(self._entries) >= self.max_contexts:
                raise RequestError(
                    f"there are {len(self._entries):,} contexts already; delete some, or try again "
                    f"when their time is over",
                    status=429,
                    code="too_many_contexts",
                    retry_after=60,
                )
            self._entries[name] = entry
            text.entries.add(name)
        return entry

    def find(self, name: str) -> Entry | None:
        """The entry of this id, unless its time is over."""
        with self.lock:
            if self.common and re.fullmatch(r"ctx_[0-9a-f]{24}", name):
                if self._deleted(name).exists():
                    return None
                if name not in self._entries:
                    self._take_up(f"{name[12:20]}*")
            entry = self._entries.get(name)
            return None if entry is None or entry.expires < time.time() else entry

    def touch(self, entry: Entry) -> None:
        """Counts the entry's time to live from now on, here and for a server that starts later."""
        with self.lock, contextlib.suppress(OSError):
            entry.expires = time.time() + entry.ttl
            if entry.text.saved:
                os.utime(self._file(entry.text))

    def listed(self) -> list[Entry]:
        """All entries whose time is not over, the oldest first."""
        with self.lock:
            found = filter(None, map(self.find, [*self._entries]))
            return sorted(found, key=lambda entry: entry.created)

    def remove(self, name: str, *, deleted: bool = False) -> bool:
        """Removes an id, from the disk first; its text becomes one without a name.

        Args:
          deleted: whether a client deletes it.

        Returns:
          False where there is none.

        Raises:
          CheckpointError: its file could not be changed, and it stays.
        """
        with self.lock:
            entry = self._entries.get(name)
            if entry is None:
                return False
            if self.common and deleted:
                self._deleted(name).touch()
            # A text that could not be loaded has its file still.
            saved = entry.text.saved
            if saved or self._file(entry.text).exists():
                self.write_entries(entry.text, without=name)
                entry.text.saved = entry.text.saved and saved
            del self._entries[name]
            entry.text.entries.discard(name)
            entry.text.keep, entry.deleted = False, deleted
        return True

    def expired(self) -> None:
        """Removes the ids whose time is over."""
        now = time.time()
        with self.lock:
            names = [name for name, entry in self._entries.items() if entry.expires < now]
        for name in names:
            # On a full disk the file keeps the id, and the next turn tries again.
            with contextlib.suppress(CheckpointError):
                self.remove(name)

    # -- files (of folders the scheduler's thread alone) -------------------------------------------

    def update_files(self) -> None:
        """Removes folders that no id names any more."""
        with self.lock:
            unnamed = {text for text in self._unnamed if not text.busy}
            self._unnamed -= unnamed
        for text in unnamed:
            if not text.saved:
                self.remove_files(text)

    def path(self, text: Text) -> Path:
        """The folder of the text's saved context."""
        return self.folder / text.key

    def _file(self, text: Text) -> Path:
        return self.folder / f"{text.key}.json"

    def check_private(self, text: Text) -> None:
        """Raises CheckpointError where others may have written the text's files."""
        file, folder = self._file(text), self.path(text)
        for path in [self.folder, *[file] * file.exists(), folder, *folder.rglob("*")]:
            with reading(path):
                why = distrust(path)
            if why:
                raise CheckpointError(f"{path} is not to be trusted: {why}; {REMEDY}")

    def make_private(self, text: Text) -> None:
        """Makes the text's files private to their owner."""
        for path in [self.path(text), *self.path(text).rglob("*")]:
            path.chmod(0o700 if path.is_dir() else 0o600)

    def write_entries(self, text: Text, *, without: str | None = None) -> None:
        """Writes the ids that name a saved text; where none is left, `update_files` removes it.

        Args:
          without: an id that is left out.

        Raises:
          CheckpointError: the file could not be written or removed.
        """
        file = self._file(text)
        with self.lock, file_errors(f"{file} could not be written", kind=CheckpointError):
            entries = [
                {name: getattr(self._entries[each], name) for name in _SavedEntry.model_fields}
                for each in sorted(text.entries - {without})
            ]
            described = {"key": text.key, "total": text.total, "tokenizer": self.tokenizer}
            if entries:
                sealed = seal(FORMAT, {**described, "entries": entries})
                # `save_context` makes a folder KEY.partial.
                write_text(file, json.dumps(sealed), file.with_name(f"{file.name}.partial"))
                file.chmod(0o600)
            else:
                file.unlink(missing_ok=True)
                self._unnamed.add(text)
            text.saved = bool(entries)

    def remove_files(self, text: Text) -> None:
        """Removes the text's files, if there are any."""
        if text.saved or self.path(text).exists():
            with self.lock, contextlib.suppress(OSError):
                text.saved = False
                self._file(text).unlink(missing_ok=True)
            shutil.rmtree(self.path(text), ignore_errors=True)

    def _deleted(self, name: str) -> Path:
        return self.folder.parent / f"{name}.deleted"

    def _take_up(self, keys: str) -> None:
        """Takes up what other servers have saved of texts with such keys."""
        for file in self.folder.parent.glob(f"*/{keys}.json"):
            folder, own = file.with_suffix(""), self.folder / file.stem
            if file.parent == self.folder:
                continue
            try:
                if not own.exists():
                    shutil.copytree(folder, own, copy_function=os.link)
                for entry in self._saved(file):
                    if not self._deleted(entry.id).exists():
                        entry.text = self._texts.setdefault(entry.text.key, entry.text)
                        entry.text.entries.add(self._entries.setdefault(entry.id, entry).id)
                        self.write_entries(entry.text)
            except (OSError, CheckpointError, shutil.Error) as error:
                log.warning("a context of another server is not used: %s", error)

    def _find_saved(self) -> None:
        """Takes over an earlier server's contexts, and removes unfinished ones."""
        kept, found = set(), []
        for file in sorted(self.folder.glob("*.json")):
            kept |= {file.stem, file.name}
            try:
                found += self._saved(file)
            except CheckpointError as error:
                log.warning("a saved context is not used: %s", error)
        for entry in found:
            entry.text.entries.add(entry.id)
            self._texts[entry.text.key], self._entries[entry.id] = entry.text, entry
        for path in self.folder.iterdir():
            if path.is_dir() and path.name not in kept:
                shutil.rmtree(path, ignore_errors=True)
            elif path.name.endswith((".partial", ".lock")) and path.name != f"{SERVER}.lock":
                path.unlink(missing_ok=True)
        self.expired()

    def _saved(self, file: Path) -> list[Entry]:
        """The ids of a file KEY.json, which name the text in the folder KEY.

        Raises:
          CheckpointError: file or folder is damaged, or of another text, model or method.
        """
        key = file.stem
        try:
            given = json.loads(read_text(file))
        except (OSError, ValueError, RecursionError):
            given = None
        if isinstance(given, dict) and sorted(given) == ["entries", "total"]:
            # Of an earlier version, without a digest.
            given = {"key": key, **given}
        else:
            given = read_sealed(file, FORMAT, REMEDY)
        saved = saved_manifest(self.folder / key)
        try:
            described = _SavedText.model_validate(given)
            (tokens,), total = np.asarray(saved.get("rows"), np.int32), described.total
            made_by = dict(current(saved["made_by"]))
            if "all_weights" in self.made_by:
                # Earlier versions did not state it.
                made_by.setdefault("all_weights", self.made_by["all_weights"])
            told = described.key, key_of(tokens, total), saved.get("total"), made_by
        except (KeyError, OverflowError, TypeError, ValueError) as error:
            why = " ".join(str(error).split())
            told = f"{file} or the folder {key} is no server's: {why:.200}; {REMEDY}"
            raise CheckpointError(told) from error
        # Earlier versions did not state it.
        same = described.tokenizer in (None, self.tokenizer)
        if told != (key, key, [total], self.made_by) or not same:
            raise CheckpointError(
                f"{file} or the folder {key} beside it is of another text, model, method or "
                f"tokenizer; put back what belongs there, or {REMEDY}"
            )
        text = Text(key, tokens, total, saved=True, used=time.monotonic())
        self.check_private(text)
        self.make_private(text)
        used = file.stat().st_mtime
        return [
            Entry(text=text, expires=used + each.ttl, **each.model_dump())
            for each in described.entries
        ]
