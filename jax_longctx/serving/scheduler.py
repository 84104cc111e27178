"""The thread that owns the engine: it reads texts, lets rows join, decodes, and makes room.

HTTP handlers give it jobs and get events back. Each turn of the thread

1. takes out what was cancelled, has expired or is needed no more;
2. lets waiting jobs go on: begins to read or load a text, or joins a row to those that decode;
3. reads one slice of a text, and decodes one block of the running rows.

Joins and a slice of reading take little time together, so that rows wait little (see `pace`). Jobs
are served in their order, but a job that waits for memory does not hold up those whose text is in
memory.

Memory is counted in bytes on each device. A text that would not fit into the whole budget is
refused; one that does not fit now waits until rows end. To make room, the least recently used text
that no row needs leaves the memory: to the disk where a client named it.

Texts are saved and loaded while rows decode, one of each at a time (see `executor`). What waits for
that is looked at again in each turn: room for another text, the client that asked for the save, and
the questions about a text that is being loaded.
"""

import collections
import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from jax_longctx.api import AnswerReader
from jax_longctx.engine.engine import NOT_FINITE
from jax_longctx.engine.running import Chosen, Request
from jax_longctx.errors import CapacityError, CheckpointError, DamagedError, LongctxError
from jax_longctx.memory import shown_bytes
from jax_longctx.serving.contexts import Contexts, Entry, Text, was_deleted
from jax_longctx.serving.executor import Executor, Team, request_values
from jax_longctx.serving.metrics import Metrics
from jax_longctx.serving.pace import READ_SECONDS, Pace
from jax_longctx.serving.schema import RequestError, from_library

log = logging.getLogger(__name__)

# Texts in memory that no client named: more would only be looked through.
MOST_UNNAMED = 256
# Seconds that the thread sleeps at most: times to live end meanwhile.
IDLE_SECONDS = 0.5
# Seconds after which the leader shows the other processes that it lives.
LIVES_SECONDS = 5.0
# Seconds between two looks at a text that is being saved or loaded, where nothing else is to do.
FILES_SECONDS = 0.01


@dataclasses.dataclass(frozen=True)
class Reading:
    """Tokens of the job's text that were read, and all of them."""

    done: int
    total: int


