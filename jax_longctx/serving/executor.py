"""What the server makes the engine do: prefill texts, decode rows, save and load contexts.

The scheduler gives its orders by name with JSON arguments, so that several processes of one mesh
can follow them: the leader broadcasts each order before it carries it out, and the others carry out
the same (`do`). Contexts have keys, running rows have numbers.

In one process, threads save and load contexts while rows decode.

Rows run in batches (`RunningBatch`). Rows of short texts are copied to places of one batch. The
rows of a long text share its keys and values, if the method and the mesh can: they have a batch of
their own, whose places hold questions and answers alone. So the text is in memory once, and a
decode step reads it once. The batches take turns.
"""

import contextlib
import itertools
import logging
import time
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from jax_longctx.api import LongContext
from jax_longctx.contract import Stage
from jax_longctx.engine import Context, Lengths, Progress
from jax_longctx.engine.ahead import Compilation
from jax_longctx.engine.capacity import SMALLEST, SPARE, available_bytes, bytes_per_device
from jax_longctx.engine.context_io import Saving, load_context, made_by_engine, save_context
from jax_longctx.engine.distributed import share, to_host
from jax_longctx.engine.marks import Weights, weights_of
from jax_longctx.engine.places import cannot_share
from jax_longctx.engine.programs import list_context
from jax_longctx.engine.rows import FAULTS, Ask, Chosen
from jax_longctx.engine.running import RunningBatch
from jax_longctx.engine.runs import copied_layer
from jax_longctx.engine.scoring import TextScores
from jax_longctx.errors import CapacityError, CheckpointError, InputError, LongctxError
from jax_longctx.serving.texts import key_of
from jax_longctx.settings import Sampling

log = logging.getLogger(__name__)

# Seconds of an order that waits for programs: the thread looks whether it is to end between two.
COMPILE_SECONDS = 1.0
# The least tokens that a chunk is padded to (see `contract.tail_size`), and the most lengths of
# texts of one size that are looked at for the programs that they call.
TAIL = 8
MOST_TRIED = 256


