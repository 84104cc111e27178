"""Jobs of similar length put together, in a few shapes, always the same way.

A window of the input is sorted by length, longest first, and cut into batches. The number of cache
slots is rounded up to a quarter of an octave and the number of rows to a power of two, so that few
programs are compiled. The same window, options and memory limit give the same batches: a run that
was killed computes those that are left as it would have done.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence

from jax_longctx.batch.rows import Job
from jax_longctx.engine.capacity import bucket

__all__ = ["Batch", "pack"]

SMALLEST = 256


@dataclasses.dataclass(frozen=True)
class Batch:
    """Jobs that are computed together.

    Attributes:
      rows: of the programs, at least as many as there are jobs.
      slots: least capacity of the cache in tokens.
      reserve: slots for question and answer.
    """

    jobs: tuple[Job, ...]
    rows: int
    slots: int
    reserve: int


def pack(
    jobs: Iterable[Job], rows: int, max_tokens: int, fits: Callable[[int, int], int]
) -> list[Batch]:
    """The batches of a window.

    Args:
      rows: most rows of a batch.
      max_tokens: of an answer.
      fits: rows that fit in memory, of (context tokens, reserve).
    """
    ordered = sorted(jobs, key=lambda job: (-job.length, -len(job.questions), job.row, job.first))
    batches: list[Batch] = []
    group: list[Job] = []
    limit = rows
    for job in ordered:
        if group and (len(group) == limit or 2 * job.length < group[0].length):
            batches.append(_batch(group, limit, max_tokens))
            group = []
        if not group:
            alone = _batch([job], 1, max_tokens)
            fitting = fits(alone.slots - alone.reserve, alone.reserve)
            limit = rows if fitting >= rows else 2 ** math.floor(math.log2(max(fitting, 1)))
        group.append(job)
    if group:
        batches.append(_batch(group, limit, max_tokens))
    return batches


def _batch(jobs: Sequence[Job], limit: int, max_tokens: int) -> Batch:
    longest = max(len(question) for job in jobs for question in job.questions)
    reserve = bucket(longest + max_tokens)
    slots = _rounded(max(len(job.context) for job in jobs) + reserve + 1)
    rows = min(limit, 2 ** math.ceil(math.log2(len(jobs))))
    return Batch(tuple(jobs), rows, slots, reserve)


def _rounded(tokens: int) -> int:
    """Up to the next of 4, 5, 6, 7 times a power of two."""
    octave = 2 ** math.floor(math.log2(max(tokens, SMALLEST)))
    return -(-max(tokens, SMALLEST) // (octave // 4)) * (octave // 4)
