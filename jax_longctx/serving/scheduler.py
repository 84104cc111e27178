"""The thread that owns the engine: it prefills texts, lets rows join, decodes, and makes room.

HTTP handlers give it tickets and get events back. Each turn of the thread

1. takes out what was cancelled, has expired or is needed no more;
2. lets waiting tickets go on: begins to prefill or load a text, or joins a row to the batch;
3. prefills one slice of a text, and decodes one block of the running rows.

Joins and a slice of prefill take little time together, so that rows wait little (see `pace`).
Tickets are served in their order, but one that waits for memory does not hold up those whose text
is in memory.

`room` moves texts between memory and disk meanwhile.
"""

import collections
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Literal

from jax_longctx.engine.rows import Chosen
from jax_longctx.errors import CapacityError, LongctxError
from jax_longctx.serving.contexts import Contexts
from jax_longctx.serving.executor import Executor
from jax_longctx.serving.metrics import Metrics
from jax_longctx.serving.pace import READ_SECONDS, Pace
from jax_longctx.serving.room import Room
from jax_longctx.serving.schema import RequestError, from_library
from jax_longctx.serving.texts import Text, was_deleted
from jax_longctx.serving.tickets import Piece, Prefilled, Ticket

log = logging.getLogger(__name__)

# Texts in memory that no client named: more would only be looked through.
MOST_UNNAMED = 256
# Seconds that the thread sleeps at most: times to live end meanwhile.
IDLE_SECONDS = 0.5
# Seconds between two signs of the leader to the other processes that it lives.
LIVES_SECONDS = 5.0
# Seconds between two looks at a text that is being saved or loaded, where nothing else is to do.
FILES_SECONDS = 0.01


@dataclasses.dataclass
class _Row:
    """A ticket whose answer is being decoded; `held` are tokens whose text is not certain yet."""

    ticket: Ticket
    told: float
    count: int = 0
    held: list[Chosen] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(eq=False)
