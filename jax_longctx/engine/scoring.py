"""How likely given text is under a method: teacher forcing, and log-probabilities of its tokens.

Each row's context is fed first, then its continuation: always the text's own tokens, whatever the
model would predict. The final hidden states of the tokens that predict the continuation come in
pieces. Logits are made of a few columns at a time: a token's V logits take tens of times the memory
of its D hidden numbers.

A continuation goes one of three ways, as text goes through a method:

- `decode`: token by token, as an answer is written. The context's last token is the question;
- `question`: behind the context's last token in one question, several tokens a pass;
- `context`: read with the context, in the method's own chunks.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jax_longctx.contract import Segment, decode_segment
from jax_longctx.engine.allocate import init_caches
from jax_longctx.engine.capacity import bucket, fetched_of
from jax_longctx.engine.compiling import IN_PLACE, STEPPED, Program, program
from jax_longctx.engine.engine import BLOCK, Engine, Rows
from jax_longctx.engine.layers import hidden_states
from jax_longctx.engine.prefill import Live, finish_question, prefill_text, run_segment
from jax_longctx.engine.rows import Chosen
from jax_longctx.engine.sampling import MOST_LOGPROBS
from jax_longctx.engine.setup import Ends, Setup, replicated, without_layers
from jax_longctx.errors import InputError
from jax_longctx.models.llama import ends_of

Through = Literal["decode", "question", "context"]

# Most logits at a time: 64 MiB of float32.
LOGITS = 1 << 24


@dataclasses.dataclass(frozen=True)
class States:
    """Hidden states of some tokens of every row.

    Attributes:
      hidden: after the last norm, on the mesh; padding rows included.
      targets: the tokens that they predict, -1 where a column predicts nothing that is scored.
        Row by row they come in the text's order.
    """

    hidden: Float[Array, "B T D"]
    targets: Int[np.ndarray, "B T"]


@dataclasses.dataclass(frozen=True)
class Likelihood:
    """Of one row's continuation.

    Attributes:
      logprobs: natural log-probability of each token, given everything before it.
      greedy: whether it was the most likely one (the lowest id, of several alike).
    """

    logprobs: Float[np.ndarray, " n"]
    greedy: Bool[np.ndarray, " n"]

    @property
    def total(self) -> float:
        """Log-probability of the whole continuation."""
        return float(np.sum(self.logprobs, dtype=np.float64))

    @property
    def is_greedy(self) -> bool:
        """Whether greedy decoding would have written it."""
        return bool(np.all(self.greedy))


def loglikelihoods(
    engine: Engine, contexts: Rows, continuations: Rows, **options: Any
) -> list[Likelihood]:
    """How likely each continuation is after its context, as the method reads and answers.

    By default the context's last token is the question and the continuation is decoded token by
    token; options and errors are as in `forced_states`.
    """
    states = forced_states(engine, contexts, continuations, **options)
    return gathered(engine, states, len(contexts))


def gathered(engine: Engine, states: Iterable[States], rows: int) -> list[Likelihood]:
    """The likelihoods of the first `rows` rows' targets, from all of their states."""
    found: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in range(rows)]

    def keep(targets: np.ndarray, scores: tuple[Array, Array]) -> None:
        logprobs, greedy = map(np.asarray, scores)
        for b, row in enumerate(found):
            counts = targets[b] >= 0
            row.append((logprobs[b, counts], greedy[b, counts]))

    queued = None
    for piece in states:
        if np.all(piece.targets < 0):
            # Nothing to read; the queue on the device still stays short.
            piece.hidden.block_until_ready()
            continue
        params = without_layers(engine.params)
        scores = token_scores(engine.setup.ends, params, piece.hidden, piece.targets)
        # One piece computes while the next is dispatched.
        if queued is not None:
            keep(*queued)
        queued = piece.targets, scores
    if queued is not None:
        keep(*queued)
    return [Likelihood(*map(np.concatenate, zip(*row, strict=True))) for row in found]


