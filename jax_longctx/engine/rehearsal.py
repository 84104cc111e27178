"""The programs of a prefill and an answer, compiled ahead from their lengths alone."""

import contextlib
import dataclasses
from collections.abc import Sequence

from jax_longctx.contract import Method, step_variant
from jax_longctx.engine.ahead import Compilation
from jax_longctx.engine.engine import BLOCK, FIRST_BLOCKS, Engine
from jax_longctx.settings import Sampling


@dataclasses.dataclass(frozen=True)
class Lengths:
    """How long texts, questions and answers are, in tokens.

    Attributes:
      contexts: of each row.
      asked: pairs of a question, of every row, and its answer, one after another over contexts of
        this size.
      reserve: of `Engine.prefill`; the longest question and its answer unless given.
      total, capacity: as in `Engine.prefill`.
    """

    contexts: Sequence[int]
    asked: Sequence[tuple[int, int]]
    reserve: int | None = None
    total: Sequence[int] | None = None
    capacity: int = 0


def compile_ahead(
    engine: Engine,
    lengths: Lengths,
    *,
    sampling: Sampling | None = None,
    stop_ids: Sequence[int] = (),
    keep: bool = True,
    into: Compilation | None = None,
) -> Compilation:
    """Compiles the programs of a `prefill` and its `stream`s, in threads; reads no weights.

    The prefill and the streams that follow find them, or wait for those that are not ready.

    Args:
      sampling, stop_ids, keep: as in `Engine.stream`.
      into: a compilation that takes these programs too, and that its owner closes.

    Raises:
      InputError, CapacityError: as `Engine.prefill` and `Engine.stream`.
    """
    rows = [[0] * length for length in lengths.contexts]
    compilation = Compilation(engine.mesh) if into is None else into
    reserve = max(map(sum, lengths.asked)) if lengths.reserve is None else lengths.reserve
    with compilation.rehearsing(last=into is None):
        for number, (question, answer) in enumerate(lengths.asked):
            asked = [[0] * question for _ in rows]
            context = engine.prefill(
                rows,
                reserve=reserve,
                questions=asked,
                total=lengths.total,
                capacity=lengths.capacity,
            )
            if not number:
                compilation.prefill_ends()
            stream = engine.stream(
                context, asked, sampling=sampling, max_tokens=answer, stop_ids=stop_ids, keep=keep
            )
            with contextlib.closing(stream):
                for _ in range(blocks_of_all(engine.method, answer)):
                    next(stream)
            # Before the next one's caches.
            del context, stream
    return compilation


def blocks_of_all(method: Method, max_tokens: int) -> int:
    """How many blocks an answer yields until it has taken a step of every variant twice."""
    steps: dict[str, list[int]] = {}
    for step in range(1, max_tokens):
        steps.setdefault(step_variant(method, step), []).append(step)
    last = max((found[:2][-1] for found in steps.values()), default=0)
    # The first token is the question's.
    count, ahead = 1, iter(FIRST_BLOCKS)
    while last > 0:
        last -= next(ahead, BLOCK)
        count += 1
    return count
