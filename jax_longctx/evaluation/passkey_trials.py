"""Trials through one engine, in batches of one shape, so that each program is compiled once."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax_longctx.engine import Engine
from jax_longctx.evaluation.passkey import STEM, Trial, is_right
from jax_longctx.text import Tokenizer

__all__ = ["run_trials"]

ANSWER_TOKENS = 10


def run_trials(
    engine: Engine,
    tokenizer: Tokenizer,
    trials: Sequence[Trial],
    *,
    batch: int,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[list[dict[str, Any]]]:
    """One record a trial, batch by batch: its length, depth, key, answer, and whether it is right.

    Rows of one length share a batch; a batch that is not full is filled up with its last trial.
    """
    stem = tokenizer.encode(STEM)
    longest = max(trial.length for trial in trials)
    reserve = len(stem) + ANSWER_TOKENS
    done = 0
    for group in _batches(trials, batch):
        padded = [*group, *([group[-1]] * (batch - len(group)))]
        rows = [tokenizer.encode(trial.text, bos=True) for trial in padded]
        begun = time.perf_counter()
        context = engine.prefill(
            rows, reserve=reserve, questions=[stem] * batch, capacity=longest + reserve + 1
        )
        answers: list[list[int]] = [[] for _ in rows]
        for block in engine.stream(context, [stem] * batch, max_tokens=ANSWER_TOKENS, keep=False):
            for answer, new in zip(answers, block, strict=True):
                answer.extend(new)
        seconds = time.perf_counter() - begun
        found = []
        for trial, row, answer in zip(group, rows, answers, strict=False):
            text = tokenizer.decode(answer)
            record = {
                "length": trial.length,
                "depth": trial.depth,
                "tokens": len(row) + len(stem),
                "key": trial.key,
                "answer": text,
                "right": is_right(text, trial.key),
                "batch_seconds": round(seconds, 3),
            }
            found.append(record)
        yield found
        done += len(group)
        if progress is not None:
            progress(done, len(trials))


def _batches(trials: Sequence[Trial], batch: int) -> Iterator[Sequence[Trial]]:
    start = 0
    while start < len(trials):
        stop = start
        while (
            stop < len(trials)
            and stop - start < batch
            and trials[stop].length == trials[start].length
        ):
            stop += 1
        yield trials[start:stop]
        start = stop
