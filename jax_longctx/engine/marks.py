"""What an answer's tokens read: the weights of a method's attention on the parts of the text.

The question and its answer are fed once more over the context, as one question. In every layer
without a sliding window they attend twice: to the values, as ever, and to marks in their place
(`caches.marks`). So the weights are the method's own, by the keys that it has kept. A method reads
questions as it does: one that chooses anew for each decode step may read them exactly.

A head tells H parts of the text apart, in each of `copies` passes. Cost: a prefill of question and
answer whose attention is computed `copies` times more, and while a layer is at it the bytes of its
keys and values once more.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jax_longctx.caches.marks import with_marks
from jax_longctx.contract import CHUNK_ROWS, QKV, LayerContext, Segment, WithCache
from jax_longctx.engine.distributed import to_host
from jax_longctx.engine.engine import Engine, Rows
from jax_longctx.engine.prefill import Context, prefill_text
from jax_longctx.errors import InputError
from jax_longctx.parts.around import Around
from jax_longctx.sharding import Stacked, axes_field, numbers_of_layers, tree_shardings
from pallas_kernels.quantised import stored_as

# Passes over the text at most: of a longer text the parts are longer.
MOST_COPIES = 8
_REFUSED = "nobody can say where an answer was found: "
_UNNAMED = "the caches of {} do not say which tokens of the text they hold; take another method"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Marked:
    """A layer's cache, and what was read of each part of the text.

    Attributes:
      weights: of each of X parts, the sum over the tokens that count (see `_joined`).
      skipped: tokens of the question that still come before those that count.
      begin, end: tokens of the text that have a part: the first, and the one behind the last.
    """

    cache: Any
    weights: Float[Array, "B X"] = axes_field("batch", None)
    skipped: Int[Array, " B"] = axes_field("batch")
    begin: Int[Array, " B"] = axes_field("batch")
    end: Int[Array, " B"] = axes_field("batch")


@dataclasses.dataclass(frozen=True)
class Marking(Around):
    """A method that also says which parts of the text a question's tokens read.

    Attributes:
      width: tokens of a part.
      copies: passes over the text, each of which tells H parts apart.
    """

    width: int
    copies: int

    def attend(self, new: QKV, cache: Marked, segment: Segment, ctx: LayerContext) -> WithCache:
        (q, k, v), valid_B = new, segment.valid_of(CHUNK_ROWS)
        size, column_T = v.shape[-1], jnp.arange(q.shape[1])
        counts_BT = (column_T >= cache.skipped[:, None]) & (column_T < valid_B[:, None])
        begin_B11, end_B11 = cache.begin[:, None, None], cache.end[:, None, None]

        def of_copy(copy: Array) -> Array:
            def mark(values: Any, token: Array) -> Any:
                part = (token - begin_B11) // self.width - copy * size
                inside = (token >= begin_B11) & (token < end_B11)
                marks = jax.nn.one_hot(jnp.where(inside, part, -1), size, dtype=v.dtype)
                return stored_as(values, jnp.broadcast_to(marks, values.shape))

            marked = with_marks(cache.cache, mark, ctx)
            if marked is None:
                return jnp.zeros(q.shape, jnp.float32)
            given = (q, k, jnp.zeros_like(v))
            (out_BTNH, _), _ = self.method.attend(given, marked, segment, ctx)
            return jnp.where(counts_BT[..., None, None], out_BTNH.astype(jnp.float32), 0.0)

        found_CBTNH = jax.lax.map(of_copy, jnp.arange(self.copies))
        part, own = self.method.attend(new, cache.cache, segment, ctx)
        weights = cache.weights + _joined(found_CBTNH, ctx)
        skipped = jnp.maximum(cache.skipped - valid_B, 0)
        return part, dataclasses.replace(cache, cache=own, weights=weights, skipped=skipped)


def _joined(found: Float[Array, "C B T N H"], ctx: LayerContext) -> Float[Array, "B X"]:
    """The heads' and tokens' weights as one number a part: the sum of their squares.

    So a head that reads one place counts for more than many that look everywhere.
    """
    batch, tokens, heads = found.shape[1:4]
    apart = jnp.moveaxis(found, 0, 3).reshape(batch, tokens, heads, -1)  # [B, T, N, C * H]
    return ctx.psum_heads(jnp.sum(apart**2, axis=(1, 2)))


@dataclasses.dataclass(frozen=True)
class Weights:
    """What one row's answer read.

    Attributes:
      read: a number for each layer and part; zeros of layers with a sliding window.
      first: token of the context where the first part begins.
      width: tokens of a part.
    """

    read: Float[np.ndarray, "L X"]
    first: int
    width: int


def check_where(engine: Engine) -> None:
    """Raises InputError where nobody can say what answers under the engine's method read."""
    method, why = engine.method, None
    if engine.setup.offload is not None:
        why = "keys and values lie in the host's memory; leave out --offload"
    elif method.needs_question:
        why = f"{method.name} reads a text for one question; take another method"
    elif not (method.keeps_all or method.answers_apart or method.names_tokens):
        why = _UNNAMED.format(method.name)
    if why is not None:
        raise InputError(_REFUSED + why)