@dataclasses.dataclass(frozen=True)
class Ready:
    """The job's text was read, and saved if that was asked."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """More of an answer: text that is certain, and the tokens that it came with."""

    text: str
    chosen: Sequence[Chosen]


@dataclasses.dataclass(frozen=True)
class Ended:
    """The end of an answer: `stop` or `length`, and the number of its tokens."""

    finish: str
    tokens: int


@dataclasses.dataclass(frozen=True)
class Failed:
    """The job ended without its result."""

    error: RequestError


# Whether a text left the memory, is being saved so that one may leave, or none can.
type Dropped = Literal["dropped", "saving", "none"]
Event = Reading | Ready | Piece | Ended | Failed


@dataclasses.dataclass(eq=False, kw_only=True)
class Job:
    """A request: to read a text, or with `request` to answer a question about it.

    Attributes:
      text: counted as used by this job (`Contexts.use`); the scheduler releases it.
      send: takes the job's events, in the scheduler's thread.
      entry: what names the text, of a job that reads it for a client; removed with a job that
        ends before the text is `ready`.
      about: the context that the question is about; where it is deleted before the answer begins,
        the job fails.
      reader: turns the answer's tokens into text.
      cached: tokens of the text that were read before this job came.
      cancelled: the client is gone.
    """

    text: Text
    send: Callable[[Event], None]
    entry: Entry | None = None
    about: Entry | None = None
    request: Request | None = None
    reader: AnswerReader | None = None
    cached: int = 0
    ready: bool = False
    cancelled: bool = False
    came: float = dataclasses.field(default_factory=time.monotonic)


@dataclasses.dataclass
class Place:
    """A request's place among those that are answered or wait.

    Attributes:
      came: when the request came, of `time.monotonic`.
      body: bytes of its body in memory.
      taken: whether it counts.
      given: whether a job has the place now, which gives it back at its end.
    """

    came: float = dataclasses.field(default_factory=time.monotonic)
    body: int = 0
    taken: bool = False
    given: bool = False


@dataclasses.dataclass
class _Row:
    """A job whose answer is being decoded; `held` are tokens whose text is not certain yet."""

    job: Job
    told: float
    count: int = 0
    held: list[Chosen] = dataclasses.field(default_factory=list)


def _saves(job: Job) -> bool:
    """Whether the job is to save its text."""
    return job.entry is not None and job.entry.save


@dataclasses.dataclass(eq=False)
class Scheduler:
    """Runs jobs in a thread of its own.

    Attributes:
      budget: bytes on each device that texts in memory may take.
      most: requests that may wait or be answered at a time.
      crashed: called in the thread with an error that is no request's fault; nothing runs after.
      compiled: tokens of texts and of a question (see `Executor.compile`), whose programs are
        compiled before jobs are taken; None compiles none.
      compiling: told how many programs are compiled, and how many there are, in the thread.
    """

    team: Team
    contexts: Contexts
    metrics: Metrics
    budget: int
    most: int
    crashed: Callable[[BaseException], None]
    compiled: tuple[int, int] | None = None
    compiling: Callable[[int, int], None] = lambda done, total: None

    def __post_init__(self) -> None:
        self._executor: Executor = self.team.executor
        self._begun = False
        self._changed = threading.Condition()
        self._waiting: collections.deque[Job] = collections.deque()
        self._jobs = 0
        self._closing = self._stopped = False
        self._rows: dict[int, _Row] = {}
        self._text: Text | None = None
        self._need = 0
        # Texts that are being saved and loaded, and the bytes of the latter.
        self._saving: Text | None = None
        self._loading: Text | None = None
        self._loading_need = 0
        # Texts that could not be saved, so that another must make room.
        self._failed: dict[Text, LongctxError] = {}
        # Whether the devices are full: nothing is read until a row has ended.
        self._full = False
        self._pace = Pace()
        self._ordered = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    @property
    def accepts(self) -> bool:
        """Whether jobs are taken."""
        return self._begun and self._thread.is_alive() and not self._closing

    @property
    def state(self) -> str:
        """Why no job is taken: `compiling` or `shutting down`."""
        return "shutting down" if self._closing or self._begun else "compiling"

    @property
    def begun(self) -> bool:
        """Whether the thread takes jobs, or will never do."""
        return self._begun or not self._thread.is_alive()

    @contextlib.contextmanager
    def place(self) -> Iterator[Place]:
        """A place for a request, looked for before anything of it is read.

        It counts from `take` on, when the request's body is there; `submit` gives it to a job.

        Raises:
          RequestError: no place is free (429), or the server is shutting down (503).
        """
        with self._changed:
            self._check_room()
        place = Place()
        try:
            yield place
        finally:
            if place.taken and not place.given:
                with self._changed:
                    self._jobs -= 1

    def take(self, place: Place) -> None:
        """Takes the place; RequestError as `place`."""
        with self._changed:
            self._check_room()
            self._jobs, place.taken = self._jobs + 1, True

    def _check_room(self) -> None:
        self._check_accepts()
        if self._jobs >= self.most:
            raise RequestError(
                f"{self._jobs} requests are being answered or wait already; try again later",
                status=429,
                code="rate_limit_exceeded",
                retry_after=self._patience(),
            )

    def submit(self, job: Job, place: Place) -> None:
        """Takes a job. Its text and id are released when it ends, or here where it is refused.

        Raises:
          RequestError: the server is shutting down (503).
        """
        with self._changed:
            try:
                self._check_accepts()
            except RequestError:
                self._release(job)
                raise
            place.given = True
            self._waiting.append(job)
            self._changed.notify()

    def _check_accepts(self) -> None:
        if not self.accepts:
            told = f"the server is {self.state}"
            raise RequestError(told, status=503, retry_after=10)

    def cancel(self, job: Job) -> None:
        """Ends a job whose client is gone; any thread may call it, also after the job's end."""
        with self._changed:
            job.cancelled = True
            self._changed.notify()

    def wake(self) -> None:
        """Lets the thread see at once what has changed in the books of contexts."""
        with self._changed:
            self._changed.notify()

    def refuse(self) -> None:
        """Takes no more jobs; those that it has go on."""
        self._closing = True

    def close(self) -> None:
        """Ends all jobs and the thread, after the block or the piece of text at hand."""
        with self._changed:
            self._closing = self._stopped = True
            self._changed.notify_all()
        self._thread.join()

    def _patience(self) -> int:
        """Seconds after which a place may be free, for `Retry-After`."""
        return max(1, min(60, len(self._waiting)))

    # -- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._prepare()
            while self._sleep():
                began = time.monotonic()
                self._end_files()
                self._tidy()
                self._admit(began)
                self._work(began)
            for job in [*self._queued(), *(row.job for row in self._rows.values())]:
                self._fail(job, RequestError("the server has shut down", status=503))
            self._end_files(wait=True)
            self.contexts.update_files()
            self.team.dismiss()
        except BaseException as error:
            # Whatever it is: without this thread the server would hang.
            self._stopped = True
            self._executor.give_up_saving()
            self.crashed(error)

    def _prepare(self) -> None:
        """Compiles what the first requests need."""
        if self.compiled is not None:
            texts, question = self.compiled
            self._do("compile", texts=texts, question=question)
            ready = False
            while not (ready or self._stopped):
                done, total, ready = self._do("compile_on")
                # More may follow those that are compiled.
                self.compiling(done, total if ready else max(total, done + 1))
            if not ready:
                self._do("give_up_compiling")
        self._begun = True

    def _sleep(self) -> bool:
        """Waits for work; False when the thread is to end."""
        with self._changed:
            if not (self._stopped or self._rows or self._text):
                if self._saving or self._loading:
                    self._changed.wait(FILES_SECONDS)
                elif not self._waiting:
                    self._changed.wait(IDLE_SECONDS)
            stopped = self._stopped
        if self.team.several and time.monotonic() - self._ordered > LIVES_SECONDS:
            self._do("nothing")
        return not stopped

    def _queued(self) -> list[Job]:
        """The jobs without a row, as they are now: other threads add to them."""
        with self._changed:
            return list(self._waiting)

    def _do(self, order: str, **arguments: Any) -> Any:
        self._ordered = time.monotonic()
        return self.team.do(order, **arguments)

    def _tidy(self) -> None:
        """Takes out cancelled jobs, and texts that nobody needs."""
        for place, row in list(self._rows.items()):
            if row.job.cancelled:
                self._do("leave", number=place)
                self._end_row(place)
        for job in self._queued():
            named = job.entry or job.about
            if job.cancelled:
                self._end(job)
            elif named is not None and named.deleted:
                self._fail(job, was_deleted(named))
        self.contexts.expired()
        self.contexts.update_files()
        for text in self.contexts.damaged():
            if self._saving is None:
                self._save_again(text)
        for text in self.contexts.useless():
            if text is self._text:
                self._text, self._need = None, 0
            if text.reading or text.resident:
                self._do("forget", key=text.key)
            text.reading, text.resident = None, 0
        unnamed = [text for text in self.contexts.idle() if not (text.entries or text.jobs)]
        for text in unnamed[: max(0, len(unnamed) - MOST_UNNAMED)]:
            self._forget(text)
        counts = self.contexts.counts()
        for state, count in counts.items():
            self.metrics.contexts.labels(state).set(count)
        self.metrics.context_bytes.set(self.contexts.resident_bytes)
        self.metrics.running.set(len(self._rows))
        self.metrics.waiting.set(len(self._waiting))

    def _admit(self, began: float) -> None:
        """Lets each waiting job go on as far as it can now, in the turn that began then."""
        blocked = self._full
        for job in self._queued():
            if self._rows and time.monotonic() - began >= READ_SECONDS:
                return
            text = job.text
            if text.reading is not None or text is self._loading:
                continue
            try:
                # A text is fetched for a row that can begin, not for one that waits for a place.
                wanted = job.request is None or self._executor.free > 0
                if wanted and not (text.resident or blocked):
                    blocked = not self._fetch(job)
                if not text.resident:
                    continue
                if job.request is None:
                    self._finish_reading(job)
                elif self._executor.free:
                    blocked = not self._join(job) or blocked
            except LongctxError as error:
                self._fail(job, from_library(error))

    def _fetch(self, job: Job) -> bool:
        """Begins to read the job's text, or loads it; False where there is no room now."""
        text = job.text
        if self._text is not None and not text.saved:
            # One text is read at a time.
            return True
        if text.saved and self._loading is not None:
            # One text is loaded at a time.
            return True
        need = self._executor.needed_bytes(len(text.tokens))
        if not self._make_room(text, need):
            return False
        if text.saved:
            self._begin_load(text, need)
            return True
        tokens = text.tokens.tolist()
        self._do("read", key=text.key, tokens=tokens, total=text.total, question=text.question)
        text.reading, self._text, self._need = (0, len(tokens)), text, need
        job.cached = 0
        return True

    def _begin_load(self, text: Text, need: int) -> None:
        """Begins to load a saved text; `_end_load` takes it up."""
        self._loading, self._loading_need, text.busy = text, need, True
        try:
            self._do("load", key=text.key, path=str(self.contexts.path(text)))
        except (CapacityError, CheckpointError) as error:
            self._not_loaded(text, error)

    def _end_load(self, *, wait: bool = False) -> None:
        """Takes up a text that was loaded meanwhile."""
        text = self._loading
        try:
            if text is None or not self._do("loaded", wait=wait):
                return
        except (CapacityError, CheckpointError) as error:
            assert text is not None
            self._not_loaded(text, error)
            return
        text.resident = self._executor.resident_bytes(text.key)
        self._loading, self._loading_need, text.busy = None, 0, False
        self.metrics.loaded.inc()

    def _not_loaded(self, text: Text, error: LongctxError) -> None:
        """Lets a text be read again; its files are removed if they are damaged."""
        log.warning("a saved context cannot be loaded, its text is read again: %s", error)
        self._loading, self._loading_need, text.busy = None, 0, False
        text.damaged = isinstance(error, DamagedError)
        if text.damaged:
            self.contexts.remove_files(text)
        text.saved = False

    def _end_files(self, *, wait: bool = False) -> None:
        """Takes up texts that were saved and loaded meanwhile; with `wait`, when they are."""
        self._end_save(wait=wait)
        self._end_load(wait=wait)

    def _make_room(self, wanted: Text, need: int) -> bool:
        """Takes texts out of memory until `need` bytes fit; False where that is not possible now.

        Raises:
          CapacityError: they never fit.
        """
        if need > self.budget:
            raise CapacityError(
                f"a text of {len(wanted.tokens):,} tokens needs {shown_bytes(need)} on each "
                f"device, the server keeps {shown_bytes(self.budget)} for texts; shorten the text, "
                f"or start the server with more memory for contexts or a method that keeps a budget"
            )
        while self.contexts.resident_bytes + self._need + self._loading_need + need > self.budget:
            if self._drop_one(wanted) != "dropped":
                return False
        return True

    def _drop_one(self, wanted: Text) -> Dropped:
        """Takes the least recently used idle text out of memory, or begins to save it for that.

        Texts of jobs that came before those for `wanted` stay, and those that cannot be saved.

        Raises:
          CheckpointError: no text could be saved.
        """
        kept = {wanted}
        for job in self._queued():
            if job.text is wanted:
                break
            kept.add(job.text)
        for text in self.contexts.idle():
            if text in kept:
                continue
            if text.entries and not text.saved:
                if text in self._failed:
                    continue
                if self._saving is not None:
                    return "saving"
                try:
                    self._begin_save(text)
                    return "saving"
                except CheckpointError as error:
                    self._failed[text] = error
                    continue
            self._failed.clear()
            self._forget(text)
            return "dropped"
        if self._failed:
            *_, failed = self._failed.values()
            # The next one to need room tries again.
            self._failed.clear()
            raise failed
        return "none"

    def _forget(self, text: Text) -> None:
        self._do("forget", key=text.key)
        text.resident = 0
        self.metrics.dropped.inc()

    def _begin_save(self, text: Text) -> None:
        """Begins to save a text, when no other is being saved; `_end_save` takes it up.

        Raises:
          CheckpointError: it cannot be saved.
        """
        self.contexts.check_disk(text)
        self.contexts.remove_files(text)
        self._do("save", key=text.key, path=str(self.contexts.path(text)))
        self._saving, text.busy = text, True

    def _end_save(self, *, wait: bool = False) -> None:
        """Goes on with a save, and takes up a text that was saved meanwhile."""
        text = self._saving
        if text is None:
            return
        try:
            if not self._do("saved", wait=wait):
                return
        except LongctxError as error:
            self._not_saved(text, error)
            return
        self.contexts.count_stored(text)
        try:
            # Its size is known now.
            self.contexts.check_disk(text)
            self.contexts.write_entries(text)
        except CheckpointError as error:
            self.contexts.remove_files(text)
            self._not_saved(text, error)
            return
        self._saving, text.busy = None, False
        self.metrics.saved.inc()

    def _not_saved(self, text: Text, error: LongctxError) -> None:
        """Fails the jobs that asked for the save; where none did, another text must make room."""
        self._saving, text.busy = None, False
        asked = [job for job in self._queued() if job.text is text and _saves(job)]
        for job in asked:
            self._fail(job, from_library(error))
        if not asked:
            log.warning("a context cannot be saved: %s", error)
            self._failed[text] = error

    def _save_again(self, text: Text) -> None:
        """Saves a text whose files were damaged; where that fails, it is in memory alone."""
        text.damaged = False
        try:
            if text.entries:
                self._begin_save(text)
        except CheckpointError as error:
            log.warning("a context cannot be saved again: %s", error)

    def _finish_reading(self, job: Job) -> None:
        """Ends a job that only reads, when its text is saved if that was asked."""
        text, entry = job.text, job.entry
        assert entry is not None
        if _saves(job) and not text.saved:
            if self._saving is None:
                self.contexts.touch(entry)
                self._begin_save(text)
            return
        self.contexts.touch(entry)
        if text.saved:
            self.contexts.write_entries(text)
        job.ready = True
        job.send(Ready())
        self._end(job)

    def _join(self, job: Job) -> bool:
        """Feeds the job's question; False where there is no room now."""
        assert job.request is not None
        key, request = job.text.key, request_values(job.request)
        try:
            place, first = self._do("join", key=key, request=request)
        except CapacityError:
            dropped = self._drop_one(job.text)
            if dropped != "none":
                return dropped == "dropped"
            if self._rows:
                self._full = True
                return False
            raise
        with self._changed:
            self._waiting.remove(job)
        row = self._rows[place] = _Row(job, time.monotonic())
        job.text.rows += 1
        self.metrics.first_token.observe(time.monotonic() - job.came)
        self.metrics.prompt_tokens.inc(len(job.text.tokens) + len(job.request.question))
        self.metrics.cached_tokens.inc(job.cached)
        self._give(place, row, [first], broken=place in self._executor.broken)
        return True

    def _work(self, began: float) -> None:
        """Reads one slice, then decodes one block, within its share of the time."""
        reads, read = time.monotonic(), None
        while self._text is not None:
            self._read_on(self._text)
            now = time.monotonic()
            if now - began >= READ_SECONDS or not self._rows:
                read = now - reads
                break
        if self._rows:
            self._decode(self._pace.steps(read))

    def _read_on(self, text: Text) -> None:
        try:
            now = self._do("read_on", key=text.key)
        except LongctxError as error:
            self._text, self._need, text.reading = None, 0, None
            self._not_read(text, error)
            return
        if now is None:
            text.resident = self._executor.resident_bytes(text.key)
            self.metrics.read_tokens.inc(len(text.tokens))
            self._text, self._need, text.reading = None, 0, None
            return
        text.reading = now
        for job in self._queued():
            if job.text is text:
                job.send(Reading(*now))

    def _not_read(self, text: Text, error: LongctxError) -> None:
        """Tries again later where memory was short and there can be more; else fails the jobs."""
        if isinstance(error, CapacityError):
            try:
                if self._drop_one(text) != "none":
                    return
            except LongctxError as failed:
                # It could not be saved.
                error = failed
            if self._rows:
                self._full = True
                return
        for job in self._queued():
            if job.text is text:
                self._fail(job, from_library(error))

    def _decode(self, most: int) -> None:
        """Decodes a block of at most so many steps."""
        began = time.monotonic()
        found = self._do("step", most=most)
        self._pace.took(time.monotonic() - began, max(map(len, found.values()), default=0))
        broken = self._executor.broken
        for place, chosen in found.items():
            now, row = time.monotonic(), self._rows[place]
            if chosen:
                self.metrics.between_tokens.observe(now - row.told)
                row.told = now
                self._give(place, row, chosen, broken=place in broken)

    def _give(self, place: int, row: _Row, chosen: Sequence[Chosen], *, broken: bool) -> None:
        """Sends what these tokens say; ends the row after its last one."""
        job = row.job
        assert job.request is not None and job.reader is not None
        if broken:
            job.send(Failed(RequestError(NOT_FINITE, status=500)))
            self._end_row(place)
            return
        reader, texts = job.reader, []
        told: list[Chosen] = []
        for each in chosen:
            texts.append(reader.push([each.token]))
            row.count += 1
            if not reader.ended:
                row.held.append(each)
            if texts[-1]:
                told, row.held = [*told, *row.held], []
            if reader.finished:
                break
        last = row.count >= job.request.max_tokens
        if reader.finished or last:
            texts.append(reader.flush())
            if reader.stops.stopped is None:
                told, row.held = [*told, *row.held], []
        text = "".join(texts)
        if text or told:
            job.send(Piece(text, told))
        if not (reader.finished or last):
            return
        if reader.stops.stopped is not None:
            # The engine does not know of stop strings.
            self._do("leave", number=place)
        self.metrics.answer_tokens.inc(row.count)
        self.metrics.answer_seconds.observe(time.monotonic() - job.came)
        job.send(Ended("stop" if reader.finished else "length", row.count))
        self._end_row(place)

    def _end_row(self, place: int) -> None:
        row = self._rows.pop(place)
        row.job.text.rows -= 1
        self._full = False
        self._end(row.job)

    def _fail(self, job: Job, error: RequestError) -> None:
        self._end(job)
        job.send(Failed(error))

    def _release(self, job: Job) -> None:
        """Takes the job out of the books of contexts, with an id whose text is not ready."""
        self.contexts.release(job.text)
        if job.entry is not None and not job.ready:
            # Where the disk is full it is removed later.
            job.entry.expires = 0.0
            self.contexts.expired()

    def _end(self, job: Job) -> None:
        """Takes the job out of the books."""
        self._release(job)
        with self._changed:
            if job in self._waiting:
                self._waiting.remove(job)
            self._jobs -= 1
            self._changed.notify_all()
