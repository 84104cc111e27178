"""Runs a method segment by segment, so that a test can look into the caches after each.

Rows are contexts, questions and answers. An answer's tokens are fed one by one, as many for every
row.
"""

import copy
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_longctx.contract import Segment, decode_segment
from jax_longctx.engine import Context, Engine
from jax_longctx.engine.allocate import init_caches
from jax_longctx.engine.capacity import bucket
from jax_longctx.engine.context_io import load_context, save_context
from jax_longctx.engine.prefill import finish_context, finish_question, run_segment
from jax_longctx.engine.runs import per_layer
from tests.oracle import causal_attend, forward, to_numpy
from tests.support import logits_of, random_rows

# Methods that differ from another one in what they rank by alone.
ALIKE = {"arkvale", "citrus-standard", "ideal-topk", "roco", "streaming-llm", "tova"}


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


@dataclasses.dataclass
class FedRows:
    """Rows that are fed segment by segment to one method, and their caches so far."""

    engine: Engine
    slots: int
    reserve: int
    total: jax.Array
    caches: tuple[Any, ...]

    @classmethod
    def of(cls, engine, contexts, reserve=32, slots=0):
        slots = slots or bucket(max(map(len, contexts)) + reserve + 1, engine.mesh.shape["seq"])
        total = jnp.array([len(row) for row in contexts], jnp.int32)
        caches = init_caches(engine.setup, len(contexts), slots, reserve)
        return cls(engine, slots, reserve, total, caches)

    def feed(self, segments):
        for segment in segments:
            given = self.engine.setup, self.engine.params, self.caches, segment, self.total
            self.caches, hidden = run_segment(*given, None, "hidden")
            logits = logits_of(self.engine, hidden)
            yield Step(segment, per_layer(self.caches), logits, segment.chunk_lengths)

    def read(self, contexts, questions=None):
        """The contexts, beside their questions where the method needs them."""
        asked = questions if self.engine.method.info.needs_question else None
        given = {"question": asked, "asks": self.engine.asks}
        prompt = self.engine.setup.feed("context", self.slots, context=contexts, **given)
        steps = self.feed(self.engine.method.segments(prompt))
        # A text's probes are no tokens of it.
        yield from (step for step in steps if step.segment.role != "probe")
        self.caches = finish_context(self.engine.setup, self.caches, self.total, self.reserve)

    def answer(self, questions, answers):
        method = self.engine.method
        prompt = self.engine.setup.feed("question", self.slots, question=questions)
        yield from self.feed(method.segments(prompt))
        if method.info.answers_apart:
            self.caches = finish_question(
                self.engine.setup, self.caches, self.total, reserve=self.reserve
            )
        yield from self.tokens(answers)

    def tokens(self, answers):
        ones, done = np.ones((len(answers), 1), np.int32), np.zeros(len(answers), bool)
        for step, column in enumerate(zip(*answers, strict=True), start=1):
            tokens, variant = (
                np.array(column, np.int32)[:, None],
                self.engine.method.step_variant(step),
            )
            yield from self.feed([decode_segment(tokens, ones, done, variant)])


def under(engine, method):
    other = copy.copy(engine)
    other.method, other.setup = method, dataclasses.replace(engine.setup, method=method)
    return other


def steps(engine, contexts, questions, answers=(), reserve=32):
    run = FedRows.of(engine, contexts, reserve)
    yield from run.read(contexts, questions)
    yield from run.answer(questions, answers)


def prefill(engine, contexts, questions=None):
    """A context made by the programs of `steps`, so that none are compiled for it."""
    run = FedRows.of(engine, contexts)
    for _ in run.read(contexts, questions):
        pass
    return Context(contexts, len(contexts), run.slots, run.reserve, run.total, run.caches)


def ask(engine, context, questions, answers):
    """Each row's last logits, after every segment of the question and token of the answer.

    A context that only grows lends its buffers, as it does to `Engine.stream`.
    """
    with engine.asked(context, keep=True) as live:
        run = FedRows(engine, context.slots, context.reserve, context.total, live.caches)
        logits = [last_logits(step) for step in run.answer(questions, answers)]
        live.caches = run.caches
    return logits


def ask_twice(engine, folder, rows, others):
    """A question is answered alike after `others`, and from a context saved and loaded."""
    contexts, *asked = rows
    context = prefill(engine, contexts, asked[0])
    save_context(engine, context, folder / "context")
    first, between = ask(engine, context, *asked), ask(engine, context, *others)
    assert not np.allclose(first[-1], between[-1])
    loaded = load_context(engine, folder / "context")
    for again in (context, loaded):
        for before, after in zip(first, ask(engine, again, *asked), strict=True):
            np.testing.assert_array_equal(before, after)
    return loaded


def last_logits(step):
    """`[B, V]`: each row's logits at its last valid token of the step."""
    at = np.maximum(step.valid - 1, 0)
    return step.logits[np.arange(len(at)), at]


def texts(lengths, answer, seed=0):
    """Random rows; `lengths` are pairs of a context's and a question's."""
    sizes = *zip(*lengths, strict=True), [answer] * len(lengths)
    return tuple(random_rows(list(each), seed=seed + n) for n, each in enumerate(sizes))


def whole_rows(rows):
    return [[token for part in parts for token in part] for parts in zip(*rows, strict=True)]


def row_logits(engine, rows, each=None, reserve=32):
    """Every row's logits `[tokens, V]`, in order; `each(step)` looks at each step."""
    pieces: list[list[np.ndarray]] = [[] for _ in rows[0]]
    for step in steps(engine, *rows, reserve=reserve):
        for piece, logits, valid in zip(pieces, step.logits, step.valid, strict=True):
            piece.append(logits[:valid])
        if each is not None:
            each(step)
    return [np.concatenate(piece) for piece in pieces]


def with_caches(engine, rows):
    """Every row's logits, and the layers' caches after the question's first segment."""
    held = []

    def look(step):
        if step.segment.role == "query" and not held:
            held.extend(jax.device_get(step.caches))

    return row_logits(engine, rows, look), held


def answer_logits(engine, rows, before=0, reserve=32):
    """Logits `[B, A, V]` of the answers' tokens, and of so many `before` them."""
    size = len(rows[2][0]) + before
    return np.stack([logits[-size:] for logits in row_logits(engine, rows, reserve=reserve)])


def oracle_params(engine):
    return to_numpy(jax.device_get(engine.params))


def full_logits(engine, rows):
    """Every row's logits `[tokens, V]` under full attention, by numpy."""
    params, attend = oracle_params(engine), causal_attend(engine.config.rope.theta)
    return [forward(engine.config, params, row, attend) for row in whole_rows(rows)]


def check_rows(got, expected, atol=1e-4):
    for mine, theirs in zip(got, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=atol)


def traces(oracle, engine, rules, rows, **options):
    """The account that an oracle's module gives of each row."""
    params, whole = oracle_params(engine), whole_rows(rows)
    calls = [oracle.calls_of(rules, *map(len, parts)) for parts in zip(*rows, strict=True)]
    return [
        oracle.follow(rules, engine.config, params, *row, **options)
        for row in zip(whole, calls, strict=True)
    ]
