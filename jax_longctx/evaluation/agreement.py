"""Agreement of a method with full attention on the same tokens: predictions and attention weights.

Both read the same text and are fed the same last tokens (P1 of `evaluation.perplexity`). For every
scored token: KL(full || method) of the two next-token distributions, in nats, and whether their
most likely tokens are the same.

Attention is measured for the newest queries, in every layer and query head. Let p be full
attention's weights and A the tokens that the method gives any weight. The measures are the mass
of p on A; the share of the k largest p that are in A; the size of A; and the entropy -sum w ln w of
the method's own weights w, at most ln |A|. Each method has its own queries: an error in one layer
shows in the next.

The weights are measured from outside the method. Attention is linear in the values, and methods
with `by_values` unset do not select by them. So each layer attends twice: with its own values, and
with marks for values, in a second cache that is treated alike. A mark is a unit vector of the
head's H dimensions: with tokens j0 to j0 + H - 1 marked and no others, dimension h of the output is
the weight of token j0 + h, whatever was evicted, paged or selected in between. The second cache has
several copies of the text, each of which marks another run of H tokens; ceil(S / H) copies give all
weights. The model reads the text once a pass, whatever the number of copies. A pass costs what the
method costs, a cache for each copy, and the copies' attention in question and answer. While a text
is read, nothing looks at the copies' outputs, and XLA leaves out what they alone need.

`eval agreement --out` writes a JSON record for each run: `method` and `given` settings; `kl` and
`same`, means by text; `attention`, for each text `mass`, `recall`, `attended` and `entropy` by
layer, or None; and `length`, `score`, `queries` and `top`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jax_longctx.contract import (
    CHUNK_ROWS,
    QKV,
    Attended,
    CacheShape,
    LayerContext,
    Segment,
    Stage,
    decode_segment,
)
from jax_longctx.engine import Engine
from jax_longctx.engine.allocate import init_caches
from jax_longctx.engine.capacity import bucket
from jax_longctx.engine.distributed import to_host
from jax_longctx.engine.prefill import finish_context, finish_question, run_segment
from jax_longctx.engine.scoring import by_columns, forced_states
from jax_longctx.engine.setup import Ends, without_layers
from jax_longctx.errors import InputError
from jax_longctx.evaluation.intervals import bootstrap
from jax_longctx.evaluation.perplexity import batches, label, pipe_table, shown_interval
from jax_longctx.models.llama import ends_of
from jax_longctx.parts.around import Around
from jax_longctx.run_spec import ON_DEVICES
from jax_longctx.sharding import Stacked, axes_field, logical_sharding


def scored_states(
    engine: Engine, texts: Int[np.ndarray, "n T"], *, score: int, batch: int = 1
) -> Float[np.ndarray, "n S D"]:
    """Final hidden states that predict the last `score` tokens of each text, decoded one by one.

    The token before these is the question. `batch` texts are computed together.

    Raises:
      InputError: the texts are too short.
    """
    count, length = texts.shape
    if not (count and batch >= 1 and score >= 1 and score + 1 < length):
        raise InputError(
            f"{count} texts of {length} tokens do not hold {score} to score behind a question of "
            f"one and some text; ask for fewer, at least one of each"
        )
    found = []
    prompt = length - score
    for _, used, padded in batches(texts, batch):
        states = forced_states(
            engine,
            padded[:, : prompt - 1].tolist(),
            padded[:, prompt:].tolist(),
            questions=padded[:, prompt - 1 : prompt].tolist(),
        )
        pieces: list[list[np.ndarray]] = [[] for _ in range(used)]
        for piece in states:
            hidden = np.asarray(piece.hidden.astype(jnp.float32))
            for b, row in enumerate(pieces):
                row.append(hidden[b, piece.targets[b] >= 0])
        found += [np.concatenate(row) for row in pieces]
    return np.stack(found)


@functools.partial(jax.jit, static_argnums=0)
def _compare(
    ends: Ends, params: Any, full: Float[Array, "B T D"], other: Float[Array, "B T D"]
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
    model = ends_of(ends.config, params)

    def compare(full_BXD: Array, other_BXD: Array) -> tuple[Array, Array]:
        p_BXV, q_BXV = (
            jax.nn.log_softmax(model.logits(hidden.astype(ends.dtype)), axis=-1)
            for hidden in (full_BXD, other_BXD)
        )
        kl_BX = jnp.sum(jnp.exp(p_BXV) * (p_BXV - q_BXV), axis=-1)
        return kl_BX, jnp.argmax(p_BXV, axis=-1) == jnp.argmax(q_BXV, axis=-1)

    return by_columns(ends, compare, full, other)


def divergences(
    engine: Engine, full: Float[np.ndarray, "n S D"], other: Float[np.ndarray, "n S D"]
) -> tuple[Float[np.ndarray, "n S"], Bool[np.ndarray, "n S"]]:
    """KL(full || other) in nats of the next-token distributions; whether their best tokens agree.

    `engine` has the model of both.
    """
    params = without_layers(engine.params)
    pairs = [
        _compare(engine.setup.ends, params, one[None], two[None])
        for one, two in zip(full, other, strict=True)
    ]
    kl, same = (np.concatenate([np.asarray(pair[i]) for pair in pairs]) for i in range(2))
    return kl, same


def top_tokens(weights: Float[np.ndarray, "*R S"], count: int) -> Bool[np.ndarray, "*R S"]:
    """Marks the `count` largest weights of each row; of equal weights the earliest."""
    order = np.argsort(-weights, axis=-1, kind="stable")[..., :count]
    chosen = np.zeros(weights.shape, bool)
    np.put_along_axis(chosen, order, True, axis=-1)
    return chosen


def recall(
    wanted: Bool[np.ndarray, "*R S"], attended: Bool[np.ndarray, "*R S"]
) -> Float[np.ndarray, "*R"]:
    """Share of the wanted tokens that are attended, row by row; a row wants at least one."""
    return np.sum(wanted & attended, axis=-1) / np.sum(wanted, axis=-1)


def attention_measures(
    full: Float[np.ndarray, "L N Q S"], other: Float[np.ndarray, "L N Q S"], *, top: int
) -> dict[str, list[float]]:
    """Means over heads and queries, by layer: `mass`, `recall`, `attended`, `entropy`.

    Args:
      full: full attention's weights on the same text.
      top: k of the recall.
    """
    attended = other > 0
    total = np.sum(other, axis=-1, keepdims=True)
    share = other / np.where(total > 0, total, 1)
    logs = np.log(np.where(attended, share, 1))
    # Before the k-th token there are fewer than k.
    wanted = top_tokens(full, top) & (full > 0)
    measures = {
        "mass": np.sum(full * attended, axis=-1) / np.sum(full, axis=-1),
        "recall": recall(wanted, attended),
        "attended": np.sum(attended, axis=-1),
        "entropy": -np.sum(share * logs, axis=-1),
    }
    return {
        name: np.mean(values, axis=(1, 2), dtype=np.float64).tolist()
        for name, values in measures.items()
    }


def compare(
    full: Engine,
    engines: Sequence[Engine],
    texts: Int[np.ndarray, "n T"],
    *,
    score: int,
    queries: int,
    top: int,
    attention: bool = True,
    batch: int = 8,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[dict[str, Any]]:
    """Of each engine `kl` and `same`, means by text, and `attention`, `attention_measures` by text.

    `attention` is None where it is not wanted, and for an engine whose weights cannot be measured.

    Args:
      full: an engine of full attention.
      batch: rows that are computed together.
      progress: called with (texts read, texts in all); a text counts once for each engine.
    """
    exact = scored_states(full, texts, score=score, batch=batch)
    found: list[dict[str, Any]] = []
    for engine in engines:
        kl, same = divergences(full, exact, scored_states(engine, texts, score=score, batch=batch))
        means = {"kl": kl.mean(1, dtype="float64").tolist(), "same": same.mean(1).tolist()}
        found.append({**means, "attention": [] if attention and shows_weights(engine) else None})
    shown = [each for each in zip(engines, found, strict=True) if each[1]["attention"] is not None]
    done, total = 0, len(texts) * (1 + len(shown))
    how: dict[str, Any] = {"queries": queries, "score": score, "batch": batch}
    for text in texts.tolist() if shown else ():
        weights = attention_weights(full, text, **how)
        progress(done := done + 1, total)
        for engine, own in shown:
            other = attention_weights(engine, text, **how)
            own["attention"].append(attention_measures(weights, other, top=top))
            progress(done := done + 1, total)
    return found


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Marked:
    """A layer's two caches: of B rows, and of X = B x copies.

    Attributes:
      own: the method's own cache.
      marks: one that holds marks in place of values. A row's copies follow each other.
      position: tokens of text that each row has read.
      first: position of the first of each copy's H marked tokens.
      seen: attention outputs of the newest queries over the marks, the newest last.
    """

    own: Any
    marks: Any
    position: Int[Array, " B"] = axes_field("batch")
    first: Int[Array, " X"] = axes_field("batch")
    seen: Float[Array, "X N Q H"] = axes_field("batch", "heads", None, None)


@dataclasses.dataclass(frozen=True)
class _Marking(Around):
    """A method that also attends to marks, in `copies`; `queries` of their outputs are kept."""

    queries: int
    copies: int

    def init_cache(self, shape: CacheShape) -> _Marked:
        many = dataclasses.replace(shape, batch=shape.batch * self.copies)
        position, first = (jnp.zeros(each.batch, jnp.int32) for each in (shape, many))
        seen = jnp.zeros((many.batch, shape.num_heads, self.queries, shape.head_dim), jnp.float32)
        own, marks = (self.method.init_cache(each) for each in (shape, many))
        return _Marked(own, marks, position, first, seen)

    def _copied(self, tree: Any) -> Any:
        """Arrays of rows as those of their copies."""
        return jax.tree.map(lambda x: jnp.repeat(x, self.copies, axis=0), tree)

    def attend(
        self, new: QKV, cache: _Marked, segment: Segment, ctx: LayerContext
    ) -> tuple[Attended, _Marked]:
        part, own = self.method.attend(new, cache.own, segment, ctx)
        q, k, start_X, segment, total_X = self._copied(
            (*new[:2], cache.position, segment, ctx.total)
        )
        ctx = dataclasses.replace(ctx, total=total_X)
        group = segment.group(CHUNK_ROWS)
        # Probes look at the text without joining it: their tokens have no position in it.
        valid_X = jnp.where(segment.role == "probe", 0, segment.valid_of(CHUNK_ROWS))
        column_T = jnp.arange(k.shape[1]) - group.start
        in_text_XT = (column_T >= 0) & (column_T < valid_X[:, None])
        which_XT = jnp.where(in_text_XT, (start_X - cache.first)[:, None] + column_T, -1)
        marks_XTH = jax.nn.one_hot(which_XT, k.shape[-1], dtype=k.dtype)
        values = jnp.broadcast_to(marks_XTH[:, :, None], k.shape)
        (made, _), marks = self.method.attend((q, k, values), cache.marks, segment, ctx)
        seen = cache.seen
        if segment.role in ("query", "decode"):
            last_X111 = (group.start + jnp.maximum(valid_X - 1, 0))[:, None, None, None]
            newest = jnp.swapaxes(jnp.take_along_axis(made, last_X111, axis=1), 1, 2)
            moved = jnp.concatenate([seen[:, :, 1:], newest.astype(seen.dtype)], axis=2)
            seen = jnp.where((valid_X > 0)[:, None, None, None], moved, seen)
        position_B = cache.position + valid_X[:: self.copies]
        return part, _Marked(own, marks, position_B, cache.first, seen)

    def finish(self, cache: _Marked, ctx: LayerContext, stage: Stage, reserve: int) -> _Marked:
        own = self.method.finish(cache.own, ctx, stage, reserve)
        ctx = dataclasses.replace(ctx, total=self._copied(ctx.total))
        marks = self.method.finish(cache.marks, ctx, stage, reserve)
        return dataclasses.replace(cache, own=own, marks=marks)


def shows_weights(engine: Engine) -> bool:
    """Whether marks can measure the method's weights: it reads in order and ignores the values.

    It does so in every layer, so none has a sliding window.
    """
    if engine.method.info.by_values or any(engine.config.windows):
        return False
    rows = [[0] * 2] * engine.mesh.shape["data"]
    feed = engine.setup.feed("context", engine.slots_for(2), context=rows, question=rows)
    return not any(segment.spread for segment in engine.method.segments(feed))


def attention_weights(
    engine: Engine,
    text: Sequence[int],
    *,
    queries: int,
    score: int | None = None,
    batch: int = 8,
) -> Float[np.ndarray, "L N Q S"]:
    """Attention weights of the newest queries on every token, in each layer and query head.

    Prefill is as in P1 (`evaluation.perplexity`): the last `score` tokens are decoded one by
    one. The question, the token before these, predicts the first of them. The queries are the last
    `queries` tokens that predict a scored one; tokens after a query have weight 0.

    Args:
      score: `queries` by default.
      batch: copies of the text that are computed together.

    Raises:
      InputError: the text is too short, or the method's weights cannot be measured.
      CapacityError: the caches of a batch do not fit.
    """
    score = queries if score is None else score
    if not (1 <= queries <= score and score + 1 < len(text)):
        raise InputError(
            f"a text of {len(text)} tokens does not hold {score} to score behind a question of one "
            f"and some text, or fewer are scored than the {queries} queries that are "
            f"looked at; ask for fewer"
        )
    if not shows_weights(engine):
        raise InputError(
            "this method reads a text in parts side by side or chooses by values, or the model "
            "has layers with sliding windows; it shows no weights"
        )
    rows = engine.mesh.shape["data"]
    copies = -(-batch // rows)
    # Methods keep `info` on the class; here the instance forwards it.
    marking = engine.under(_Marking(engine.method, queries, copies), **ON_DEVICES)
    marking.asks = engine.asks
    # The last token predicts nothing that is scored.
    size, fed = engine.config.head_dim, list(text)[:-1]
    starts = range(0, len(fed), size)
    blocks = []
    for begin in range(0, len(starts), rows * copies):
        firsts = (np.arange(begin, begin + rows * copies) * size).astype(np.int32)
        seen = _seen(marking, fed, firsts, score)
        blocks += list(np.moveaxis(seen, 1, 0))
    return np.concatenate(blocks, axis=-1)[..., : len(fed)]


def _seen(
    engine: Engine, fed: list[int], firsts: np.ndarray, score: int
) -> Float[np.ndarray, "L X N Q H"]:
    """Outputs of the newest queries over the marks, of each copy of the text."""
    setup, rows, prompt = engine.setup, engine.mesh.shape["data"], len(fed) - (score - 1)
    read, question = fed[: prompt - 1], fed[prompt - 1 : prompt]
    reserve = len(fed) - len(read) + 1
    slots = engine.slots_for(len(fed) + 1)
    engine.check_capacity(rows, slots, reserve)
    total = jnp.full((rows,), len(fed) + 1, jnp.int32)
    caches = tuple(
        _marking_from(cache, firsts, engine.mesh)
        for cache in init_caches(setup, rows, slots, reserve)
    )

    def run(caches: tuple[Any, ...], segment: Segment) -> tuple[Any, ...]:
        caches, marker = run_segment(setup, engine.params, caches, segment, total, None, "none")
        # At most one program waits on the device.
        marker.block_until_ready()
        return caches

    questions = [question] * rows
    needed = questions if engine.method.info.needs_question else None
    for part in engine.method.segments(
        engine.setup.feed(
            "context", slots, context=[read] * rows, question=needed, asks=engine.asks
        )
    ):
        caches = run(caches, part)
    caches = finish_context(setup, caches, total, reserve)
    for part in engine.method.segments(engine.setup.feed("question", 0, question=questions)):
        caches = run(caches, part)
    if engine.method.info.answers_apart:
        caches = finish_question(setup, caches, total, reserve=bucket(reserve))
    ones, going = np.ones((rows, 1), np.int32), np.zeros(rows, bool)
    for step, token in enumerate(fed[prompt:], start=1):
        tokens = np.full((rows, 1), token, np.int32)
        variant = engine.method.step_variant(step)
        caches = run(caches, decode_segment(tokens, ones, going, variant))
    seen = (
        to_host(cache.cache.seen) if isinstance(cache, Stacked) else to_host(cache.seen)[None]
        for cache in caches
    )
    return np.concatenate(list(seen))


def _marking_from(cache: Any, firsts: np.ndarray, mesh: Any) -> Any:
    """The cache of a layer, or of a run of layers, whose marks begin at `firsts`."""
    # Every cache has an array of its own, because caches are donated.
    if isinstance(cache, Stacked):
        of_all = np.broadcast_to(firsts, (cache.count, *firsts.shape))
        first = jax.device_put(of_all, logical_sharding(mesh, ("layers", "batch")))
        return cache.over(dataclasses.replace(cache.cache, first=first))
    first = jax.device_put(firsts, logical_sharding(mesh, ("batch",)))
    return dataclasses.replace(cache, first=first)


def markdown(runs: Sequence[dict[str, Any]]) -> str:
    """A Markdown table with one line a run: divergence, agreement and measures of attention."""
    top = runs[0]["top"]
    head = ["method", "KL, nats", "same best token, %", "attended tokens", "mass kept, %"]
    head += [f"recall of the best {top}, %", "entropy, nats"]
    lines = []

    def mean(run: dict[str, Any], name: str) -> float:
        return float(np.mean([text[name] for text in run["attention"]]))

    for run in runs:
        cells = [f"`{label(run)}`", shown_interval(*bootstrap(np.array(run["kl"])), ".4f")]
        cells.append(shown_interval(*bootstrap(100 * np.array(run["same"])), ".1f"))
        if run["attention"] is None:
            cells += ["-"] * 4
        else:
            cells += [
                f"{mean(run, 'attended'):,.1f}",
                f"{100 * mean(run, 'mass'):.2f}",
                f"{100 * mean(run, 'recall'):.1f}",
                f"{mean(run, 'entropy'):.3f}",
            ]
        lines.append(cells)
    run = runs[0]
    note = (
        f"{len(run['kl'])} texts of {run['length']:,} tokens, the last {run['score']} decoded; "
        f"intervals: 95%, bootstrap over texts. "
    )
    if any(run["attention"] is not None for run in runs):
        note += (
            f"Attention: means over layers, heads and the newest {run['queries']} queries; mass "
            f"and recall are of full attention's own weights."
        )
    return f"{pipe_table(head, lines)}\n{note.rstrip()}\n"