class Executor:
    """The contexts in memory and the rows that decode; one thread calls it.

    Args:
      places: most rows that decode together.
      length: most tokens of text, question and answer.
      reserve: most tokens of a question and its answer.
      share_from: rows share a text of at least this many tokens.
      fitted: gives rows caches that fit them (see `RunningBatch`); `compile` needs fixed ones.

    Attributes:
      made_by: model, weights and method, as saved contexts state them.
      free_bytes: of each device beside weights and rows, or None where that is unknown.
      several: whether there are several processes.
      ordered: when the latest order was given, of `time.monotonic`.

    Raises:
      CapacityError: the rows' caches do not fit.
    """

    def __init__(
        self,
        model: LongContext,
        *,
        places: int,
        length: int,
        reserve: int,
        share_from: int,
        fitted: bool = False,
    ):
        self.model, self.engine, self.places = model, model.engine, places
        self._length = length
        self._share_from = share_from if cannot_share(self.engine) is None else length + 1
        slots = self.engine.slots_for(min(length, self._share_from + reserve))
        self._rows_how: dict[str, Any] = {"places": places, "reserve": reserve, "fitted": fitted}
        self._short = RunningBatch(self.engine, slots=slots, **self._rows_how)
        self.reserve = self._short.reserve
        # Both ask all processes.
        self.made_by = made_by_engine(self.engine)
        free = available_bytes(self.engine.mesh)
        self.free_bytes = None if free is None else max(0, free - self._short.growing)
        self.contexts: dict[str, Context] = {}
        self._prefilling: dict[str, Generator[Progress, None, Context]] = {}
        # Of texts whose tokens' log-probabilities are wanted.
        self.scores: dict[str, TextScores] = {}
        self._shared: dict[str, RunningBatch] = {}
        # Rows by number: their batch, and their place there.
        self._rows: dict[int, tuple[RunningBatch, int]] = {}
        self._numbers = itertools.count()
        self.broken: dict[int, str] = {}
        self.several, self.ordered = jax.process_count() > 1, time.monotonic()
        # A thread to save, and one to load.
        self._files = ThreadPoolExecutor(2, thread_name_prefix="files")
        self._saving: Saving | None = None
        self._loading: tuple[str, Future[Context]] | None = None
        self._compilation: Compilation | None = None
        self._lists: Iterator[int] = iter(())

    def do(self, order: str, **arguments: Any) -> Any:
        """The leader's: carries out an order in all processes; what it returns or raises here.

        The others raise the same errors of the library, because they do the same.
        """
        self.ordered = time.monotonic()
        if self.several:
            share({"do": order, "with": arguments})
        return getattr(self, order)(**arguments)

    def dismiss(self) -> None:
        """Ends `follow` in the other processes."""
        if self.several:
            share(None)

    def follow(self) -> None:
        """Carries out the leader's orders until it dismisses this process."""
        while (order := share(None)) is not None:
            # The leader reports what is wrong with a request.
            with contextlib.suppress(LongctxError):
                getattr(self, order["do"])(**order["with"])

    def compile(self, texts: int, question: int) -> None:
        """Begins to compile the programs of texts of up to `texts` tokens, and of the longest.

        Questions have at most `question` tokens. `compile_on` goes on with it.
        """
        self._compilation = Compilation(self.engine.mesh)
        self._lists = self._listed(texts, min(question, self.reserve - 1))

    def compile_on(self) -> tuple[int, int, bool]:
        """Lowers the programs of the next size, or waits a second for those that compile.

        Returns how many programs are compiled, how many there are, and whether that is all.
        """
        found, known = self._compilation, True
        assert found is not None
        if next(self._lists, None) is not None:
            known = False
        else:
            found.close()
            ends = time.monotonic() + COMPILE_SECONDS
            while found.done < len(found) and time.monotonic() < ends:
                time.sleep(0.05)
        return found.done, len(found), known and found.done == len(found)

    def give_up_compiling(self) -> None:
        """Compiles no more programs than those that compile now."""
        if self._compilation is not None:
            self._compilation.cancel()

    def _listed(self, texts: int, question: int) -> Iterator[int]:
        """Lists the programs of each size; texts of one size share programs."""
        longest = self._length - 2
        sizes: dict[tuple[int, bool], list[int]] = {}
        # Of one size, texts that rows share run in another batch.
        for tokens in [*range(min(texts, longest) + 1), longest]:
            size = _capacity(tokens + self.reserve), tokens >= self._share_from
            sizes.setdefault(size, []).append(tokens)
        asked = self._questions(question)
        for (capacity, _), lengths in sizes.items():
            try:
                self._list(capacity, lengths, asked)
            except CapacityError as error:
                # As a request for it will be told.
                log.warning("the programs of %d tokens are not compiled: %s", lengths[-1], error)
            yield capacity

    def _list(self, capacity: int, lengths: Sequence[int], asked: Sequence[int]) -> None:
        """Calls the programs of texts of these lengths, and of questions about them."""
        assert self._compilation is not None
        engine = self.engine
        # The shortest text has room for the longest questions. The others are only read.
        fitting = [n for n in asked if lengths[0] + n < self._length]
        others = self._reading_alike(capacity, lengths)
        engine.check_lengths([max(lengths)], self.reserve, capacity)
        with self._compilation.listing(last=False):
            for tokens, questions in [(lengths[0], fitting), *((n, []) for n in others)]:
                sizes = Lengths([tokens], [], self.reserve, capacity)
                context = list_context(engine.setup, engine.params, sizes, 1)
                for cache in context.usable_caches():
                    # To save it.
                    copied_layer(cache, np.int32(0))
                if questions:
                    batch = self._batch("", context)
                    self._shared.pop("", None)
                    batch.list_programs(context, questions, max_tokens=self.reserve)

    def _questions(self, most: int) -> list[int]:
        """Lengths of questions that call all programs of questions: they are padded to few."""
        if self.engine.method.info.needs_question:
            # Such a text is prefilled for a prompt's last token.
            return [1]
        known, found = set[Any](), []
        for n in range(1, most + 1):
            try:
                called = self._segments("question", 0, question=[[0] * n])
            except InputError:
                # The method takes no longer ones.
                break
            if not called <= known:
                known |= called
                found.append(n)
        return found

    def _reading_alike(self, capacity: int, lengths: Sequence[int]) -> list[int]:
        """A few of these lengths that need all programs of prefill.

        A text of less than a chunk, or its last chunk, is padded to one of few lengths, of which
        the least is `TAIL`.
        """
        slots = self.engine.slots_for(capacity - SPARE)
        question = [[0]] if self.engine.method.info.needs_question else None

        def called(tokens: int) -> set[Any]:
            return self._segments("context", slots, context=[[0] * tokens], question=question)

        known, found = called(lengths[0]), []
        chunk = max((shape[-1] for _, shape, *_ in called(lengths[-1])), default=1)
        # Whole chunks in the middle change nothing, so both ends of the range tell all.
        near = min(2 * chunk, MOST_TRIED // 2 * TAIL)
        for tokens in dict.fromkeys([*lengths[::-1][:near:TAIL], *lengths[:near:TAIL]]):
            shapes = called(tokens)
            if not shapes <= known:
                known |= shapes
                found.append(tokens)
        return found

    def _segments(self, stage: Stage, slots: int, **rows: Any) -> set[Any]:
        """What tells the programs of a text's or a question's segments apart."""
        segments = self.engine.method.segments(self.engine.setup.feed(stage, slots, **rows))
        # The first segment of a question is given no logits of an earlier one.
        return {
            (number > 0, each.tokens.shape, each.role, each.groups, each.variant, each.spread)
            for number, each in enumerate(segments)
        }

    def read(
        self,
        key: str,
        tokens: list[int],
        total: int,
        question: list[int] | None,
        scored: tuple[int, int] | None,
    ) -> None:
        """Begins to prefill a text (see `Text`); `read_on` goes on with it, piece by piece."""
        states = None
        if scored is not None:
            behind, best = scored
            self.scores[key] = TextScores(self.engine, [*tokens, behind], best)
            states = self.scores[key].take
        self._prefilling[key] = self.engine.prefilling(
            [tokens],
            reserve=self.reserve,
            capacity=_capacity(len(tokens) + self.reserve),
            total=[total],
            questions=None if question is None else [question],
            # Rows wait for the slice's segments alone, and the slice's time is known.
            ahead=lambda: not self._rows,
            states=states,
        )

    def read_on(self, key: str) -> tuple[int, int] | None:
        """Reads the next piece: tokens read and to read; None once the context is there.

        Raises:
          CapacityError, InputError: as `Engine.prefill`; the prefill is given up.
        """
        try:
            now = next(self._prefilling[key])
        except StopIteration as ended:
            del self._prefilling[key]
            self.contexts[key] = ended.value
            return None
        except LongctxError:
            del self._prefilling[key]
            self.scores.pop(key, None)
            raise
        return now.done, now.total

    def forget(self, key: str) -> None:
        """Gives up a context, or its prefill."""
        prefilling = self._prefilling.pop(key, None)
        if prefilling is not None:
            prefilling.close()
        for kept in (self._shared, self.contexts, self.scores):
            kept.pop(key, None)

    def save(self, key: str, path: str) -> None:
        """Begins to write a context to a new folder, one at a time; `saved` goes on with it.

        Of several processes all write it here at once: what a thread of each would tell the others
        could come in another order than what is told for rows.

        Raises:
          CheckpointError, InputError: as `save_context`.
        """
        if self.several:
            save_context(self.engine, self.contexts[key], path)
        else:
            self._saving = Saving(self.engine, self.contexts[key], path, self._files)

    def saved(self, *, wait: bool = False) -> bool:
        """Whether the context that `save` began is written; with `wait` returns when it is.

        Raises:
          CheckpointError, InputError: as `save_context`; nothing is left behind.
        """
        saving, self._saving = self._saving, None
        if saving is None or saving.go_on(wait=wait):
            return True
        self._saving = saving
        return False

    def give_up_saving(self) -> None:
        """Ends the thread of a save, at the end of a server that failed."""
        if self._saving is not None:
            self._saving.close()
            self._saving = None

    def load(self, key: str, path: str) -> None:
        """Begins to read a saved context into memory, one at a time, as `save` does.

        Raises:
          CheckpointError: as `load_context`, or it is of another text than `key`.
        """
        if self.several:
            self.contexts[key] = self._saved(key, path)
        else:
            self._loading = key, self._files.submit(self._saved, key, path)

    def _saved(self, key: str, path: str) -> Context:
        context = load_context(self.engine, path)
        # As the token ids of `Contexts.text`.
        row, total = np.asarray(context.rows[0], np.int32), int(to_host(context.total)[0])
        if key_of(row, total) != key:
            raise CheckpointError(f"{path} holds another text than the one that was saved there")
        return context

    def loaded(self, *, wait: bool = False) -> bool:
        """Whether the context that `load` began is in memory; with `wait` returns when it is.

        Raises:
          CheckpointError: as `load`.
        """
        if self._loading is None:
            return True
        key, found = self._loading
        if not (wait or found.done()):
            return False
        self._loading = None
        self.contexts[key] = found.result()
        return True

    def join(self, key: str, ask: dict[str, Any]) -> tuple[int, Chosen]:
        """Feeds a question to a context; its answer's row joins those that decode.

        `ask` has the fields of `Ask`, as JSON gives them, with a seed for its one row.

        Returns the row's number and its first token. Where the row could not be answered `broken`
        says why, by number.

        Raises:
          CapacityError, InputError: as `RunningBatch.join`.
        """
        context, sampling = self.contexts[key], dict(ask["sampling"])
        sampling["seed"] = tuple(sampling["seed"])
        batch = self._batch(key, context)
        asked = Ask(**{**ask, "sampling": Sampling(**sampling)})
        place, first = batch.join(context, asked)
        number = next(self._numbers)
        self._rows[number] = batch, place
        self._end_rows([batch])
        return number, first

    def step(self, most: int) -> dict[int, list[Chosen]]:
        """Decodes at most `most` tokens of every row, by number; rows that end leave."""
        batches = list(dict.fromkeys(batch for batch, _ in self._rows.values()))
        found = {id(batch): batch.step(most) for batch in batches}
        chosen = {
            number: found[id(batch)].get(place, []) for number, (batch, place) in self._rows.items()
        }
        self._end_rows(batches)
        return chosen

    def _end_rows(self, batches: list[RunningBatch]) -> None:
        """Forgets the rows that the latest order ended."""
        self.broken = {}
        for number, (batch, place) in list(self._rows.items()):
            why = batch.ended.get(place) if batch in batches else None
            if why is not None:
                del self._rows[number]
                if why in FAULTS:
                    self.broken[number] = FAULTS[why]

    def weights(
        self, key: str, span: tuple[int, int], question: list[int], answer: list[int]
    ) -> Weights:
        """What an answer read of these tokens of its text (see `weights_of`)."""
        given = self.engine, self.contexts[key], [question], [answer]
        (found,) = weights_of(*given, [(span[0], span[1])])
        return found

    def leave(self, number: int) -> None:
        """Takes a row out, unless it has ended."""
        batch, place = self._rows.pop(number, (None, 0))
        if batch is not None:
            batch.leave(place)

    def _batch(self, key: str, context: Context) -> RunningBatch:
        """The batch that the context's rows run in."""
        if context.lengths[0] < self._share_from:
            return self._short
        if key not in self._shared:
            self._shared[key] = RunningBatch(self.engine, context=context, **self._rows_how)
        return self._shared[key]

    def nothing(self) -> None:
        """Does nothing: an order that shows that the leader lives."""

    @property
    def free(self) -> int:
        """How many rows may join."""
        return self.places - len(self._rows)

    def resident_bytes(self, key: str) -> int:
        """Bytes on each device that a context holds, with the rows that share it."""
        context = self.contexts[key]
        own = bytes_per_device(self.engine.mesh, context.usable_caches())
        return own + self._sharing_bytes(context.lengths[0])

    def needed_bytes(self, tokens: int) -> int:
        """Bytes on each device that a text of `tokens` tokens will hold, as `resident_bytes`."""
        capacity = _capacity(tokens + self.reserve)
        own = self.engine.new_cache_bytes(capacity - SPARE, self.reserve)
        return own + self._sharing_bytes(tokens)

    def _sharing_bytes(self, tokens: int) -> int:
        """Bytes on each device of the rows that share a text, had they caches of their own."""
        if tokens < self._share_from:
            return 0
        own = self.reserve + (self.engine.method.own_tokens or 0) + SMALLEST
        return self.places * self.engine.new_cache_bytes(own, self.reserve)


def _capacity(tokens: int) -> int:
    """Slots for `tokens` tokens, rounded: texts of about the same length share programs.

    At most an eighth of them is empty, so that from 8,192 to 131,072 tokens there are 33 sizes.
    """
    step = max(SMALLEST, (1 << (tokens.bit_length() - 1)) // 8)
    return -(-(tokens + SPARE) // step) * step
