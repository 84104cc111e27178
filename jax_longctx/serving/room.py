"""Room in memory for texts, which leave it for the disk and come back while rows decode.

Memory is counted in bytes on each device. A text that would not fit into the whole budget is
refused; one that does not fit now waits until rows end. To make room, the least recently used text
that no row needs leaves the memory: to the disk where a client named it.

One text is saved and one loaded at a time (see `executor`). What waits for that is looked at again
in each turn of the scheduler: room for another text, the client that asked for the save, and the
questions about a text that is being loaded.
"""

import logging
from collections.abc import Callable
from typing import Literal

from jax_longctx.errors import CapacityError, CheckpointError, DamagedError, LongctxError
from jax_longctx.memory import shown_bytes
from jax_longctx.serving.contexts import Contexts
from jax_longctx.serving.executor import Executor
from jax_longctx.serving.metrics import Metrics
from jax_longctx.serving.schema import RequestError, from_library
from jax_longctx.serving.texts import Text
from jax_longctx.serving.tickets import Ticket

log = logging.getLogger(__name__)

# Whether a text left the memory, is being saved so that one may leave, or none can.
type Dropped = Literal["dropped", "saving", "none"]


class Room:
    """Moves texts between memory and disk; the scheduler's thread alone calls it.

    Args:
      budget: bytes on each device that texts in memory may take.
      queued: the tickets without a row, in their order.
      fail: ends a ticket with an error.

    Attributes:
      saving, loading: the text that is being saved or loaded now.
    """

    def __init__(
        self,
        executor: Executor,
        contexts: Contexts,
        metrics: Metrics,
        budget: int,
        *,
        queued: Callable[[], list[Ticket]],
        fail: Callable[[Ticket, RequestError], None],
    ):
        self._executor, self._contexts, self._metrics = executor, contexts, metrics
        self.budget, self._queued, self._fail = budget, queued, fail
        self.saving: Text | None = None
        self.loading: Text | None = None
        # Texts that could not be saved, so that another must make room.
        self._failed: dict[Text, LongctxError] = {}

    def load(self, text: Text) -> None:
        """Begins to load a saved text; `end_files` takes it up."""
        self.loading, text.busy = text, True
        try:
            self._contexts.check_private(text)
            self._executor.do("load", key=text.key, path=str(self._contexts.path(text)))
        except (CapacityError, CheckpointError) as error:
            self._not_loaded(text, error)

    def _end_load(self, *, wait: bool = False) -> None:
        """Takes up a text that was loaded meanwhile."""
        text = self.loading
        try:
            if text is None or not self._executor.do("loaded", wait=wait):
                return
        except (CapacityError, CheckpointError) as error:
            assert text is not None
            self._not_loaded(text, error)
            return
        text.resident = self._executor.resident_bytes(text.key)
        self.loading, text.coming, text.busy = None, 0, False
        self._metrics.loaded.inc()

    def _not_loaded(self, text: Text, error: LongctxError) -> None:
        """Lets a text be prefilled again; its files are removed if they are damaged."""
        log.warning("a saved context cannot be loaded, its text is read again: %s", error)
        self.loading, text.coming, text.busy = None, 0, False
        text.damaged = isinstance(error, DamagedError)
        if text.damaged:
            self._contexts.remove_files(text)
        text.saved = False

    def end_files(self, *, wait: bool = False) -> None:
        """Takes up texts that were saved and loaded meanwhile; with `wait`, when they are."""
        self._end_save(wait=wait)
        self._end_load(wait=wait)

    def make_room(self, wanted: Text, need: int) -> bool:
        """Takes texts out of memory until `need` bytes fit; False where that is not possible now.

        They are taken for `wanted`.

        Raises:
          CapacityError: they never fit.
        """
        if need > self.budget:
            raise CapacityError(
                f"a text of {len(wanted.tokens):,} tokens needs {shown_bytes(need)} on each "
                f"device, the server keeps {shown_bytes(self.budget)} for texts; shorten the text, "
                f"or start the server with more memory for contexts or a method that keeps a budget"
            )
        others = [text for text in self._contexts.texts if text is not wanted]
        while sum(text.resident + text.coming for text in others) + need > self.budget:
            if self.drop_one(wanted) != "dropped":
                return False
        wanted.coming = need
        return True

    def drop_one(self, wanted: Text) -> Dropped:
        """Takes the least recently used idle text out of memory, or begins to save it for that.

        Texts of tickets that came before those for `wanted` stay, and those that cannot be saved.

        Raises:
          CheckpointError: no text could be saved.
        """
        kept = {wanted}
        for ticket in self._queued():
            if ticket.text is wanted:
                break
            kept.add(ticket.text)
        for text in self._contexts.idle():
            if text in kept:
                continue
            if text.entries and not text.saved:
                if text in self._failed:
                    continue
                if self.saving is not None:
                    return "saving"
                try:
                    self.save(text)
                    return "saving"
                except CheckpointError as error:
                    self._failed[text] = error
                    continue
            self._failed.clear()
            self.forget(text)
            return "dropped"
        if self._failed:
            *_, failed = self._failed.values()
            # The next one to need room tries again.
            self._failed.clear()
            raise failed
        return "none"

    def forget(self, text: Text) -> None:
        """Takes a text out of memory."""
        self._executor.do("forget", key=text.key)
        text.resident = 0
        self._metrics.dropped.inc()

    def save(self, text: Text) -> None:
        """Begins to save a text, when no other is being saved; `end_files` takes it up.

        Raises:
          CheckpointError: it cannot be saved.
        """
        self._contexts.remove_files(text)
        self._executor.do("save", key=text.key, path=str(self._contexts.path(text)))
        self.saving, text.busy = text, True

    def _end_save(self, *, wait: bool = False) -> None:
        """Goes on with a save, and takes up a text that was saved meanwhile."""
        text = self.saving
        if text is None:
            return
        try:
            if not self._executor.do("saved", wait=wait):
                return
        except LongctxError as error:
            self._not_saved(text, error)
            return
        self._contexts.make_private(text)
        try:
            self._contexts.write_entries(text)
        except CheckpointError as error:
            self._contexts.remove_files(text)
            self._not_saved(text, error)
            return
        self.saving, text.busy = None, False
        self._metrics.saved.inc()

    def _not_saved(self, text: Text, error: LongctxError) -> None:
        """Fails the tickets that asked for the save; without any, another text must make room."""
        self.saving, text.busy = None, False
        asked = [ticket for ticket in self._queued() if ticket.text is text and ticket.saves]
        for ticket in asked:
            self._fail(ticket, from_library(error))
        if not asked:
            log.warning("a context cannot be saved: %s", error)
            self._failed[text] = error

    def save_again(self, text: Text) -> None:
        """Saves a text whose files were damaged. If that fails, it stays in memory."""
        text.damaged = False
        try:
            if text.entries:
                self.save(text)
        except CheckpointError as error:
            log.warning("a context cannot be saved again: %s", error)