def forced_states(
    engine: Engine,
    contexts: Rows,
    continuations: Rows,
    *,
    through: Through = "decode",
    questions: Rows | None = None,
    total: Sequence[int] | None = None,
) -> Iterator[States]:
    """States that predict every token of the continuations, in the order they are computed.

    Args:
      questions: stand between context and continuation; the context's last token unless given.
        With `through="context"` they are no part of the text: methods that need a question at
        prefill read the text for them.
      total: each row's total length for rotary embedding (dynamic NTK); unless given, the tokens
        that are fed, all but the last, as in one forward that scores the row.

    Raises:
      InputError: nothing to score in a row, or nothing before it, or an empty question; under this
        method `through` lets later tokens help to predict earlier ones, or the text is not read in
        its order.
      CapacityError: the caches do not fit; nothing has been computed.
    """
    if engine.method.info.looks_ahead and through != "decode":
        raise InputError(
            "tokens that this method reads together choose what they attend together, so that "
            "later ones would help to predict earlier ones; score through decode"
        )
    between = questions if questions is not None and through != "context" else [()] * len(contexts)
    if not len(contexts) == len(continuations) == len(between):
        raise InputError(
            f"{len(contexts)} contexts need as many continuations and questions, "
            f"{len(continuations)} and {len(between)} given"
        )
    given = [[*first, *then] for first, then in zip(contexts, between, strict=True)]
    for row, (before, after) in enumerate(zip(given, continuations, strict=True)):
        if not before or not len(after):
            raise InputError(
                f"row {row} has {len(before)} tokens before the {len(after)} that are scored; both "
                f"need at least one"
            )
    if between is questions and not all(map(len, between)):
        raise InputError(
            f"the question of row {list(map(len, between)).index(0)} is empty, and its last token "
            f"predicts the first that is scored; without questions the contexts' last tokens do"
        )
    texts = [[*before, *after] for before, after in zip(given, continuations, strict=True)]
    totals = list(total or (len(text) - 1 for text in texts))
    fed = _Fed(engine, texts, list(map(len, given)), totals)
    if through == "context":
        return fed.as_context(questions)
    asked = map(len, between) if questions is not None else [1] * len(texts)
    return fed.as_answer(through, list(asked))


class TextScores:
    """Log-probabilities of one text's tokens, from states of `Engine.prefilling`.

    Args:
      tokens: of the text, and the one behind it, which is scored too.
      best: the most likely tokens that are kept of each place.
    """

    def __init__(self, engine: Engine, tokens: Sequence[int], best: int):
        self._engine, self._tokens, self._best = engine, tokens, best
        self._at, self._found = 0, list[tuple[int, Any]]()

    def take(self, segment: Segment, hidden: Float[Array, "B T D"]) -> None:
        """Scores the tokens that follow the next segment of the text."""
        size, begun = int(segment.chunk_lengths[0]), self._at + 1
        targets = np.zeros(hidden.shape[:2], np.int32)
        targets[0, :size] = self._tokens[begun : begun + size]
        engine, self._at = self._engine, self._at + size
        params = without_layers(engine.params)
        self._found.append((size, ranked_scores(engine.setup.ends, params, hidden, targets)))

    def chosen(self) -> list[Chosen]:
        """Each token but the text's first, after prefill."""
        found: list[Chosen] = []
        for size, arrays in self._found:
            begun = len(found) + 1
            tokens = self._tokens[begun : begun + size]
            own, best, likely = (np.asarray(array)[0, :size] for array in arrays)
            best, likely = best[:, : self._best].tolist(), likely[:, : self._best].tolist()
            for token, logprob, *ranked in zip(tokens, own.tolist(), best, likely, strict=True):
                pairs = tuple(zip(*ranked, strict=True))
                # Of a token that is listed, the very number there.
                found.append(Chosen(token, dict(pairs).get(token, logprob), pairs))
        return found


