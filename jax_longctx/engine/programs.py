"""One list of programs: those that a run calls, with their arguments, from its lengths alone.

The engine's functions run over shapes in place of arrays. Each call of a `Program` is listed, and
gives the shapes of its results, where a run would have them (`compiling.listing`). So nothing is
computed and nothing is allocated, and the list has the programs of every method, on every mesh, of
both modes of layers. Only a run knows when an answer ends: of its steps each kind is listed.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import jax
import numpy as np

from jax_longctx.engine.ahead import Compilation
from jax_longctx.engine.allocate import init_caches
from jax_longctx.engine.capacity import SPARE, bucket, extend, reserved, slots_for
from jax_longctx.engine.decode import (
    Steps,
    answer_variants,
    first_state,
    next_block,
    start_answer,
    turns_of_all,
)
from jax_longctx.engine.engine import BLOCK, Engine
from jax_longctx.engine.prefill import (
    Context,
    Live,
    finish_context,
    finish_question,
    fork,
    prefill_question,
    prefill_text,
)
from jax_longctx.engine.sampling import counts_of, sampling_static, sampling_values, with_bounds
from jax_longctx.engine.setup import Setup
from jax_longctx.settings import Sampling


@dataclasses.dataclass(frozen=True)
class Lengths:
    """How long texts, questions and answers are, in tokens.

    Attributes:
      contexts: of each row.
      asked: pairs of a question, of every row, and its answer, one after another over contexts of
        this size.
      reserve: of `Engine.prefill`; the longest question and its answer unless given.
      capacity: as in `Engine.prefill`.
    """

    contexts: Sequence[int]
    asked: Sequence[Sequence[int]]
    reserve: int | None = None
    capacity: int = 0

    @property
    def reserved(self) -> int:
        """Slots that are kept for a question and its answer."""
        return reserved(max(map(sum, self.asked)) if self.reserve is None else self.reserve)


def list_run(
    setup: Setup,
    params: Any,
    lengths: Lengths,
    *,
    sampling: Sampling | None = None,
    stop_ids: Sequence[int] = (),
    keep: bool = True,
) -> Iterator[Literal["context", "question", "decode"]]:
    """Calls the programs of a `prefill` and its `stream`s; tells what those that follow are for.

    Args:
      params: arrays or shapes.
      sampling, stop_ids, keep: as in `Engine.stream`.
    """
    for question, answer in lengths.asked:
        yield "context"
        context = list_context(setup, params, lengths, question)
        yield "question"
        more = question + answer - context.reserve
        if more > 0:
            extend(setup, context, bucket(more, setup.mesh.shape["seq"]))
        live, logits = list_question(setup, params, context, question, answer, keep=keep)
        yield "decode"
        list_answer(setup, params, live, logits, answer, sampling=sampling, stop_ids=stop_ids)


def list_context(setup: Setup, params: Any, lengths: Lengths, question: int) -> Context:
    """Calls the programs that read texts, for a question of that length; a context of shapes."""
    rows, reserve, seq = _padded(setup, lengths.contexts), lengths.reserved, setup.mesh.shape["seq"]
    slots = slots_for(max(lengths.capacity - SPARE, max(map(len, rows)) + reserve), seq_shards=seq)
    needed = setup.method.info.needs_question
    asked = _padded(setup, [question] * len(lengths.contexts)) if needed else None
    total = jax.device_put(np.zeros(len(rows), np.int32))
    live = Live(init_caches(setup, len(rows), slots, reserve))
    feed = setup.feed("context", slots, context=rows, question=asked)
    for _ in prefill_text(setup, params, live, feed, total):
        pass
    caches = finish_context(setup, live.caches, total, reserve)
    sizes = len(lengths.contexts), slots, reserve
    return Context(rows, *sizes, total, caches, questions=asked, method=setup.method)


def list_question(
    setup: Setup, params: Any, context: Context, question: int, answer: int, *, keep: bool
) -> tuple[Live, Any]:
    """Calls the programs that read a question; the answer's caches, and its first logits."""
    live, info = Live(context.usable_caches()), setup.method.info
    live.caches = fork(setup, live.caches, keep=keep)
    asked = _padded(setup, [question] * context.batch)
    logits = prefill_question(setup, params, live, asked, context.total)
    if info.answers_apart:
        reserve = bucket(answer + SPARE)
        live.caches = finish_question(setup, live.caches, context.total, reserve)
    return live, logits


def list_answer(
    setup: Setup,
    params: Any,
    live: Live,
    logits: Any,
    answer: int,
    *,
    sampling: Sampling | None = None,
    stop_ids: Sequence[int] = (),
) -> None:
    """Calls the programs of an answer of `answer` tokens, from its first logits on."""
    sampling, (rows, vocabulary) = sampling or Sampling(), logits.shape
    how, seeded = sampling_static(sampling), dataclasses.replace(sampling, seed=(0,))
    values = sampling_values(seeded, rows, max_tokens=answer, stop_ids=stop_ids)
    masks = {} if sampling.form is None else {0: np.zeros(-(-vocabulary // 32), np.uint32)}
    values = with_bounds(values, dict.fromkeys(range(rows), sampling), masks)
    seen = np.zeros((rows, vocabulary), bool) if sampling.penalised else None
    counts = counts_of({}, rows, vocabulary) if sampling.counted else None
    state = first_state(np.ones(rows, bool), seen, counts)
    state, _ = start_answer(setup.ends, state, logits, values, how)
    if answer > 1:
        variants = answer_variants(setup.method, reserved(answer))
        turns = turns_of_all(setup.method, variants, answer, (rows, BLOCK))
        total: Any = np.zeros(rows, np.int32)
        steps = Steps(total, turns, values, variants, how)
        next_block(setup, params, live.caches, state, steps)


def compile_ahead(
    engine: Engine, lengths: Lengths, *, into: Compilation | None = None, **options: Any
) -> Compilation:
    """Compiles the programs of a `prefill` and its `stream`s, in threads; reads no weights.

    The prefill and the streams that follow find them, or wait for those that are not ready.

    Args:
      into: a compilation that takes these programs too, and that its owner closes.
      options: as of `list_run`.

    Raises:
      CapacityError: as `Engine.prefill`.
    """
    compilation = Compilation(engine.mesh) if into is None else into
    engine.check_lengths(lengths.contexts, lengths.reserved, lengths.capacity)
    with compilation.listing(last=into is None):
        for stage in list_run(engine.setup, engine.params, lengths, **options):
            if stage == "question":
                compilation.prefill_ends()
    return compilation


def _padded(setup: Setup, lengths: Sequence[int]) -> list[list[int]]:
    """Rows of these lengths, with empty ones to fill the mesh's data axis."""
    more = -len(lengths) % setup.mesh.shape["data"]
    return [[0] * length for length in (*lengths, *[0] * more)]
