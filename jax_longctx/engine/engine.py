"""The engine: token rows in, caches and tokens out, for any method on any mesh.

A context is prefilled once, in chunks of a fixed shape, and asked many questions. Each question
forks the context's cache, feeds its tokens, and decodes in blocks inside one compiled loop.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Bool

from jax_longctx.contract import Method, Segment
from jax_longctx.engine.allocate import abstract_caches, held_bytes, init_caches
from jax_longctx.engine.capacity import (
    SPARE,
    Fetched,
    available_bytes,
    bucket,
    bytes_per_device,
    check_fits,
    check_host,
    expected_bytes,
    extend,
    fetched_of,
    grow,
    passing_bytes,
    reserved,
    setup_of,
    slots_for,
)
from jax_longctx.engine.compiling import limit_mappings
from jax_longctx.engine.decode import (
    NOT_FINITE,
    DecodeState,
    Steps,
    answer_variants,
    decode_turns,
    first_state,
    next_block,
    start_answer,
)
from jax_longctx.engine.prefill import (
    Context,
    Keep,
    Live,
    Logits,
    Progress,
    asked,
    finish_context,
    finish_question,
    prefill_question,
    prefill_text,
    whole_finish,
)
from jax_longctx.engine.program_files import seal_cache
from jax_longctx.engine.sampling import (
    Bounds,
    Choices,
    MakesForms,
    RowValues,
    counts_of,
    sampling_static,
    sampling_values,
)
from jax_longctx.engine.weights_hash import first_values, hash_of_weights, identity_of, sum_of_bits
from jax_longctx.errors import ConfigError, InputError
from jax_longctx.models.config import ModelConfig
from jax_longctx.models.params import form_of_weights, stacked_layers
from jax_longctx.run_spec import RunSpec
from jax_longctx.settings import Sampling

Rows = Sequence[Sequence[int]]
# Columns of a decode block: one host round trip for that many tokens. The first blocks of an
# answer are shorter, so that its first words do not wait for a whole block.
BLOCK = 32
FIRST_BLOCKS = (1, 4, 12)


class Engine:
    """One model, one method, one mesh.

    Args:
      params: nested dict of the model's parameters, on the mesh; or of their shapes
        (`models.params.abstract_params`), until `take_params` gives the weights. The layers'
        matrices may be in 8 bits (`models.params.quantised_weights`).
      spec: how it runs; its dtype and form of weights may be left to `params`.
      memory_limit: bytes on each device that a new cache may use; None asks the device.
      consume: whether `params` may be emptied where they are stacked for a loop over layers. If
        not, and the caller keeps them, the weights are in memory twice.
      by_layer: whether the host loops over the layers, not the device (see `Setup`). None: the host
        on CPUs, which read weights faster apart than as slices of a stack.

    Raises:
      ConfigError: the method or the mesh does not fit the model, or cannot be offloaded, or the
        weights have another dtype or form than the spec names, or lie on other devices.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: Any,
        spec: RunSpec | None = None,
        *,
        memory_limit: int | None = None,
        by_layer: bool | None = None,
        consume: bool = False,
    ):
        seal_cache()
        held = params["embed"]["table"].dtype.name
        spec = (spec or RunSpec()).over(held, form_of_weights(params))
        if spec.dtype != held:
            raise ConfigError(
                f"these weights are in {held}, the run is of dtype {spec.dtype}; load them in that "
                f"dtype, or leave dtype away"
            )
        setup = setup_of(config, spec)
        by_layer = setup.platform == "cpu" if by_layer is None else by_layer
        self.setup = dataclasses.replace(setup, by_layer=by_layer)
        self.config, self.memory_limit = config, memory_limit
        self.method, self.mesh, self.chunk = setup.method, spec.devices(), setup.chunk
        self.spec = dataclasses.replace(spec, method=self.method, mesh=self.mesh)
        at = getattr(params["embed"]["table"], "sharding", None)
        if isinstance(at, NamedSharding) and at.device_set != set(self.mesh.devices.flat):
            raise ConfigError(
                f"these weights lie on {len(at.device_set)} devices, the run's mesh "
                f"{dict(self.mesh.shape)} has {self.mesh.size}, not all the same; give the mesh on "
                f"which they were loaded, or load them on this one"
            )
        # What the newest answer, or scored text, fetched from the host's memory; None where nothing
        # lies there.
        self.fetched: Fetched | None = None
        # Most decode steps between two looks at an answer; from the host each is called apart.
        self.block = BLOCK // 8 if by_layer else BLOCK
        # Tokens of `Method.asks`, from who has a tokenizer.
        self.asks: Rows = ()
        # The same makes forms of answers.
        self.forms: MakesForms | None = None
        self.take_params(params, consume=consume)

    def take_params(self, params: Any, *, consume: bool = False) -> None:
        """Takes the weights, as at construction; without them an engine can only compile ahead.

        Raises:
          InputError: weights of another form than those at construction.
          ConfigError: the method's settings were measured on other weights.
        """
        given, known = form_of_weights(params), self.setup.weights
        if given != known:
            raise InputError(
                f"these weights are in {given or 'no 8-bit form'}, the engine was made for "
                f"{known or 'none'}; make the engine with weights, or shapes, of the same form"
            )
        apart = self.setup.by_layer
        self.params = params if apart else stacked_layers(self.config, params, consume=consume)
        of, name = self.method.weights_of, self.method.name
        loaded = isinstance(jax.tree.leaves(self.params)[0], jax.Array)
        if of is not None and loaded and of != self.identity:
            raise ConfigError(
                f"{name}: the file that its settings name was measured on other weights ({of}, "
                f"these are {self.identity}); write one of this checkpoint with jax-longctx "
                "calibrate"
            )

    def under(self, method: Method, **changes: Any) -> "Engine":
        """An engine of the same weights under another method; `changes` are fields of the spec.

        The working set goes with the contexts' place: another place has its own, or the default.

        Raises:
          ConfigError: as at construction.
        """
        if "offload" in changes:
            changes = {"working_set": None, **changes}
        return Engine(
            self.config,
            self.params,
            dataclasses.replace(self.spec, method=method, **changes),
            memory_limit=self.memory_limit,
            by_layer=self.setup.by_layer,
        )

    @functools.cached_property
    def fingerprint(self) -> str:
        """Tells one set of weights from another: a hash of a few values of every parameter."""
        return hash_of_weights(self.params, self.config.num_layers, first_values)

    @functools.cached_property
    def identity(self) -> str:
        """Tells one model from another, in any dtype or form of its weights."""
        return identity_of(self.params)

    @functools.cached_property
    def checksum(self) -> str:
        """A hash of all values of every parameter, the same on every mesh."""
        return hash_of_weights(self.params, self.config.num_layers, sum_of_bits)

    def prefill(
        self,
        contexts: Rows,
        *,
        reserve: int,
        questions: Rows | None = None,
        total: Sequence[int] | None = None,
        capacity: int = 0,
        progress: Callable[[Progress], None] | None = None,
    ) -> Context:
        """Reads the contexts (rows of any length, also empty) into a cache.

        Args:
          reserve: slots that every row keeps free for a question and its answer, rounded by
            `capacity.reserved`; a longer one makes the cache grow.
          questions: what will be asked; only for methods that need it at prefill.
          total: each row's total length as rotary embedding sees it (dynamic NTK); the length of
            the context by default, which no later question changes.
          capacity: least slots of the cache, so that texts of several lengths share programs.
          progress: called after every chunk.

        Raises:
          InputError: token ids out of the vocabulary, or a question missing.
          CapacityError: the caches do not fit; nothing has been computed.
        """
        prefilling = self.prefilling(
            contexts, reserve=reserve, questions=questions, total=total, capacity=capacity
        )
        while True:
            try:
                told = next(prefilling)
            except StopIteration as end:
                return end.value
            if progress is not None:
                progress(told)

    def prefilling(
        self,
        contexts: Rows,
        *,
        reserve: int,
        questions: Rows | None = None,
        total: Sequence[int] | None = None,
        capacity: int = 0,
        ahead: Callable[[], bool] = lambda: True,
        states: Callable[[Segment, Array], None] | None = None,
    ) -> Generator[Progress, None, Context]:
        """`prefill` as a generator: other work on the device may run between two segments.

        Checks and raises as `prefill` does, at the first turn. One that is closed early leaves
        nothing behind.

        Args:
          ahead: whether a turn may end while its segment computes, asked each turn. That reads
            fastest, but what runs between two turns waits for the segment.
          states: takes each segment, in the text's order, and its tokens' hidden states
            `[B, T, D]`. InputError where the method does not read a text token after token.
        """
        rows = self.padded(contexts)
        lengths = [len(row) for row in rows]
        totals = [*(total or lengths[: len(contexts)]), *lengths[len(contexts) :]]
        reserve = reserved(reserve)
        asked = self.needed_questions(questions, len(contexts))
        slots = self.check_lengths(lengths, reserve, capacity)
        known = jax.device_put(np.array(totals, np.int32))
        live = Live(init_caches(self.setup, len(rows), slots, reserve))
        everything, done, previous = sum(lengths), 0, None
        begun = time.perf_counter()

        def told(tokens: int) -> Progress:
            return Progress(tokens, everything, time.perf_counter() - begun)

        feed = self.setup.feed("context", slots, context=rows, question=asked, asks=self.asks)
        wanted: Logits = "none" if states is None else "hidden"
        for segment, marker in prefill_text(self.setup, self.params, live, feed, known, wanted):
            probes = segment.role == "probe"
            if states is not None and not probes:
                states(segment, marker)
            # What is read twice (an anchor, on every shard) is no progress.
            read = 0 if probes else int(segment.chunk_lengths.sum())
            earlier, done = done, min(done + read, everything)
            if not ahead():
                marker.block_until_ready()
                yield told(done)
            elif previous is not None:
                # One segment computes while the next is dispatched; never a longer queue.
                previous.block_until_ready()
                yield told(earlier)
            previous = marker
        if previous is not None:
            previous.block_until_ready()
        yield told(everything)
        caches = finish_context(self.setup, live.caches, known, reserve)
        sizes = (len(contexts), slots, reserve)
        return Context(rows, *sizes, known, caches, questions=asked, method=self.method)

    def stream(
        self,
        context: Context,
        questions: Rows,
        *,
        sampling: Sampling | None = None,
        max_tokens: int = 128,
        stop_ids: Sequence[int] = (),
        keep: Keep = True,
    ) -> Generator[list[list[int]]]:
        """Asks one question a row; yields each row's new tokens, block by block.

        A row ends with a token of `stop_ids` (yielded too) or after `max_tokens`. The context is
        left as it was, also when the iterator is closed early; with `keep=False` it is given up,
        and its memory is free as soon as the method can do without. With `keep="history"` question
        and answer join its history (`Context.joined`), all but what the caches do not hold yet: the
        newest token, or the answer of a method that answers apart. The next question that is asked
        so begins with that and follows on the history; one that is asked otherwise ends it.

        Raises:
          InputError: a context of another method, an empty question, token ids out of the
            vocabulary, logits not finite, not a seed for each row, or a form that fails.
          CapacityError: question and answer need a larger cache, which does not fit.
        """
        self.check_context(context)
        sampling = _checked(sampling, max_tokens, context.batch)
        _check_questions(questions, context.batch)
        rows = self.padded(questions)
        context.usable_caches()
        if context.questions is not None and rows != context.questions:
            raise InputError(
                "this method read the context for other questions; prefill again for these"
            )
        bounds = Bounds(self.forms, sampling, context.batch)
        limit_mappings()
        given = [[*a, *b] for a, b in zip(context.past(keep), rows, strict=True)]
        self.ensure_reserve(context, max(map(len, given)) + max_tokens)
        with self.asked(context, keep) as live:
            logits = prefill_question(self.setup, self.params, live, rows, context.total)
            live.given = given
            if self.method.info.answers_apart:
                self.answer_apart(live, context, max_tokens, keep)
            context.answering_bytes, context.host_bytes = held_bytes(live.caches)
            limits: Any = {"max_tokens": max_tokens, "stop_ids": stop_ids}
            values = sampling_values(sampling, len(rows), **limits)
            values: RowValues = jax.device_put(values)
            seen = self.seen(context.rows, given) if sampling.penalised else None
            counts = counts_of({}, len(rows), self.config.vocab_size) if sampling.counted else None
            state = first_state(np.array([len(row) > 0 for row in rows]), seen, counts)
            static = sampling_static(sampling)
            begun = self.setup.ends, state, logits, bounds.of(values), static
            state, chosen = start_answer(*begun)
            self._check_finite(state)
            yield bounds.take(live.told(_chosen(chosen))[: context.batch])
            most = 1 if bounds.forms else self.block
            blocks, first = (min(size, most) for size in FIRST_BLOCKS), 1
            variants = answer_variants(self.method, reserved(max_tokens))
            while not np.all(np.asarray(state.done)):
                # Beyond the answer a step may be of a kind that its program does not hold.
                numbers = range(first, min(first + next(blocks, most), max_tokens))
                first = numbers.stop
                turns = decode_turns(self.method, variants, [numbers] * len(rows), BLOCK)
                steps = Steps(context.total, turns, bounds.of(values), variants, static)
                live.caches, state, chosen = next_block(
                    self.setup, self.params, live.caches, state, steps
                )
                self._check_finite(state)
                self.fetched = fetched_of(live.caches, context.batch)
                yield bounds.take(live.told(_chosen(chosen))[: context.batch])

    def asked(self, context: Context, keep: Keep) -> AbstractContextManager[Live]:
        """The caches for one question: see `prefill.asked`."""

        def check(copied: Any) -> None:
            self.check_bytes(context.slots, bytes_per_device(self.mesh, copied))

        return asked(self.setup, context, keep, check)

    def check_context(self, context: Context) -> None:
        """Raises InputError for a context that another method, or other settings, prefilled."""
        if context.method not in (None, self.method):
            raise InputError(
                f"this context was prefilled under {context.method}, this engine has "
                f"{self.method}; ask it under the method that made it, or prefill again"
            )

    def answer_apart(self, live: Live, context: Context, max_tokens: int, keep: Keep) -> None:
        """The answer's own caches, made from the context's and the question's."""
        reserve = bucket(max_tokens + SPARE)
        whole = live.caches
        given = self.setup, whole, context.total
        answering = whole_finish.eval_shape(*given, "question", reserve)
        self.check_bytes(context.slots, bytes_per_device(self.mesh, answering))
        live.caches = finish_question(*given, reserve)
        # A fork that is a copy is of no more use.
        needed = keep == "history" or (keep and self.method.info.append_only)
        live.whole = whole if needed else None

    def _check_finite(self, state: DecodeState) -> None:
        if not np.all(np.asarray(state.finite)):
            raise InputError(NOT_FINITE)

    def needed_questions(self, questions: Rows | None, count: int) -> list[list[int]] | None:
        """The padded questions where the method needs them at prefill, else None."""
        if not self.method.info.needs_question:
            return None
        if questions is None:
            raise InputError("this method needs the question at prefill; give `questions`")
        _check_questions(questions, count)
        return self.padded(questions)

    def seen(self, contexts: Rows, questions: Rows) -> Bool[Array, "B V"]:
        """The tokens of each row's context and question."""
        seen = np.zeros((len(questions), self.config.vocab_size), bool)
        for b, (context, question) in enumerate(zip(contexts, questions, strict=True)):
            seen[b, [*context, *question]] = True
        return jax.device_put(seen)

    def generate(
        self,
        prompts: Rows,
        *,
        max_tokens: int,
        sampling: Sampling | None = None,
        stop_ids: Sequence[int] = (),
        progress: Callable[[Progress], None] | None = None,
    ) -> Generator[list[list[int]]]:
        """Reads the prompts, then yields each one's continuation as `stream` does.

        All but a prompt's last token is context, the last is the question. Its total length is the
        whole prompt's, so that the first token follows from one forward over the prompt.

        Raises:
          InputError, CapacityError: as `prefill`, before this returns, and as `stream`.
        """
        for row, prompt in enumerate(prompts):
            if not len(prompt):
                raise InputError(f"prompt {row} is empty; it needs at least one token")
        sampling = _checked(sampling, max_tokens, len(prompts))
        last = [list(prompt[-1:]) for prompt in prompts]
        context = self.prefill(
            [prompt[:-1] for prompt in prompts],
            reserve=1 + max_tokens,
            questions=last,
            total=[len(prompt) for prompt in prompts],
            progress=progress,
        )
        return self.stream(
            context, last, sampling=sampling, max_tokens=max_tokens, stop_ids=stop_ids, keep=False
        )

    def slots_for(self, tokens: int) -> int:
        """Slots of a cache for that many tokens of the longest row."""
        return slots_for(tokens, seq_shards=self.mesh.shape["seq"])

    def padded(self, rows: Rows) -> list[list[int]]:
        """The rows as lists, with empty ones added to fill the mesh's data axis.

        Raises:
          InputError: no rows, or a token id outside the vocabulary.
        """
        if not len(rows):
            raise InputError("no rows given; expected at least one")
        vocabulary = self.config.vocab_size
        for b, row in enumerate(rows):
            ids = np.asarray(row, np.int64)
            bad = ids[(ids < 0) | (ids >= vocabulary)]
            if bad.size:
                raise InputError(
                    f"row {b} holds token id {bad[0]}, the model's vocabulary is "
                    f"0..{vocabulary - 1}; leave that token out, or use the checkpoint's tokenizer"
                )
        return [*map(list, rows), *([] for _ in range(-len(rows) % self.mesh.shape["data"]))]

    def check_lengths(self, lengths: Sequence[int], reserve: int, capacity: int) -> int:
        """Slots of new caches for texts of these lengths; CapacityError where they do not fit."""
        slots = self.slots_for(max(capacity - SPARE, max(lengths) + reserve))
        rows = -(-len(lengths) // self.mesh.shape["data"]) * self.mesh.shape["data"]
        self.check_capacity(rows, slots, reserve)
        return slots

    def check_capacity(self, batch: int, slots: int, reserve: int) -> None:
        """CapacityError unless new caches of that size fit into the free memory."""

        def need(slots: int) -> int:
            shapes = abstract_caches(self.setup, batch, slots, reserve)
            return bytes_per_device(self.mesh, shapes) + passing_bytes(self.setup, shapes)

        self.check_growing(slots, need)
        if self.setup.offload is not None:
            check_host(self.mesh, abstract_caches(self.setup, batch, slots, reserve))

    def new_cache_bytes(self, tokens: int, reserve: int) -> int:
        """Bytes on each device of the caches of one text of `tokens` tokens, `reserve` included."""
        batch, slots = self.mesh.shape["data"], self.slots_for(tokens)
        return bytes_per_device(self.mesh, abstract_caches(self.setup, batch, slots, reserve))

    def memory_expected(self) -> int | None:
        """Free bytes of each device beside the weights, loaded or not; None where unknown."""
        if self.memory_limit is not None:
            return self.memory_limit
        loaded = all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(self.params))
        return available_bytes(self.mesh) if loaded else expected_bytes(self.mesh, self.params)

    def check_bytes(self, tokens: int, need: int, per_token: float = 0.0) -> None:
        """As `capacity.check_fits`, in the memory that is free now."""
        available = self.memory_limit or available_bytes(self.mesh)
        check_fits(tokens, need, per_token, available)

    def check_growing(self, slots: int, need: Callable[[int], int], held: int = 0) -> int:
        """`check_bytes` of caches that take `need(slots)` bytes beside `held` slots; the bytes."""
        found, double = need(slots), need(2 * slots)
        self.check_bytes(held + slots, found, (double - found) / slots)
        return found

    def ensure_reserve(self, context: Context, extra: int) -> None:
        """Grows the context's caches to the next bucket when question and answer need more."""
        if extra <= context.reserve:
            return
        caches = context.usable_caches()
        # In multiples, so that a slightly longer question does not compile everything anew.
        more = bucket(extra - context.reserve, self.mesh.shape["seq"])
        caches = (*caches, *filter(None, context.history or ()))

        def need(more: int) -> int:
            sizes = {"more": more, "layout": self.setup.slot_layout, "slots": context.slots}
            grown = jax.eval_shape(functools.partial(grow, **sizes), caches)
            return bytes_per_device(self.mesh, grown)

        self.check_growing(more, need, held=context.slots)
        extend(self.setup, context, more)


def _checked(sampling: Sampling | None, max_tokens: int, rows: int) -> Sampling:
    """The sampling with a seed for each row."""
    if max_tokens < 1:
        raise InputError(f"max_tokens must be at least 1, got {max_tokens}")
    return (sampling or Sampling()).of_rows(rows)


def _chosen(choices: Choices) -> list[list[int]]:
    return [[int(token) for token in row if token >= 0] for row in np.asarray(choices.token)]


def _check_questions(questions: Rows, count: int) -> None:
    """Raises InputError unless there is one question, not empty, for each of `count` contexts."""
    if len(questions) != count:
        raise InputError(f"{count} contexts need as many questions, {len(questions)} given")
    for row, question in enumerate(questions):
        if not len(question):
            raise InputError(f"question {row} is empty; it needs at least one token")