class _Fed:
    """The rows' texts, and how many of each one's tokens have been fed."""

    def __init__(self, engine: Engine, texts: list[list[int]], given: list[int], total: list[int]):
        padding = -len(texts) % engine.mesh.shape["data"]
        self.engine, self.count = engine, len(texts)
        self.texts = engine.padded(texts)
        self.given, self.total = [*given, *[0] * padding], total
        self.at = np.zeros(len(self.texts), np.int64)

    def as_context(self, questions: Rows | None) -> Iterator[States]:
        """The texts, but for their last tokens, as contexts."""
        asked = self.engine.needed_questions(questions, self.count)
        read = [text[:-1] for text in self.texts]
        total = [*self.total, *[0] * (len(read) - self.count)]
        engine, slots = self.engine, self.engine.slots_for(max(map(len, read)))
        engine.check_capacity(len(read), slots, 0)
        live = Live(init_caches(engine.setup, len(read), slots, 0))
        totals = jax.device_put(np.array(total, np.int32))
        feed = engine.setup.feed("context", slots, context=read, question=asked)
        given = engine.setup, engine.params, live, feed, totals
        for segment, hidden in prefill_text(*given, "hidden"):
            yield self._states(hidden, segment.chunk_lengths)

    def as_answer(self, through: Through, asked: list[int]) -> Iterator[States]:
        """The last `asked` tokens before the continuation as a question; it follows them."""
        engine, method = self.engine, self.engine.method
        decodes = through == "decode"
        begun = [given - size for given, size in zip(self.given, asked, strict=False)]
        begun += [0] * (len(self.texts) - self.count)
        ends = self.given if decodes else [max(len(text) - 1, 0) for text in self.texts]
        questions = [text[at:end] for text, at, end in zip(self.texts, begun, ends, strict=True)]
        segments = list(method.segments(engine.setup.feed("question", 0, question=questions)))
        looks = method.info.needs_question or any(part.role == "probe" for part in segments)
        if not decodes and looks:
            raise InputError(
                "this method chooses what stays by the whole question, so that later tokens would "
                "help to predict earlier ones; score through decode"
            )
        most = max(len(text) - at for text, at in zip(self.texts, begun, strict=True))
        read = [text[:at] for text, at in zip(self.texts, begun, strict=True)][: self.count]
        context = engine.prefill(
            read, reserve=most, questions=questions[: self.count], total=self.total
        )
        caches, total, self.at = context.usable_caches(), context.total, np.array(begun)
        for segment in segments:
            caches, hidden = run_segment(
                engine.setup, engine.params, caches, segment, total, None, "hidden"
            )
            if segment.role != "probe":
                yield self._states(hidden, segment.chunk_lengths)
        if decodes and method.info.answers_apart:
            caches = finish_question(engine.setup, caches, total, reserve=bucket(most))
        if decodes:
            yield from self._decoded(caches, total)

    def _decoded(self, caches: tuple[Any, ...], total: Array) -> Iterator[States]:
        """All that is left but for the last tokens, one by one."""
        left = [len(text) - 1 - at for text, at in zip(self.texts, self.at, strict=True)]
        run = _forced_block if self.engine.setup.by_layer else forced_block
        variant_of = self.engine.method.step_variant
        for variant, alike in itertools.groupby(range(1, max(left) + 1), variant_of):
            for steps in itertools.batched(alike, BLOCK):
                counts = np.clip(np.array(left) - steps[0] + 1, 0, len(steps)).astype(np.int32)
                tokens = np.zeros((len(self.texts), BLOCK), np.int32)
                for b, text in enumerate(self.texts):
                    tokens[b, : counts[b]] = text[self.at[b] : self.at[b] + counts[b]]
                caches, hidden = run(
                    self.engine.setup, self.engine.params, caches, tokens, counts, total, variant
                )
                yield self._states(hidden, counts)
        self.engine.fetched = fetched_of(caches, self.count)

    def _states(self, hidden: Array, valid: np.ndarray) -> States:
        """The states of each row's next `valid` tokens."""
        targets = np.full(hidden.shape[:2], -1, np.int32)
        for b, text in enumerate(self.texts):
            for column in range(int(valid[b])):
                predicted = int(self.at[b]) + column + 1
                if self.given[b] <= predicted < len(text):
                    targets[b, column] = text[predicted]
        self.at = self.at + valid
        return States(hidden, targets)


