"""The loop of a run over the processes of a job: one plans and writes, all compute."""

import contextlib
import functools
import itertools
import json
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

from jax_longctx.engine.distributed import from_leader, is_leader
from jax_longctx.files import write_whole
from jax_longctx.jobs.journal import Journal, Unwritten, begun
from jax_longctx.locks import only_writer
from jax_longctx.origin import check_result

# Format of the journals of `compute_pieces`.
PIECES = 1
ANEW = "remove it, or give --overwrite, to begin anew"


def work_through(work: Generator[Any, Any], compute: Callable[[Any], Any]) -> None:
    """Computes what `work` yields, one after the other, and sends it the results.

    Every process of a job calls it. The first alone runs the generator; what it yields, JSON values
    but not None, is sent to the others. `compute` runs in all of them.

    Raises:
      LongctxError: the generator raised it; every process does then.
    """
    result = None

    def following() -> Any:
        try:
            return work.send(result)
        except StopIteration:
            return None

    try:
        while (piece := from_leader(following)) is not None:
            result = compute(piece)
    finally:
        work.close()


def work_share(
    work: Generator[Any, Any],
    compute: Callable[[Any], Any],
    journal: Unwritten,
    number: int,
    of: int,
) -> Iterator[tuple[int, list[Any]]]:
    """Computes every `of`-th of what `work` yields, from `number` on; it gets None for the others.

    Yields what was added to the journal, with how many pieces `work` had yielded before.
    """
    found, left = None, True
    for count in itertools.count():
        try:
            piece = work.send(found)
        except StopIteration:
            left = False
        if taken := journal.taken():
            yield count, taken
        if not left:
            return
        found = compute(piece) if count % of == number else None


def compute_pieces(
    out: Path | None,
    given: Mapping[str, Any],
    count: int,
    compute: Callable[[int], Any],
    *,
    overwrite: bool = False,
    free: tuple[str, ...] = (),
) -> list[Any] | None:
    """What `compute` returns, JSON values, for each number below `count`.

    Until `finish_pieces` the results are kept in OUT.journal: an earlier run's with the same
    origin are not computed again. Every process of a job calls it; None in all but the first.

    Args:
      out: the file that is made of the results; without one nothing is kept.
      given: the origin of the results.
      overwrite: replace the file, or an interrupted run, of another origin.
      free: facts of the origin that may differ in the finished file.

    Raises:
      OriginError: `out`, or an interrupted run, has another origin.
    """
    found: dict[int, Any] = {}

    def work() -> Generator[int, Any]:
        with contextlib.ExitStack() as held:
            journal = None
            if out is not None:
                held.enter_context(only_writer(out))
                if out.is_file() and not overwrite:
                    check_result(out, given, free=free)
                path = journal_of(out)
                opened = functools.partial(Journal, path, PIECES, given, ANEW)
                journal = held.enter_context(begun(opened, [path], overwrite=overwrite))
                found.update((each["piece"], each["found"]) for each in journal.entries)
            for piece in range(count):
                if piece not in found:
                    found[piece] = yield piece
                    if journal is not None:
                        journal.add([{"piece": piece, "found": found[piece]}])

    work_through(work(), compute)
    return [found[piece] for piece in range(count)] if is_leader() else None


def finish_pieces(out: Path | None, result: Any) -> None:
    """Writes the file as JSON and drops what was kept for it; the first process calls it."""
    if out is not None:
        write_whole(json.dumps(result, indent=1), out)
        journal_of(out).unlink(missing_ok=True)


def journal_of(out: Path) -> Path:
    """The path of the journal of a file."""
    return out.with_name(f"{out.name}.journal")
