"""The library from Python: text in, text out.

    import jax_longctx

    model = jax_longctx.load("smollm2", method=jax_longctx.make_method("full"))
    layout = model.layout()
    context = model.prefill(layout.context(open("book.txt").read()))
    print(model.ask(context, layout.question("Who is the narrator?"))[0].text)

`LongContext` adds text to `Engine`: tokens, stop strings, timings. Texts and questions are fed as
they are, a question following directly on its text; a `PromptLayout` puts the chat template, or a
plain "Question: ... Answer:", around them, as the command line does. Special tokens that are
written in texts and questions are plain text, but in the prompts of `generate`.
"""

import contextlib
import copy
import dataclasses
import functools
import time
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Unpack

import jax

from jax_longctx.answers import Answer, AnswerOptions, AnswerReader, Asked, answer_together
from jax_longctx.choosing import beyond_trained
from jax_longctx.contract import Method
from jax_longctx.engine import (
    Ask,
    Context,
    Engine,
    Keep,
    Lengths,
    Progress,
    RunningBatch,
    Sampling,
    compile_ahead,
)
from jax_longctx.engine.ahead import Compilation
from jax_longctx.engine.capacity import Footprint, footprint
from jax_longctx.engine.context_io import load_context, made_by_engine, save_context
from jax_longctx.engine.places import cannot_share
from jax_longctx.engine.program_files import keep_compilations
from jax_longctx.engine.programs import list_context
from jax_longctx.engine.scoring import Likelihood, loglikelihoods
from jax_longctx.errors import CapacityError, ConfigError, InputError, TrainedLengthWarning
from jax_longctx.files import whole_path
from jax_longctx.forms import Forms
from jax_longctx.models.params import abstract_params
from jax_longctx.models.storage import Manifest, load_params, read_manifest, tokenizer_folder
from jax_longctx.origin import digest_of
from jax_longctx.run_spec import ON_DEVICES, RunFields, RunSpec
from jax_longctx.settings import AUTO
from jax_longctx.text import (
    PromptLayout,
    PromptText,
    Tokenizer,
    chat_layout,
    check_vocabulary,
    plain_layout,
)
from jax_longctx.text.child import start_child

# Most questions over one text that are answered at a time: of models whose heads share keys and
# values by fours, as many as one pass over the text takes on a GPU.
TOGETHER = 16
# A text of a list may be its token ids.
Text = str | PromptText | Sequence[int]
Texts = str | PromptText | Sequence[Text]
OnProgress = Callable[[Progress], None]


