"""Many answers over one long context: a step's time, and decoding beside another text's prefill.

Random weights of a published shape. The rows run in a `RunningBatch`, as in the server.
Under methods that can, they share the context's keys and values; under others each has its own.
Beside them stands one row alone: `Engine.stream` over the same context. A row's first token comes
when it has joined; the prefill of its question, a part of that, is timed alone too.

Then another text is prefilled between decode blocks, at the server's pace (`serving.pace`).
The gap of a row is the time between two deliveries of tokens to it; a block's tokens come together.
Its prefill is compared with prefill alone. A row whose answer is full joins anew. Its next gap
does not count, the other rows' do.

The limit of a step is as in `bench decode` for one row: weights, and what one row reads. Tails of
the rows, and pages that only some of them choose, come on top.
"""

import dataclasses
import itertools
import operator
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jax_longctx.bench.asked import Serve
from jax_longctx.bench.steps import QUESTION, check_mesh, one_row
from jax_longctx.bench.timing import TOO_MUCH, Shape, call_times, copy_bandwidth
from jax_longctx.engine import Context, Engine
from jax_longctx.engine.capacity import footprint
from jax_longctx.engine.engine import BLOCK, FIRST_BLOCKS
from jax_longctx.engine.places import cannot_share
from jax_longctx.engine.prefill import prefill_question
from jax_longctx.engine.running import Ask, RunningBatch
from jax_longctx.errors import ConfigError, InputError
from jax_longctx.methods import make_method
from jax_longctx.planning.work import decode_work
from jax_longctx.run_spec import RunSpec
from jax_longctx.serving.pace import READ_SECONDS, Pace
from jax_longctx.settings import Sampling

# Tokens of an answer beside another text's prefill.
ANSWER = 2048
# Blocks of the rows before those that are timed: the first compiles.
WARM_BLOCKS = 2
# Times that one question is prefilled.
ASKED = 5


