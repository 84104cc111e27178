"""Runs batches of prompts under one method: answers, seconds and bytes."""

import contextlib
import dataclasses
import functools
import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from jax_longctx.api import LongContext
from jax_longctx.contract import Method
from jax_longctx.engine import Engine, Lengths
from jax_longctx.engine.ahead import Compilation
from jax_longctx.engine.capacity import footprint, read_bytes, staged_caches
from jax_longctx.engine.compiling import CompileClock
from jax_longctx.errors import CapacityError, LongctxError
from jax_longctx.methods import settings_of
from jax_longctx.run_spec import ON_DEVICES, RunSpec

# Most of the free memory that the caches of a batch may take.
PLANNED = 0.75


# A method, its settings, its rows and what it is asked (see `Batch.asked`).
Sized = tuple[str, dict[str, str], int, list[list[int]]]


def in_rounds[Question](rows: Sequence[Sequence[Question]]) -> list[list[Question]]:
    """What is asked together: one of each row. A row with fewer repeats its last one."""
    most = max(map(len, rows))
    return [[asked[min(i, len(asked) - 1)] for asked in rows] for i in range(most)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """A batch as every process gets it, in JSON values.

    Attributes:
      method, settings: arguments of `make_method`.
      contexts: token ids of at most `rows` texts; the last one is repeated up to `rows`.
      questions: token ids of each text's questions, which are asked one after another.
      slots, reserve: of the caches, the same for all batches of a length.
      asked: tokens of questions and of answers: the programs of all batches of this method and
        length are those that these need.
      soon: methods that compile together with this one.
    """

    method: str
    settings: dict[str, str]
    contexts: list[list[int]]
    questions: list[list[list[int]]]
    rows: int
    slots: int
    reserve: int
    max_new: int
    stop: list[str]
    asked: list[list[int]]
    soon: list[Sized]

    @property
    def shape(self) -> tuple[Any, ...]:
        """What the caches' shapes depend on."""
        return self.method, str(self.settings), self.rows, self.slots, self.reserve

    @property
    def programs(self) -> tuple[Any, ...]:
        """Batches with equal keys share compiled programs."""
        sizes = {max(map(len, asked)).bit_length() for asked in self.rounds}
        return *self.shape, tuple(sorted(sizes)), self.max_new, tuple(self.stop)

    @property
    def rounds(self) -> list[list[list[int]]]:
        """The questions that are asked together, one of each row; the last row is repeated."""
        more = self.rows - len(self.questions)
        return in_rounds(self.questions + self.questions[-1:] * more)

    def following(self) -> Iterator["Batch"]:
        """Batches of these texts under the methods that come soon."""
        for method, settings, rows, asked in self.soon:
            texts = {"contexts": self.contexts[:rows], "questions": self.questions[:rows]}
            given: dict[str, Any] = {"method": method, "settings": settings, "rows": rows}
            yield dataclasses.replace(self, **given, **texts, asked=asked)

    def halves(self) -> Iterator["Batch"]:
        """The halves that have contexts; `rows` is their number.

        Where one context is left, each of its questions is a batch.
        """
        size = (len(self.contexts) + 1) // 2
        pairs = [*zip(self.contexts, self.questions, strict=True)]
        if len(pairs) == self.rows == 1:
            pairs = [(self.contexts[0], [asked]) for asked in self.questions[0]]
        for some in itertools.batched(pairs, size):
            contexts, questions = map(list, zip(*some, strict=True))
            yield dataclasses.replace(self, contexts=contexts, questions=questions, rows=len(some))


def engine_of(
    model: LongContext,
    method: Method,
    spec: RunSpec,
) -> Engine:
    """An engine of the model's weights under another method; contexts lie where `spec` says.

    Raises:
      ConfigError: the method does not support the model, or cannot be offloaded.
    """
    given = compared(spec, method)
    return model.engine.under(method, offload=given.offload, working_set=given.working_set)


def compared(spec: RunSpec, method: Method) -> RunSpec:
    """The spec of one of several methods.

    Contexts of exact attention, which others are compared with, lie on the devices.
    """
    full = settings_of(method)["name"] == "full"
    return dataclasses.replace(spec, method=method, **(ON_DEVICES if full else {}))


def compile_batch(
    model: LongContext, engine: Engine, batch: Batch, *, into: Compilation | None = None
) -> Compilation | None:
    """Begins to compile the batch's programs; None where it does not fit, or is refused.

    `into` is as of `compile_ahead`.
    """
    contexts = _padded(batch)
    run = LongContext(engine, model.tokenizer, model.manifest)
    lengths = Lengths([*map(len, contexts)], batch.asked, batch.reserve, batch.slots)
    with contextlib.suppress(LongctxError):
        return run.compile(lengths, stop=batch.stop, keep=len(batch.rounds) > 1, into=into)
    return None


def rows_that_fit(
    engine: Engine, rows: int, slots: int, reserve: int, memory: int | None, more: bool = False
) -> int:
    """Rows of a batch: `rows`, halved until the caches fit the free memory.

    Args:
      memory: free bytes of each device; None if the platform does not report it.
      more: whether a text has several questions, each but the last over a copy of its cache, unless
        these share buffers.
    """
    shards = engine.mesh.shape["data"]
    rows = -(-rows // shards) * shards
    if memory is None:
        return rows
    need = footprint(engine.setup, batch=shards, context=slots - reserve - 1, reserve=reserve)
    copied = more and not engine.method.info.append_only
    size = max(need.peak, need.kept + need.resident) if copied else need.peak
    while rows > shards and size * rows // shards > PLANNED * memory * engine.mesh.size:
        rows = max(rows // 2 // shards * shards, shards)
    return rows


def answer_batch(model: LongContext, engine: Engine, batch: Batch) -> list[dict[str, Any]]:
    """The result of each question, text after text, or `refused` with the reason.

    A batch that does not fit, or has a row that the engine rejects, is halved; a single row is
    refused. `short_of_memory` marks rows that a later run may answer.
    """
    try:
        return _answers(LongContext(engine, model.tokenizer, model.manifest), batch)
    except LongctxError as error:
        short, reason = isinstance(error, CapacityError), str(error)
    except jax.errors.JaxRuntimeError as error:
        # Other processes may have had enough memory and computed the whole batch.
        if "RESOURCE_EXHAUSTED" not in str(error) or jax.process_count() > 1:
            raise
        short, reason = True, f"out of memory: {str(error).splitlines()[0]:.200}"
    # One context padded to several rows may still fit alone, and without a copy for each question.
    one = (batch.rows if short else len(batch.contexts)) == 1
    if one and len(batch.questions[0]) == 1:
        return [{"refused": reason} | ({"short_of_memory": True} if short else {})]
    return [row for half in batch.halves() for row in answer_batch(model, engine, half)]


def _padded(batch: Batch) -> list[list[int]]:
    """Contexts, the last one repeated up to `rows`."""
    return batch.contexts + batch.contexts[-1:] * (batch.rows - len(batch.contexts))


def _answers(model: LongContext, batch: Batch) -> list[dict[str, Any]]:
    contexts, rounds = _padded(batch), batch.rounds
    with CompileClock() as clock:
        begun = time.perf_counter()
        context = model.engine.prefill(
            contexts, reserve=batch.reserve, capacity=batch.slots, questions=rounds[0]
        )
        read, slots = time.perf_counter() - begun, context.slots
        ends: Any = {"max_tokens": batch.max_new, "stop": batch.stop}
        answers = [
            model.ask(context, asked, keep=number < len(rounds), **ends)
            for number, asked in enumerate(rounds, start=1)
        ]
    steps = [max(len(answer.tokens) for answer in found) - 1 for found in answers]
    return [
        {
            "answer": answer.text,
            "finish": answer.finish,
            "tokens": {
                "context": len(contexts[row]),
                "question": len(question),
                "answer": len(answer.tokens),
            },
            "seconds": {
                # Of the text and the question, also where other questions were asked before.
                "first_token": round(read + answer.first_token_seconds, 4),
                # A step decodes one token of every row.
                "token": round(answer.decode_seconds / count, 5) if count else None,
            },
            "compiled": clock.programs > 0,
            "rows": len(contexts),
            "bytes": _bytes_of_a_row(model.engine, batch, slots, len(contexts[row])),
        }
        for row, questions in enumerate(batch.questions)
        for question, found, count in zip(questions, answers, steps, strict=False)
        for answer in (found[row],)
    ]


_staged = functools.lru_cache(maxsize=16)(staged_caches)


def _bytes_of_a_row(engine: Engine, batch: Batch, slots: int, length: int) -> dict[str, int]:
    """Bytes of one row's share of the caches: held while answering, and read by a decode step."""
    shards = engine.mesh.shape["data"]
    rows = -(-batch.rows // shards) * shards
    *_, caches = _staged(engine.setup, rows, slots - batch.reserve - 1, batch.reserve)
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(caches))
    return {
        "resident": held // rows,
        "read": read_bytes(engine.setup, caches, length) // rows,
    }
