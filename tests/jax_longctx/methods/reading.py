"""What the tests of CItruS's forms share: one run of ragged rows, watched, against numpy's rows."""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from jax_longctx.contract import Segment
from jax_longctx.engine import Engine
from jax_longctx.methods.citrus_individual import ThreadCaches
from jax_longctx.sharding import make_mesh
from tests.jax_longctx.methods.evicting import kept_tokens
from tests.jax_longctx.methods.harness import Run, Step, steps
from tests.jax_longctx.methods.oracles.citrus import Rule, read
from tests.oracle import causal_attend, forward, to_numpy
from tests.support import random_rows, tiny_config, tiny_engine

__all__ = [
    "ANSWERS",
    "CHUNK",
    "CONTEXTS",
    "KEPT",
    "QUESTIONS",
    "Seen",
    "compare",
    "engine_with",
    "equals_full_attention",
    "feed",
    "oracle_params",
    "run",
]

CHUNK, KEPT, RESERVE = 8, 16, 32
# Rows that evict, one as long as what is kept, one of a single chunk, an empty one.
CONTEXTS = random_rows([45, 16, 29, 5, 0, 25])
# One is longer than a chunk.
QUESTIONS = random_rows([3, 11, 7, 5, 2, 1], seed=1)
ANSWERS = random_rows([4] * 6, seed=2)


@functools.cache
def _base(layers: int, mesh: tuple[int, int, int]) -> Engine:
    return tiny_engine(mesh=make_mesh(*mesh), config=tiny_config(num_layers=layers))


def engine_with(method: Any, *, layers: int = 1, mesh: tuple[int, int, int] = (1, 1, 1)) -> Engine:
    """The method on a random model, which methods share: compilation is what these tests cost."""
    base = _base(layers, mesh)
    return Engine(base.config, base.params, method, base.mesh)


@dataclasses.dataclass(frozen=True)
class Seen:
    """A step on the host: the kept tokens by thread, layer, row and head; valid rows' logits."""

    role: str
    kept: list[list[list[list[tuple[int, ...]]]]]
    logits: list[np.ndarray]
    sums: list[np.ndarray | None]

    def row(self, index: int) -> list[list[list[tuple[int, ...]]]]:
        return [[layer[index] for layer in thread] for thread in self.kept]


def _threads(caches: Sequence[Any]) -> list[list[Any]]:
    if isinstance(caches[0], ThreadCaches):
        return [[c.language for c in caches], [c.task for c in caches]]
    return [list(caches)]


def _seen(step: Step) -> Seen:
    threads = _threads(step.caches)
    kept = [kept_tokens(thread) for thread in threads]
    logits = [block[:n] for block, n in zip(step.logits, step.valid, strict=True)]
    sums = [getattr(cache, "statistics", None) for cache in threads[-1]]
    sums = [None if each is None else np.asarray(each)[..., 0] for each in sums]
    return Seen(step.segment.role, kept, logits, sums)


def run(engine: Engine) -> list[Seen]:
    """The rows above with their questions and answers, step by step."""
    return [_seen(step) for step in steps(engine, CONTEXTS, QUESTIONS, ANSWERS, RESERVE)]


def oracle_params(engine: Engine) -> Any:
    return to_numpy(jax.device_get(engine.params))


def compare(seen: Sequence[Seen], engine: Engine, form: str, **options: Any) -> None:
    """Kept tokens of every thread, layer and head, and logits, against each row alone in numpy."""
    params = oracle_params(engine)
    rule = Rule(form=form, kept=KEPT, chunk=CHUNK, **options)
    evictions = 0
    for b, texts in enumerate(zip(CONTEXTS, QUESTIONS, ANSWERS, strict=True)):
        oracle = read(engine.config, params, *texts, rule)
        before: Any = [[[()] * 2] * engine.config.num_layers] * len(seen[0].kept)
        for step in seen:
            if not len(step.logits[b]):
                # The row's context has ended: nothing may change.
                assert step.row(b) == before
                continue
            logits, threads = next(oracle)
            np.testing.assert_allclose(step.logits[b], logits, atol=1e-4)
            before = [[[tuple(h) for h in c.token.T] for c in thread] for thread in threads]
            assert step.row(b) == before
            evictions += len(threads[0][0].token) <= threads[0][0].token.max(initial=0)
            if step.sums[0] is None or step.role not in ("probe_and_context", "probe"):
                continue
            for sums, cache in zip(step.sums, threads[-1], strict=True):
                assert sums is not None
                np.testing.assert_allclose(sums[b, :, : len(cache.mass)].T, cache.mass, atol=1e-5)
    assert evictions


def equals_full_attention(seen: Sequence[Seen], engine: Engine, row: int) -> None:
    """Context, question and answer of a row that has lost nothing, against full attention."""
    tokens = CONTEXTS[row] + QUESTIONS[row] + ANSWERS[row]
    attend = causal_attend(engine.config.rope.theta)
    expected = forward(engine.config, oracle_params(engine), tokens, attend)
    read_logits = [step.logits[row] for step in seen if step.role != "probe"]
    np.testing.assert_allclose(np.concatenate(read_logits), expected, atol=2e-5)


def feed(engine: Engine, segments: Iterable[Segment] | None = None) -> list[Seen]:
    """The contexts alone, in the method's segments or in others."""
    run = Run.of(engine, CONTEXTS, RESERVE)
    fed = run.read(CONTEXTS, QUESTIONS) if segments is None else run.feed(segments)
    return [_seen(step) for step in fed]