def run(
    asked: Serve, spec: RunSpec, say: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Every method; JSON-able. One that refuses the model or the memory is recorded as failed."""
    check_mesh(spec.devices())
    shape = Shape.make(asked.model, spec, say)
    context, rows, question = asked.context, asked.rows, asked.question
    read = context if asked.read is None else asked.read
    bandwidth = copy_bandwidth()
    say(f"copy {bandwidth / 1e12:.2f} TB/s")
    found = []
    for name, settings in asked.named():
        say(f"{name}: {rows} rows over {context:,} tokens ...")
        row: dict[str, Any] = {"method": name, "settings": settings, "context": context}
        row |= {"batch": rows, "question": question}
        method = make_method(name, settings)
        try:
            measured = _Measured(shape.engine(method), asked, say)
            row |= measured.steps()
            sizes: dict[str, Any] = dict(batch=1, context=context, reserve=1)
            setup = shape.setup(method)
            held = footprint(setup, **sizes)
            moved = decode_work(setup, batch=1, context=context, read=held.read).read
            limit = moved / bandwidth
            row |= {"bytes": moved, "limit_seconds": limit, "share": limit / row["seconds"]}
            if read:
                row |= measured.beside(read)
        except (ConfigError, *TOO_MUCH) as error:
            row["failed"] = str(error).splitlines()[0]
            say(f"  {row['failed']}")
        found.append(row)
    facts = {**shape.facts(), "read": read, "random_cache": asked.random_cache}
    return {"model": asked.model, **facts, "copy_bandwidth": bandwidth, "rows": found}


@dataclasses.dataclass
class _Measured:
    """One method's figures."""

    engine: Engine
    asked: Serve
    say: Callable[[str], None]

    def __post_init__(self) -> None:
        rows, question = self.asked.rows, self.asked.question
        draw, size = np.random.default_rng(rows), (rows, question)
        self._questions = draw.integers(0, self.engine.config.vocab_size, size).tolist()
        self._numbers = itertools.count()
        self._joins: list[float] = []
        self._answer = max(ANSWER, 1 + BLOCK * (WARM_BLOCKS + self.asked.blocks))
        self._context: Context
        self._batch: RunningBatch

    def steps(self) -> dict[str, Any]:
        """Seconds a step of one row alone, and of all rows together."""
        engine, asked, rows = self.engine, self.asked, self.asked.rows
        tokens = 1 + sum(FIRST_BLOCKS) + BLOCK * (1 + asked.blocks)
        reserve = max(tokens, asked.question)
        context = self._context = one_row(engine, asked.context, reserve, asked.random_cache)
        if context.questions is not None:
            raise InputError("this method reads a text for one question; rows cannot share it")
        how: dict[str, Any] = {"max_tokens": tokens, "sampling": Sampling(temperature=1.0, seed=0)}
        stream = engine.stream(context, [list(QUESTION)], keep=True, **how)
        ends = [time.perf_counter() for block in stream if len(block[0]) == engine.block]
        # The first whole block compiles.
        alone = statistics.median(map(operator.sub, ends[1:], ends)) / engine.block
        self.say(f"  one row alone {alone * 1e3:.2f} ms a step")
        why = cannot_share(engine)
        given: dict[str, Any] = {"reserve": asked.question + self._answer}
        given |= {"slots": context.slots} if why else {"context": context}
        self._batch = RunningBatch(engine, places=rows, **given)
        self._fill()
        self._step(BLOCK)
        # `call_times` begins with the second warm block.
        seconds = statistics.median(call_times(lambda: self._step(BLOCK), asked.blocks)) / BLOCK
        self.say(f"  {rows} rows {seconds * 1e3:.2f} ms a step")
        return {
            "shared": why is None,
            "alone_seconds": alone,
            "alone_tokens_per_second": 1 / alone,
            "seconds": seconds,
            "tokens_per_second": rows / seconds,
            "speedup": rows * alone / seconds,
            # The first join compiles.
            "first_token": statistics.median(self._joins[1:] or self._joins),
            "question_seconds": self._question_seconds(),
            "row_bytes": self._batch.resident_bytes // rows,
        }

    def beside(self, read: int) -> dict[str, Any]:
        """Gaps between tokens during a text's prefill; prefill's speed beside them and alone."""
        # The first reading compiles.
        alone = [self._read(read, beside=False)[0] for _ in range(2)][1]
        self.say(f"  reading alone {read / alone:,.0f} tokens/s")
        seconds, gaps = self._read(read, beside=True)
        middle, most = (float(np.percentile(gaps, part)) for part in (50, 99))
        self.say(f"  beside {read / seconds:,.0f} tokens/s, p99 between tokens {most * 1e3:.0f} ms")
        return {
            "read_alone": read / alone,
            "read_beside": read / seconds,
            "read_share": alone / seconds,
            "gap_p50": middle,
            "gap_p99": most,
            "gap_most": max(gaps),
            "gaps": len(gaps),
        }

    def _fill(self) -> None:
        """Lets rows join until all places are taken."""
        while self._batch.free:
            number = next(self._numbers)
            ask = Ask(
                self._questions[number % self.asked.rows],
                Sampling(temperature=1.0, seed=number),
                self._answer,
            )
            begun = time.perf_counter()
            self._batch.join(self._context, ask)
            self._joins.append(time.perf_counter() - begun)

    def _question_seconds(self) -> float:
        """Median seconds to prefill a row's question over the context: a part of `first_token`."""
        engine, context = self.engine, self._context
        rows = [[] for _ in context.rows]
        rows[0] = self._questions[0]
        times = []
        for _ in range(ASKED):
            with engine.asked(context, keep=True) as live:
                jax.block_until_ready(live.caches)
                begun = time.perf_counter()
                given = engine.setup, engine.params, live, rows, context.total
                jax.block_until_ready(prefill_question(*given))
                times.append(time.perf_counter() - begun)
        return statistics.median(times)

    def _step(self, most: int) -> dict[int, int]:
        """Decodes a block; how many tokens each place got.

        Raises:
          InputError: logits were not finite.
        """
        found = self._batch.step(most)
        if "not finite" in self._batch.ended.values():
            raise InputError("logits are not finite: this time is not one of a real step")
        return {place: len(tokens) for place, tokens in found.items()}

    def _read(self, tokens: int, *, beside: bool) -> tuple[float, list[float]]:
        """Seconds to prefill a text, and the gaps of the rows that decode meanwhile."""
        engine, pace = self.engine, Pace()
        draw = np.random.default_rng(tokens).integers(0, engine.config.vocab_size, tokens)
        prefilling = engine.prefilling(
            [draw.tolist()], reserve=self._batch.reserve, ahead=lambda: not beside
        )
        begun = time.perf_counter()
        told = dict.fromkeys(self._batch.running, begun)
        gaps: list[float] = []
        turn = begun
        for _ in prefilling:
            now = time.perf_counter()
            if not beside or now - turn < READ_SECONDS:
                continue
            counts = self._step(pace.steps(now - turn))
            ended = time.perf_counter()
            pace.took(ended - now, max(counts.values(), default=0))
            for place in [place for place, count in counts.items() if count]:
                if place in told:
                    gaps.append(ended - told[place])
                told[place] = ended
            for place in self._batch.ended:
                told.pop(place, None)
            self._fill()
            turn = time.perf_counter()
        seconds = time.perf_counter() - begun
        if beside and not gaps:
            raise InputError(
                f"a text of {tokens:,} tokens is read within {READ_SECONDS:g} s: no row decoded "
                f"meanwhile; give a longer one with --read"
            )
        return seconds, gaps