def load(
    checkpoint: str | Path,
    spec: RunSpec | Method | None = None,
    *,
    parse_special: bool = False,
    template: Mapping[str, Any] | None = None,
    sizes: Callable[["LongContext"], Mapping[str, Any]] = lambda model: {},
    choose: Callable[["LongContext"], Method] | None = None,
    check: Callable[["LongContext"], object] | None = None,
    ahead: Callable[["LongContext"], object] | None = None,
    **fields: Unpack[RunFields],
) -> "LongContext":
    """Loads a checkpoint directory that `jax-longctx convert` wrote.

    Args:
      spec: how it runs, or a method alone; by default full attention on one device, as the
        checkpoint is stored.
      parse_special: whether special tokens that are written in texts, questions and messages are
        read as tokens. Else they are plain text: a document cannot end a turn.
      template: variables of the chat template by name, as {"enable_thinking": False}.
      sizes: called where the mesh is "auto", with the model on one device: what the mesh is chosen
        for, as arguments of `planning.plan.on_best_mesh`; else one text of the trained length.
      choose: called before the weights load, with the model under full attention: gives the method.
        `method` must not be given then.
      check: called with the model before its weights load, to raise an error of the caller's own.
      ahead: called with the model while its weights load, in one process alone: to `compile` what
        will be asked. Nothing else works before the weights are there.
      fields: of `RunSpec`, which replace those in `spec`: method=, mesh=, dtype=, kv= ...

    Raises:
      CheckpointError: not a checkpoint, or damaged.
      ConfigError: method or mesh do not fit the model, or a field has no such value.
    """
    spec = spec if isinstance(spec, RunSpec) else RunSpec(method=spec)
    spec = dataclasses.replace(spec, **fields)
    if spec.method is not None and choose is not None:
        raise ConfigError("load: method and choose exclude each other; give one of them")
    keep_compilations()
    # It is ready when the tokenizer loads.
    start_child()
    auto = spec.mesh == AUTO
    alone = dataclasses.replace(spec, mesh=None) if auto else spec
    spec = dataclasses.replace(spec, mesh=alone.devices())
    checkpoint = whole_path(checkpoint)
    manifest = read_manifest(checkpoint)
    folder, eos = tokenizer_folder(checkpoint, manifest), manifest.extras.get("eos_token_id")
    how = {"parse_special": parse_special, "variables": template}
    tokenizer = Tokenizer.load(folder, eos=eos, **how)
    check_vocabulary(tokenizer, manifest.config)
    spec = spec.over(manifest.dtype, manifest.weights)

    def made(spec: RunSpec) -> "LongContext":
        # A method that is chosen later is checked then.
        first = spec if choose is None else dataclasses.replace(spec, **ON_DEVICES)
        shapes = abstract_params(manifest.config, spec)
        return LongContext(Engine(manifest.config, shapes, first), tokenizer, manifest)

    model = made(spec)
    if auto and jax.device_count() > 1:
        from jax_longctx.planning.plan import on_best_mesh

        spec = on_best_mesh(dataclasses.replace(spec, mesh=AUTO), model.config, **sizes(model))
        spec = dataclasses.replace(spec, mesh=spec.devices())
        model = made(spec)
    if choose is not None:
        tier = {"offload": spec.offload, "working_set": spec.working_set}
        model = model.with_method(choose(model), **tier)
    if check is not None:
        check(model)
    if ahead is None or jax.process_count() > 1:
        params = load_params(checkpoint, spec)
    else:
        with ThreadPoolExecutor(1, thread_name_prefix="weights") as pool:
            loading = pool.submit(load_params, checkpoint, spec)
            ahead(model)
            params = loading.result()
    model.engine.take_params(params, consume=True)
    return model