def _forced_block(
    setup: Setup,
    params: Any,
    caches: tuple[Any, ...],
    tokens: Int[Any, "B X"],
    counts: Int[Any, " B"],
    total: Int[Array, " B"],
    variant: str,
) -> tuple[tuple[Any, ...], Float[Array, "B X D"]]:
    """Decode steps of given tokens: row b's first `counts[b]`, as many steps as the longest has."""

    def step(index: Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        caches, hidden_BXD = carry
        valid_B = index < counts
        token_B1 = jax.lax.dynamic_slice_in_dim(tokens, index, 1, axis=1)
        segment = decode_segment(token_B1, valid_B.astype(jnp.int32)[:, None], ~valid_B, variant)
        hidden_B1D, caches = hidden_states(setup, params, caches, segment, total)
        return caches, jax.lax.dynamic_update_slice_in_dim(hidden_BXD, hidden_B1D, index, axis=1)

    dtype = params["embed"]["table"].dtype
    empty_BXD = jnp.zeros((*tokens.shape, setup.config.model_dim), dtype)
    carry = (caches, empty_BXD)
    if setup.by_layer:
        for index in range(int(np.max(counts))):
            carry = step(jnp.int32(index), carry)
        return carry
    return jax.lax.fori_loop(0, jnp.max(counts), step, carry)


# All layers, and all steps, as one program.
forced_block = Program(_forced_block, static=(0, 6), donate_argnums=2, **IN_PLACE, **STEPPED)


@program(static=(0,))
def token_scores(
    ends: Ends,
    params: Any,
    hidden: Float[Array, "B T D"],
    targets: Int[Any, "B T"],
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
    """Log-probability of every target, and whether it is the most likely token.

    Logits are made of a few columns at a time: `[B, T, V]` is never in memory.
    """
    model = ends_of(ends.config, params)

    def score(hidden_BXD: Array, targets_BX: Array) -> tuple[Array, Array]:
        logits_BXV = model.logits(hidden_BXD)
        tokens_V = jnp.arange(logits_BXV.shape[-1])
        # A sum over the vocabulary is one over its shards; a gather would need all of them.
        chosen_BX = jnp.sum(jnp.where(tokens_V == targets_BX[..., None], logits_BXV, 0.0), axis=-1)
        logprob_BX = chosen_BX - jax.nn.logsumexp(logits_BXV, axis=-1)
        return logprob_BX, jnp.argmax(logits_BXV, axis=-1) == targets_BX

    return by_columns(ends, score, hidden, targets)


@program(static=(0,))
def ranked_scores(
    ends: Ends,
    params: Any,
    hidden: Float[Array, "B T D"],
    targets: Int[Any, "B T"],
) -> tuple[Float[Array, "B T"], Int[Array, "B T M"], Float[Array, "B T M"]]:
    """Log-probability of every target, and the M most likely tokens there with theirs."""
    model = ends_of(ends.config, params)

    def score(hidden_BXD: Array, targets_BX: Array) -> tuple[Array, Array, Array]:
        log_BXV = jax.nn.log_softmax(model.logits(hidden_BXD))
        tokens_V = jnp.arange(log_BXV.shape[-1])
        likely_BXM, best_BXM = jax.lax.top_k(log_BXV, min(MOST_LOGPROBS, log_BXV.shape[-1]))
        own_BX = jnp.sum(jnp.where(tokens_V == targets_BX[..., None], log_BXV, 0.0), axis=-1)
        return own_BX, best_BXM.astype(jnp.int32), likely_BXM

    return by_columns(ends, score, hidden, targets)


def by_columns(ends: Ends, function: Any, *arrays: Array) -> Any:
    """`function` of arrays `[B, T, ...]`, results too, over blocks of a few columns.

    As many columns as have `LOGITS` logits; what comes back is the same on all devices.
    """
    batch, columns = arrays[0].shape[:2]
    size = min(columns, max(1, LOGITS // (batch * ends.config.vocab_size)))
    blocks = -(-columns // size)

    def cut(array: Array) -> Array:
        widths = [(0, 0), (0, blocks * size - columns)] + [(0, 0)] * (array.ndim - 2)
        split = jnp.pad(array, widths).reshape(batch, blocks, size, *array.shape[2:])
        return jnp.moveaxis(split, 1, 0)  # [blocks, B, size, ...]

    found = jax.lax.map(lambda block: function(*block), tuple(map(cut, arrays)))

    def joined(array: Array) -> Array:
        rows = jnp.moveaxis(array, 0, 1)  # [B, blocks, size, ...]
        return rows.reshape(batch, blocks * size, *rows.shape[3:])[:, :columns]

    return replicated(ends, jax.tree.map(joined, found))
