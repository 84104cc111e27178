"""Runs a method segment by segment, so that a test can look into the caches after each."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_longctx.contract import Segment, decode_segment, step_variant
from jax_longctx.engine import Engine, programs
from jax_longctx.engine.capacity import bucket

__all__ = ["Step", "last_logits", "steps"]


@dataclasses.dataclass(frozen=True)
class Step:
    """What one segment left behind.

    `caches`, one a layer, are valid until the next step is asked for. `logits` are `[B, T, V]` of
    the chunk rows, of which row b's first `valid[b]` count.
    """

    segment: Segment
    caches: tuple[Any, ...]
    logits: np.ndarray
    valid: np.ndarray


def steps(
    engine: Engine,
    contexts: Sequence[Sequence[int]],
    questions: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]] = (),
    reserve: int = 32,
) -> Iterator[Step]:
    """The contexts, the questions, then the answers' tokens one by one (as many for every row)."""
    setup = engine.setup
    slots = bucket(max(map(len, contexts)) + reserve + 1, engine.mesh.shape["seq"])
    total = jnp.array([len(row) for row in contexts], jnp.int32)
    caches = programs.init_caches(setup, len(contexts), slots, reserve)
    asked = questions if engine.method.info.needs_question else None

    def run(segment: Segment) -> Step:
        nonlocal caches
        caches, logits = programs.run_segment(
            setup, engine.params, caches, segment, total, None, "all"
        )
        return Step(segment, programs.per_layer(caches), np.asarray(logits), segment.chunk_lengths)

    prompt = engine.prompt("context", slots, context=contexts, question=asked)
    for segment in engine.method.segments(prompt):
        yield run(segment)
    caches = programs.finish_context(setup, caches, total, reserve)
    for segment in engine.method.segments(engine.prompt("question", slots, question=questions)):
        yield run(segment)
    if engine.method.info.answers_apart:
        caches = programs.finish_question(setup, caches, total, reserve=reserve)
    ones = np.ones((len(contexts), 1), np.int32)
    done = np.zeros(len(contexts), bool)
    for step, column in enumerate(zip(*answers, strict=True), start=1):
        tokens = np.array(column, np.int32)[:, None]
        yield run(decode_segment(tokens, ones, done, step_variant(engine.method, step)))


def last_logits(step: Step) -> np.ndarray:
    """`[B, V]`: each row's logits at its last valid token of the step."""
    at = np.maximum(step.valid - 1, 0)
    return step.logits[np.arange(len(at)), at]