class LongContext:
    """A model, a method and a tokenizer.

    Attributes:
      engine: the token-level engine.
      tokenizer, manifest: of the checkpoint.
      forms: makes forms of answers.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer, manifest: Manifest | None = None):
        # An engine makes the forms of one tokenizer.
        engine = engine if engine.forms is None else copy.copy(engine)
        self.engine, self.tokenizer, self.manifest = engine, tokenizer, manifest
        self.forms = engine.forms = Forms(tokenizer, engine.config.vocab_size)
        if engine.method.asks:
            engine.asks = [tokenizer.encode(text) for text in engine.method.asks]

    @property
    def config(self) -> Any:
        """The model's configuration."""
        return self.engine.config

    @property
    def compiles_ahead(self) -> bool:
        """Whether runs of many rows compile the programs of a new shape before they call them.

        Not on a CPU, where XLA uses all cores for one program, and not in several processes.
        """
        return self.engine.setup.platform != "cpu" and jax.process_count() == 1

    def with_method(self, method: Method, **changes: Any) -> "LongContext":
        """The same weights and tokenizer under another method; nothing is loaded or copied.

        A context belongs to the method that prefilled it: the other one prefills its own.
        `changes` are other fields of the `RunSpec`, which stays as it is else: an offloaded model
        stays offloaded.

        Raises:
          ConfigError: the method does not fit the model or the mesh, or takes no such memory.
        """
        return LongContext(self.engine.under(method, **changes), self.tokenizer, self.manifest)

    @property
    def made_by(self) -> dict[str, Any]:
        """What changes answers, beside texts and options of decoding, for `jax_longctx.origin`."""
        special = {"parse_special": True} if self.tokenizer.parse_special else {}
        return {**made_by_engine(self.engine), "tokenizer": self.tokenizer_digest, **special}

    @property
    def tokenizer_digest(self) -> str | None:
        """Of the checkpoint's tokenizer, chat template and variables; None without a manifest."""
        manifest, variables = self.manifest, self.tokenizer.variables
        if manifest is None:
            return None
        facts: list[Any] = [dict(manifest.tokenizer_files), dict(manifest.extras)]
        return digest_of([*facts, variables] if variables else facts)

    def layout(self, chat: bool | None = None) -> PromptLayout:
        """The checkpoint's chat template around text and question; plain where there is none.

        Raises:
          ConfigError: `chat` is True and the checkpoint has no chat template.
        """
        chat = self.tokenizer.has_chat if chat is None else chat
        return chat_layout(self.tokenizer) if chat else plain_layout()

    def compile(
        self,
        lengths: Lengths,
        *,
        stop: Sequence[str] = (),
        stop_at_eos: bool = True,
        **options: Any,
    ) -> Compilation:
        """Compiles the programs for texts, questions and answers of these lengths, in threads.

        `stop` and `stop_at_eos` are as in `ask`; `options` go to `engine.compile_ahead`.
        """
        stop_ids = self.end_ids(stop, stop_at_eos)
        return compile_ahead(self.engine, lengths, stop_ids=stop_ids, **options)

    def prefill(
        self,
        texts: Texts,
        *,
        reserve: int = 256,
        questions: Texts | None = None,
        progress: OnProgress | None = None,
    ) -> Context:
        """Prefills one text, or a batch of texts of any lengths, into a context.

        Warns first where a text is too long for model and method (see `length_warning`). The cache
        reserves `reserve` tokens for a question and its answer, and grows for longer ones.
        `questions` are for methods that need the question at prefill.
        """
        rows = self._encode(texts, bos=True)
        asked = None if questions is None else self._encode(questions)
        self._warn_beyond(max(map(len, rows), default=0))
        return self.engine.prefill(rows, reserve=reserve, questions=asked, progress=progress)

    def ask(
        self,
        context: Context,
        questions: Texts,
        *,
        keep: Keep = True,
        until: Callable[[], bool] | None = None,
        **options: Unpack[AnswerOptions],
    ) -> list[Answer]:
        """Answers one question for each row of the context.

        Warns where text, question and answer are too long for model and method: first, where it
        is known before the answer and the questions are texts, else by `Answer.warning` alone.

        Args:
          keep: whether the context stays usable for further questions. If False, its memory is
            freed as soon as the method allows. With "history" the next such question follows on
            this one and its answer (see `Engine.stream`, and `Conversation`).
          until: asked a few times a second; where it is true the answers end as they are.
        """
        rows = self._questions(context, questions)
        stream = functools.partial(self.engine.stream, context, rows, keep=keep)
        # Where their numbers differ, `stream` says so.
        each = zip(context.lengths, context.past(keep), rows, strict=False)
        given = [length + len(past) + len(row) for length, past, row in each]
        return self._answers(stream, rows, given, Asked.of(options), until)

    def ask_all(
        self,
        context: Context,
        questions: Texts,
        *,
        keep: bool = True,
        **options: Unpack[AnswerOptions],
    ) -> list[Answer]:
        """Answers many questions over one text, each as `ask` would on its own.

        Rows that can share the context (`Method.own_tokens`) are answered together, `TOGETHER` at
        a time: a decode step reads the context once for all of them. Else one follows the other.

        Args:
          options: `sampling` has a seed for each question, or one, from which each derives its own
            by its number; `on_text` is called with the question's number.

        Returns:
          the answers in the order of the questions. Times to a first token of those that are
          answered together count from the call.

        Raises:
          InputError: the context is of several texts, or as `ask`.
        """
        asked = self._questions(context, questions)
        if context.batch != 1:
            raise InputError(
                f"many questions are asked over one text, this context has {context.batch}; use "
                "`ask` with a question for each"
            )
        if not len(asked):
            raise InputError("no questions given; expected at least one")
        how = Asked.of(options)
        sampling = how.sampling
        if not isinstance(sampling.seed, tuple):
            sampling = sampling.at((0, number) for number in range(len(asked)))
        seeds = sampling.of_rows(len(asked)).seed
        assert isinstance(seeds, tuple)
        samplings = [dataclasses.replace(sampling, seed=(seed,)) for seed in seeds]
        batch = self._batch(context, list(map(len, asked)), how.max_tokens)
        if batch is not None:
            answers = self._together(batch, context, asked, samplings, how)
            if not keep:
                context.caches = None
            return answers
        answers = []
        for number, (row, one) in enumerate(zip(asked, samplings, strict=True)):

            def told(_: int, text: str, number: int = number) -> None:
                how.tell(number, text)

            stays = keep or number + 1 < len(asked)
            one_row: AnswerOptions = {**options, "sampling": one, "on_text": told}
            answers += self.ask(context, [row], keep=stays, **one_row)
        return answers

    def _questions(self, context: Context, questions: Texts) -> list[list[int]]:
        """Their tokens; warns of texts, unless `prefill` has warned already."""
        given, length = self._encode(questions), max(context.lengths)
        texts = any(isinstance(each, str | PromptText) for each in _listed(questions))
        if texts and self.length_warning(length) is None:
            self._warn_beyond(max(map(len, given)) + length, level=4)
        return given

    def _batch(
        self, context: Context, asked: Sequence[int], max_tokens: int
    ) -> RunningBatch | None:
        """A batch for questions of these lengths; None where they are answered one by one."""
        if not self.together(len(asked)):
            return None
        # In few sizes: each size has its own programs.
        places = min(1 << (len(asked) - 1).bit_length(), TOGETHER)
        while places > 1:
            try:
                reserve = max(asked) + max_tokens
                return RunningBatch(self.engine, places=places, reserve=reserve, context=context)
            except CapacityError:
                places //= 2
        return None

    def compile_all(
        self,
        context: int,
        questions: Sequence[int],
        *,
        reserve: int,
        capacity: int = 0,
        keep: bool = True,
        **options: Unpack[AnswerOptions],
    ) -> Compilation:
        """Compiles the programs of `ask_all` for a text and questions of these lengths."""
        how = Asked.of(options)
        if not self.together(len(questions)):
            lengths = Lengths([context], [(questions[0], how.max_tokens)], reserve, capacity)
            ends = {"stop": how.stop, "stop_at_eos": how.stop_at_eos}
            return self.compile(lengths, sampling=how.sampling, keep=keep, **ends)
        stop_ids = self.end_ids(how.stop, how.stop_at_eos)
        compilation, engine = Compilation(self.engine.mesh), self.engine
        lengths = Lengths([context], [], reserve, capacity)
        engine.check_lengths([context], lengths.reserved, capacity)
        with compilation.listing():
            held = list_context(engine.setup, engine.params, lengths, 0)
            compilation.prefill_ends()
            batch = self._batch(held, questions, how.max_tokens)
            if batch is not None:
                batch.list_programs(
                    held, sorted(set(questions)), max_tokens=how.max_tokens, stop_ids=stop_ids
                )
        return compilation

    def together(self, questions: int) -> bool:
        """Whether `ask_all` answers that many questions together, where memory allows."""
        return questions > 1 and cannot_share(self.engine) is None

    def _together(
        self,
        batch: RunningBatch,
        context: Context,
        asked: Sequence[Sequence[int]],
        samplings: Sequence[Sampling],
        how: Asked,
    ) -> list[Answer]:
        """`ask_all` of rows that share the context."""
        ends, begun = self.end_ids(how.stop, how.stop_at_eos), time.perf_counter()
        context.answering_bytes = batch.resident_bytes + context.resident_bytes
        readers = [AnswerReader(self.tokenizer, row, how.stop, ends) for row in asked]
        limits: dict[str, Any] = {"max_tokens": how.max_tokens, "stop_ids": ends}
        asks = [Ask(*each, **limits) for each in zip(asked, samplings, strict=True)]
        times = answer_together(batch, context, asks, readers, how)
        answers = []
        for row, reader, (first, *later) in zip(asked, readers, times, strict=True):
            warning = self.length_warning(context.lengths[0] + len(row) + len(reader.tokens))
            seconds = first - begun, [first, *later][-1] - first
            answers.append(reader.answer(*seconds, warning))
        return answers

    def generate(
        self,
        prompts: Texts,
        *,
        progress: OnProgress | None = None,
        **options: Unpack[AnswerOptions],
    ) -> list[Answer]:
        """Continues each prompt: its last token is the question, the tokens before the context.

        Special tokens in a prompt count. Warns first where a prompt is too long for model and
        method (see `length_warning`).
        """
        rows = self._encode(prompts, bos=True, parse_special=True)
        self._warn_beyond(max(map(len, rows), default=0))
        seconds = 0.0

        def stream(**how: Any) -> Generator[list[list[int]]]:
            nonlocal seconds
            begun = time.perf_counter()
            blocks = self.engine.generate(rows, progress=progress, **how)
            seconds = time.perf_counter() - begun
            return blocks

        lasts = [row[-1:] for row in rows]
        answers = self._answers(stream, lasts, list(map(len, rows)), Asked.of(options))
        return [dataclasses.replace(answer, prefill_seconds=seconds) for answer in answers]

    def score(self, contexts: Texts, continuations: Texts, **options: Any) -> list[Likelihood]:
        """Log-likelihood of each continuation after its context, under the method.

        A continuation directly follows its context, like a question. Options and errors are those
        of `jax_longctx.engine.scoring.forced_states`.
        """
        rows = self._encode(contexts, bos=True)
        # Behind an empty context a continuation is the beginning.
        first = {at for at, text in enumerate(_listed(contexts)) if not str(text)}
        texts = enumerate(_listed(continuations))
        continued = [self._encode([text], begins=at in first)[0] for at, text in texts]
        return loglikelihoods(self.engine, rows, continued, **options)

    def footprint(self, tokens: int, *, batch: int = 1, reserve: int = 256) -> Footprint:
        """Bytes of the method's caches for `batch` texts of `tokens` tokens, and bytes read a step.

        They are sums over all layers and devices, computed from shapes: nothing is allocated.
        `reserve` is as in `prefill`.

        Raises:
          InputError: fewer than one token or text, or a negative reserve.
        """
        if tokens < 1 or batch < 1 or reserve < 0:
            raise InputError(
                f"expected at least 1 token, 1 text and a reserve of 0, got {tokens} tokens, "
                f"{batch} texts and a reserve of {reserve}"
            )
        return footprint(self.engine.setup, batch=batch, context=tokens, reserve=reserve)

    def save_context(self, context: Context, path: str | Path) -> None:
        """Writes a context to a new folder (see `jax_longctx.engine.context_io`)."""
        save_context(self.engine, context, path)

    def load_context(self, path: str | Path) -> Context:
        """Loads a context that the same model and method saved."""
        context = load_context(self.engine, path)
        self._warn_beyond(max(context.lengths))
        return context

    def length_warning(self, tokens: int) -> str | None:
        """The warning for a row of that many tokens, answer included; None for no warning."""
        return beyond_trained(self.config, self.engine.method, tokens)

    def _warn_beyond(self, tokens: int, level: int = 3) -> None:
        said = self.length_warning(tokens)
        if said is not None:
            warnings.warn(said, TrainedLengthWarning, stacklevel=level)

    def _answers(
        self,
        stream: Callable[..., Generator[list[list[int]]]],
        rows: Sequence[Sequence[int]],
        given: Sequence[int],
        how: Asked,
        until: Callable[[], bool] | None = None,
    ) -> list[Answer]:
        """The tokens that `stream` yields as answers, until that is true.

        `rows` are the tokens directly before each answer; `given` is the number of all before it.
        """
        ends = self.end_ids(how.stop, how.stop_at_eos)
        blocks = stream(sampling=how.sampling, max_tokens=how.max_tokens, stop_ids=ends)
        readers = [AnswerReader(self.tokenizer, row, how.stop, ends) for row in rows]
        begun, first = time.perf_counter(), None
        # Closing returns the cache to the context, also after an error in `on_text`.
        with contextlib.closing(blocks):
            for block in blocks:
                first = first or time.perf_counter()
                for row, (reader, tokens) in enumerate(zip(readers, block, strict=True)):
                    how.tell(row, reader.push(tokens))
                if all(reader.finished for reader in readers):
                    break
                if until is not None and until():
                    for reader in readers:
                        reader.interrupted = not reader.finished
                    break
        ended = time.perf_counter()
        first, fetched, answers = first or ended, self.engine.fetched, []
        for row, (reader, before) in enumerate(zip(readers, given, strict=True)):
            how.tell(row, reader.flush())
            warning = self.length_warning(before + len(reader.tokens))
            answers.append(reader.answer(first - begun, ended - first, warning, fetched))
        return answers

    def end_ids(self, stop: Sequence[str], stop_at_eos: bool) -> list[int]:
        """The token ids that end an answer."""
        # Special tokens have no text: a stop string that is one ends the answer by its id.
        special = [token for text in stop if (token := self.tokenizer.special_id(text)) is not None]
        return [*(self.tokenizer.eos_ids if stop_at_eos else ()), *special]

    def _encode(self, texts: Texts, **how: Any) -> list[list[int]]:
        encode, given = functools.partial(self.tokenizer.encode, **how), _listed(texts)
        return [encode(x) if isinstance(x, str | PromptText) else list(x) for x in given]


def _listed(texts: Texts) -> list[Text]:
    return [texts] if isinstance(texts, str | PromptText) else list(texts)