def weights_of(
    engine: Engine,
    context: Context,
    questions: Rows,
    answers: Rows,
    spans: Sequence[tuple[int, int]],
    width: int = 8,
) -> list[Weights]:
    """What each row's answer read of the tokens spans[b] of its context, which stays as it is.

    Args:
      answers: the tokens of each. Those count that chose one of them: the question's last token,
        and all but the answer's last. Where the answer has caches of its own, the question's alone.
      width: least tokens of a part.

    Raises:
      InputError: as `check_where`, or a context of another method.
      CapacityError: question and answer need a larger cache, which does not fit.
    """
    check_where(engine)
    engine.check_context(context)
    setup, size = engine.setup, engine.config.head_dim
    # An answer apart reads less than the question, which chose what stays of it.
    apart = engine.method.info.answers_apart
    pairs = zip(questions, answers, strict=True)
    fed = engine.padded([[*q, *(() if apart else a[:-1])] for q, a in pairs])
    engine.ensure_reserve(context, max(map(len, fed)))
    longest = max(end - first for first, end in spans)
    width = max(width, -(-longest // (MOST_COPIES * size)))
    copies = -(-longest // (width * size))
    numbers = np.zeros((3, len(fed)), np.int32)
    for row, (question, span) in enumerate(zip(questions, spans, strict=True)):
        numbers[:, row] = len(question) - 1, *span
    marking = dataclasses.replace(setup, method=Marking(setup.method, width, copies))
    with engine.asked(context, keep=True) as live:
        slides = [layer.window is not None for _, layer, _ in setup.with_layers(live.caches)]
        pairs = zip(live.caches, slides, strict=True)
        live.caches = tuple(
            cache if slides else _marked(cache, numbers, copies * size, engine.mesh)
            for cache, slides in pairs
        )
        try:
            feed = marking.feed("question", 0, question=fed)
            for _ in prefill_text(marking, engine.params, live, feed, context.total):
                pass
            read = _read(live.caches, engine.config.num_layers)
        finally:
            live.caches = tuple(map(_unmarked, live.caches))
    if not np.all(np.any(read[:, : len(spans)], axis=(0, 2))):
        raise InputError(_REFUSED + _UNNAMED.format(engine.method.name))
    return [Weights(read[:, row], first, width) for row, (first, _) in enumerate(spans)]


def _marked(cache: Any, numbers: Int[np.ndarray, "3 B"], parts: int, mesh: Any) -> Any:
    """A layer's cache, or a run's, in a `Marked` of nothing read."""
    layers = (cache.count,) if isinstance(cache, Stacked) else ()
    one = cache.cache if isinstance(cache, Stacked) else cache
    arrays: Any = (np.zeros((numbers.shape[1], parts), np.float32), *numbers)
    filled: Any = (np.broadcast_to(x, (*layers, *x.shape)) for x in arrays)
    made = Marked(one, *filled)
    made = cache.over(made) if layers else made
    # Each its own array: caches are donated.
    return jax.tree.map(jax.device_put, made, tree_shardings(mesh, made))


def _unmarked(cache: Any) -> Any:
    if isinstance(cache, Stacked):
        return cache.over(_unmarked(cache.cache))
    return cache.cache if isinstance(cache, Marked) else cache


def _read(caches: tuple[Any, ...], layers: int) -> Float[np.ndarray, "L B X"]:
    """What was read of each part, of all layers."""
    found: dict[int, np.ndarray] = {}
    for numbers, cache in zip(numbers_of_layers(caches), caches, strict=True):
        one = cache.cache if isinstance(cache, Stacked) else cache
        if isinstance(one, Marked):
            weights = to_host(one.weights)
            each = weights if isinstance(cache, Stacked) else weights[None]
            found.update(zip(numbers, each, strict=True))
    zeros = np.zeros_like(next(iter(found.values())))
    return np.stack([found.get(layer, zeros) for layer in range(layers)])