class Scheduler:
    """Runs tickets in a thread of its own.

    Attributes:
      budget: bytes on each device that texts in memory may take.
      most: requests that may wait or be answered at a time.
      crashed: called in the thread with an error that is no request's fault; nothing runs after.
      compiled: tokens of texts and of a question (see `Executor.compile`), whose programs are
        compiled before tickets are taken; None compiles none.
      compiling: told how many programs are compiled, and how many there are, in the thread.
    """

    executor: Executor
    contexts: Contexts
    metrics: Metrics
    budget: int
    most: int
    crashed: Callable[[BaseException], None]
    compiled: tuple[int, int] | None = None
    compiling: Callable[[int, int], None] = lambda done, total: None

    def __post_init__(self) -> None:
        # Why no ticket is taken, or "ready".
        self.state: Literal["compiling", "ready", "shutting down"] = "compiling"
        self._changed = threading.Condition()
        self._waiting: collections.deque[Ticket] = collections.deque()
        self._tickets = 0
        self._stopped = False
        self._rows: dict[int, _Row] = {}
        self._text: Text | None = None
        how = {"queued": self._queued, "fail": self._fail}
        self._room = Room(self.executor, self.contexts, self.metrics, self.budget, **how)
        # Whether the devices are full: nothing is read until a row has ended.
        self._full = False
        self._pace = Pace()
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)
        self.metrics.watch(self.contexts, self._rows, self._waiting)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def check_room(self, more: int = 1) -> None:
        """Raises RequestError where a place is not free (429), or no ticket is taken (503)."""
        if self.state != "ready":
            told = f"the server is {self.state}"
            raise RequestError(told, status=503, retry_after=10)
        if self._tickets + more > self.most:
            raise RequestError(
                f"{self._tickets} requests are being answered or wait already; try again later",
                status=429,
                code="rate_limit_exceeded",
                # A place may be free then.
                retry_after=max(1, min(60, len(self._waiting))),
            )

    def take(self) -> None:
        """Takes a place for a request; RequestError as `check_room`."""
        with self._changed:
            self.check_room()
            self._tickets += 1

    def give_back(self) -> None:
        """Counts a place that was taken as free."""
        with self._changed:
            self._tickets -= 1

    def submit(self, tickets: Sequence[Ticket]) -> None:
        """Takes a request's tickets, which have its place from then on, and one more each.

        Their texts and ids are released when they end, or here.

        Raises:
          RequestError: the server is shutting down (503), or there is no room for these tickets now
            (429).
        """
        with self._changed:
            try:
                self.check_room(len(tickets) - 1)
            except RequestError:
                for ticket in tickets:
                    self._release(ticket)
                raise
            self._tickets += len(tickets) - 1
            self._waiting += tickets
            self._changed.notify()

    def cancel(self, ticket: Ticket) -> None:
        """Ends a ticket whose client is gone; any thread may call it, also after its end."""
        with self._changed:
            ticket.cancelled = True
            self._changed.notify()

    def wake(self) -> None:
        """Wakes the thread, because the books of contexts have changed."""
        with self._changed:
            self._changed.notify()

    def refuse(self) -> None:
        """Takes no more tickets; those that it has go on."""
        with self._changed:
            self.state = "shutting down"

    def close(self) -> None:
        """Ends all tickets and the thread, after the block or the piece of text at hand."""
        with self._changed:
            self.state, self._stopped = "shutting down", True
            self._changed.notify_all()
        self._thread.join()

    # -- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._prepare()
            while self._sleep():
                began = time.monotonic()
                self._room.end_files()
                self._tidy()
                self._admit(began)
                self._work(began)
            for ticket in [*self._queued(), *(row.ticket for row in self._rows.values())]:
                self._fail(ticket, RequestError("the server has shut down", status=503))
            self._room.end_files(wait=True)
            self.contexts.update_files()
            self.executor.dismiss()
        except BaseException as error:
            # Whatever it is: without this thread the server would hang.
            self.state, self._stopped = "shutting down", True
            self.executor.give_up_saving()
            self.crashed(error)

    def _prepare(self) -> None:
        """Compiles the first requests' programs."""
        if self.compiled is not None:
            texts, question = self.compiled
            self.executor.do("compile", texts=texts, question=question)
            ready = False
            while not (ready or self._stopped):
                done, total, ready = self.executor.do("compile_on")
                # More may follow those that are compiled.
                self.compiling(done, total if ready else max(total, done + 1))
            if not ready:
                self.executor.do("give_up_compiling")
        with self._changed:
            self.state = "ready" if self.state == "compiling" else self.state

    def _sleep(self) -> bool:
        """Waits for work; False when the thread is to end."""
        with self._changed:
            if not (self._stopped or self._rows or self._text):
                if self._room.saving or self._room.loading:
                    self._changed.wait(FILES_SECONDS)
                elif not self._waiting:
                    self._changed.wait(IDLE_SECONDS)
            stopped = self._stopped
        if self.executor.several and time.monotonic() - self.executor.ordered > LIVES_SECONDS:
            self.executor.do("nothing")
        return not stopped

    def _queued(self) -> list[Ticket]:
        """A copy of the tickets without a row: other threads add to them."""
        with self._changed:
            return list(self._waiting)

    def _tidy(self) -> None:
        """Takes out cancelled tickets, and texts that nobody needs."""
        for place, row in list(self._rows.items()):
            if row.ticket.cancelled:
                self.executor.do("leave", number=place)
                self._end_row(place)
        for ticket in self._queued():
            named = ticket.entry or ticket.about
            if ticket.cancelled:
                self._end(ticket)
            elif named is not None and named.deleted:
                self._fail(ticket, was_deleted(named))
        self.contexts.expired()
        self.contexts.update_files()
        for text in self.contexts.texts:
            if text.resident and text.damaged and self._room.saving is None:
                self._room.save_again(text)
        for text in self.contexts.useless():
            if text.prefilling or text.resident:
                self.executor.do("forget", key=text.key)
            self._end_reading(text)
            text.resident = 0
        unnamed = [text for text in self.contexts.idle() if not (text.entries or text.tickets)]
        for text in unnamed[: max(0, len(unnamed) - MOST_UNNAMED)]:
            self._room.forget(text)

    def _admit(self, began: float) -> None:
        """Lets each waiting ticket go on as far as it can in this turn."""
        blocked = self._full
        for ticket in self._queued():
            if self._rows and time.monotonic() - began >= READ_SECONDS:
                return
            text = ticket.text
            if text.prefilling is not None or text is self._room.loading:
                continue
            try:
                # A text is fetched for a row that can begin, not for one that waits for a place.
                wanted = ticket.ask is None or self.executor.free > 0
                if wanted and not (text.resident or blocked):
                    blocked = not self._fetch(ticket)
                if not text.resident:
                    continue
                if text.scored is not None:
                    # Read out in the request's own thread: rows would wait for a long text's.
                    ticket.scores = self.executor.scores[text.key]
                if ticket.ask is None:
                    self._finish_prefill(ticket)
                elif self.executor.free:
                    blocked = not self._join(ticket) or blocked
            except LongctxError as error:
                self._fail(ticket, from_library(error))

    def _fetch(self, ticket: Ticket) -> bool:
        """Begins to read the ticket's text, or loads it; False where there is no room now."""
        text = ticket.text
        if self._text is not None and not text.saved:
            # One text is prefilled at a time.
            return True
        if text.saved and self._room.loading is not None:
            # One text is loaded at a time.
            return True
        need = self.executor.needed_bytes(len(text.tokens))
        if not self._room.make_room(text, need):
            return False
        if text.saved:
            self._room.load(text)
            return True
        tokens = text.tokens.tolist()
        how = {"total": text.total, "question": text.question, "scored": text.scored}
        self.executor.do("read", key=text.key, tokens=tokens, **how)
        text.prefilling, self._text = (0, len(tokens)), text
        ticket.cached = 0
        return True

    def _finish_prefill(self, ticket: Ticket) -> None:
        """Ends a ticket that only reads, when its text is saved if that was asked."""
        text, entry = ticket.text, ticket.entry
        if entry is not None:
            if ticket.saves and not text.saved:
                if self._room.saving is None:
                    self.contexts.touch(entry)
                    self._room.save(text)
                return
            self.contexts.touch(entry)
            if text.saved:
                self.contexts.write_entries(text)
        ticket.ready = True
        self._count_prompt(ticket)
        ticket.send(Piece(finish="length"))
        self._end(ticket)

    def _count_prompt(self, ticket: Ticket) -> None:
        self.metrics.prompt_tokens.inc(ticket.prompt)
        self.metrics.cached_tokens.inc(ticket.cached)

    def _join(self, ticket: Ticket) -> bool:
        """Feeds the ticket's question; False where there is no room now."""
        assert ticket.ask is not None
        ask = dataclasses.asdict(ticket.ask)
        try:
            place, first = self.executor.do("join", key=ticket.text.key, ask=ask)
        except CapacityError:
            dropped = self._room.drop_one(ticket.text)
            if dropped != "none":
                return dropped == "dropped"
            if self._rows:
                self._full = True
                return False
            raise
        with self._changed:
            self._waiting.remove(ticket)
        row = self._rows[place] = _Row(ticket, time.monotonic())
        ticket.text.rows += 1
        self.metrics.first_token.observe(time.monotonic() - ticket.came)
        self._count_prompt(ticket)
        self._give(place, row, [first], self.executor.broken.get(place))
        return True

    def _work(self, began: float) -> None:
        """Reads one slice, then decodes one block, within its share of the time."""
        reads, read = time.monotonic(), None
        while self._text is not None:
            self._prefill_on(self._text)
            now = time.monotonic()
            if now - began >= READ_SECONDS or not self._rows:
                read = now - reads
                break
        if self._rows:
            self._decode(self._pace.steps(read))

    def _prefill_on(self, text: Text) -> None:
        try:
            now = self.executor.do("read_on", key=text.key)
        except LongctxError as error:
            self._end_reading(text)
            self._not_read(text, error)
            return
        if now is None:
            text.resident = self.executor.resident_bytes(text.key)
            self.metrics.read_tokens.inc(len(text.tokens))
            self._end_reading(text)
            return
        text.prefilling = now
        for ticket in self._queued():
            if ticket.text is text and ticket.entry is not None:
                ticket.send(Prefilled(*now))

    def _end_reading(self, text: Text) -> None:
        """Notes that the text, if it was being read, is not any more."""
        text.prefilling, text.coming = None, 0
        if text is self._text:
            self._text = None

    def _not_read(self, text: Text, error: LongctxError) -> None:
        """Tries again later where memory was short and there can be more, or fails the tickets."""
        if isinstance(error, CapacityError):
            try:
                if self._room.drop_one(text) != "none":
                    return
            except LongctxError as failed:
                # It could not be saved.
                error = failed
            if self._rows:
                self._full = True
                return
        for ticket in self._queued():
            if ticket.text is text:
                self._fail(ticket, from_library(error))

    def _decode(self, most: int) -> None:
        """Decodes a block of at most `most` steps."""
        began = time.monotonic()
        found = self.executor.do("step", most=most)
        self._pace.took(time.monotonic() - began, max(map(len, found.values()), default=0))
        broken = self.executor.broken
        for place, chosen in found.items():
            now, row = time.monotonic(), self._rows[place]
            if chosen or place in broken:
                self.metrics.between_tokens.observe(now - row.told)
                row.told = now
                self._give(place, row, chosen, broken.get(place))

    def _give(self, place: int, row: _Row, chosen: Sequence[Chosen], fault: str | None) -> None:
        """Sends these tokens' text; ends the row after its last token, or with the fault."""
        ticket = row.ticket
        assert ticket.ask is not None and ticket.reader is not None
        if fault is not None:
            ticket.send(RequestError(fault, status=500))
            self._end_row(place)
            return
        reader, texts = ticket.reader, []
        told: list[Chosen] = []
        for each in chosen:
            texts.append(reader.push([each.token]))
            row.count += 1
            # Who counts the tokens of a prompt and its answer finds the last one there.
            if not reader.ended or ticket.text.scored is not None:
                row.held.append(each)
            if texts[-1]:
                told, row.held = [*told, *row.held], []
            if reader.finished:
                break
        last = row.count >= ticket.ask.max_tokens
        if reader.finished or last:
            texts.append(reader.flush())
            if reader.stops.stopped is None:
                told, row.held = [*told, *row.held], []
        finish = "stop" if reader.finished else "length" if last else None
        if finish is not None:
            self.metrics.answer_tokens.inc(row.count)
            self.metrics.answer_seconds.observe(time.monotonic() - ticket.came)
        text, end = "".join(texts), None
        if finish is not None and ticket.placed is not None:
            asked = {"question": list(ticket.ask.question), "answer": reader.tokens}
            how = {"key": ticket.text.key, "span": ticket.placed.span, **asked}
            try:
                end = Piece(text, told, row.count, finish, self.executor.do("weights", **how))
            except LongctxError as error:
                end = from_library(error)
        if text or told or finish is not None:
            ticket.send(end or Piece(text, told, row.count, finish))
        if finish is None:
            return
        if reader.stops.stopped is not None:
            # The engine does not know of stop strings.
            self.executor.do("leave", number=place)
        self._end_row(place)

    def _end_row(self, place: int) -> None:
        row = self._rows.pop(place)
        row.ticket.text.rows -= 1
        self._full = False
        self._end(row.ticket)

    def _fail(self, ticket: Ticket, error: RequestError) -> None:
        self._end(ticket)
        ticket.send(error)

    def _release(self, ticket: Ticket) -> None:
        """Takes the ticket out of the books of contexts, with an id whose text is not ready."""
        self.contexts.release(ticket.text)
        if ticket.entry is not None and not ticket.ready:
            # Where the disk is full it is removed later.
            ticket.entry.expires = 0.0
            self.contexts.expired()

    def _end(self, ticket: Ticket) -> None:
        """Takes the ticket out of the books."""
        self._release(ticket)
        with self._changed:
            if ticket in self._waiting:
                self._waiting.remove(ticket)
            self._tickets -= 1
            self._changed.notify_all()
