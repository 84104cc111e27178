"""lm-evaluation-harness: `--model jax-longctx --model_args checkpoint=DIR,method=citrus,...`.

Gao et al., "A framework for few-shot language model evaluation" (the package lm_eval). Its tasks
make three kinds of requests, and every method supports them:

- `generate_until`: the last tokens of the prompt are the question, the rest is the context; the
  answer is cut before the first stop string.
- `loglikelihood`: the continuation is forced through the method's decode steps, and so scored as
  the method would have written it (`through=` chooses another way, see
  `jax_longctx.engine.scoring`).
- `loglikelihood_rolling`: windows as the harness cuts them, read as a context (`rolling=`).

Special tokens in a text are read as tokens: the harness renders chat templates itself. Token
boundaries follow the harness: its `_encode_pair` splits contexts and continuations, an empty
context is the beginning-of-text token, and a rolling text starts with it. A request longer than
`max_length` is an error before anything is computed. With `truncation=true` the start of such
prompts is left out, as in the harness's own models, with a warning.

Under exact attention the results equal the harness's `hf` model.
"""

import hashlib
import itertools
import json
import logging
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import jax

# The harness registers its own models only while its table is empty, so before ours.
import lm_eval.models  # noqa: F401
from jax.sharding import Mesh
from lm_eval import utils
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from tqdm import tqdm

import jax_longctx
from jax_longctx.api import LongContext
from jax_longctx.engine import Sampling
from jax_longctx.engine.scoring import Through, loglikelihoods
from jax_longctx.errors import ConfigError, InputError
from jax_longctx.methods import make_method, settings_of
from jax_longctx.origin import MADE_FROM, check_same
from jax_longctx.settings import DTYPES, at_least, parse_mesh
from jax_longctx.sharding import make_mesh

logger = logging.getLogger(__name__)

# Last tokens of a prompt that are its question, for methods that need one at prefill.
QUESTION = 64
HARNESS_DEVICE = "cuda:0"
# How a request is asked.
ASKED = ("max_length", "question_tokens", "through", "rolling")
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")

Request = tuple[tuple[str, str] | None, list[int], list[int]]


@register_model("jax-longctx")
class LongctxLM(TemplateLM):
    """A checkpoint under a long-context method, as the harness sees a model.

    Args:
      checkpoint: directory of a converted checkpoint, or a loaded model with its own method, mesh,
        dtype and chunk.
      method: name of the method; exact attention by default. Arguments that are not named here are
        its settings.
      batch_size: rows that are computed together, a whole number.
      device: JAX's name of the platform ("cpu", "cuda", "tpu"). JAX chooses by default, and for
        "cuda:0", the default of the harness's command line.
      dtype: "float32", "bfloat16" or "float16"; the checkpoint's by default and for "auto".
      kv: keys and values of caches: "bfloat16" or "int8"; the weights' dtype by default.
      weights: matrices of the layers: "bfloat16" or "int8"; `dtype` by default.
      mesh: devices, e.g. "data=2/tensor=4" (a comma would end the argument).
      prefill_chunk: tokens of a prefill pass (`chunk` is a setting of several methods).
      max_length: most tokens of prompt and answer, and of a rolling window; by default the length
        to which the model was trained or extended. Set it for methods that read further.
      max_gen_toks: most tokens of an answer, where the task does not set it.
      truncation: whether to leave out the start of prompts that are too long.
      question_tokens: last tokens of a prompt that are its question; by default 64 for methods that
        need it at prefill, else 1.
      through, rolling: how continuations and rolling texts are fed: "decode", "question" or
        "context".
      sample_seed: of the random draws, where a task samples.

    Raises:
      ConfigError: an argument or a setting does not exist or does not fit.
      CheckpointError: not a checkpoint.
    """

    def __init__(
        self,
        checkpoint: str | Path | LongContext,
        method: str | None = None,
        *,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        device: str | None = None,
        dtype: str | None = None,
        kv: str | None = None,
        weights: str | None = None,
        mesh: str | None = None,
        prefill_chunk: int = 512,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        truncation: bool = False,
        question_tokens: int | None = None,
        through: str = "decode",
        rolling: str = "context",
        sample_seed: int = 0,
        **settings: Any,
    ):
        super().__init__()
        if jax.process_count() > 1:
            raise ConfigError("lm_eval runs in one process; give it the devices of one (mesh=)")
        if not str(batch_size).isdigit() or max_batch_size is not None:
            raise ConfigError(
                f"batch_size={batch_size}, max_batch_size={max_batch_size}: rows are not tried out "
                f"here; give batch_size a whole number"
            )
        for name, way in (("through", through), ("rolling", rolling)):
            if way not in get_args(Through):
                raise ConfigError(f"{name}={way} is not one of {', '.join(get_args(Through))}")
        if isinstance(checkpoint, LongContext):
            if method or device or dtype or kv or weights or mesh or settings:
                raise ConfigError(
                    "a loaded model has its method, device, dtype, kv, weights and mesh already"
                )
            self.model = checkpoint
        else:
            made, placed = make_method(method or "full", settings), _placed(mesh or "", device)
            if dtype not in (None, "auto", *DTYPES):
                raise ConfigError(f"dtype={dtype} is not one of auto, {', '.join(DTYPES)}")
            self.model = jax_longctx.load(
                checkpoint,
                method=made,
                mesh=placed,
                dtype=None if dtype == "auto" else dtype,
                kv=kv,
                weights=weights,
                chunk=prefill_chunk,
            )
        if question_tokens is None:
            question_tokens = QUESTION if self.model.engine.method.info.needs_question else 1
        self.batch_size = int(batch_size)
        trained, named = self.model.config.trained_length, self.model.config.max_position
        # Without a trained length, windows have the length of the model's configuration.
        self.max_length = max_length or (named if math.isinf(trained) else int(trained))
        self.max_gen_toks, self.truncation = max_gen_toks, truncation
        self.question_tokens, self.through, self.rolling = question_tokens, through, rolling
        self.sample_seed = sample_seed
        at_least(1, self, "batch_size", "max_length", "max_gen_toks", "question_tokens")
        self.name = Path(checkpoint).resolve().name if isinstance(checkpoint, str | Path) else ""

    # Properties of the model that the harness reads.

    @property
    def tokenizer(self) -> Any:
        """The checkpoint's tokenizer."""
        return self.model.tokenizer

    @property
    def eot_token_id(self) -> int:
        """The id that ends a text."""
        if not self.tokenizer.eos_ids:
            raise ConfigError("the checkpoint's tokenizer has no end-of-text token")
        return self.tokenizer.eos_ids[0]

    @property
    def prefix_token_id(self) -> int:
        """The token that begins a text: beginning-of-text, or end-of-text if there is none."""
        bos = self.tokenizer.bos_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        """Name of tokenizer and template in the harness's cache of prompts."""
        template = self.tokenizer.chat_template or ""
        digest = hashlib.sha256(template.encode()).hexdigest()[:12]
        return f"{self.name or 'model'}-{self.tokenizer.vocab_size}-{digest}"

    def get_model_info(self) -> dict[str, Any]:
        """Facts that the harness writes with the results."""
        engine = self.model.engine
        return {
            "method": settings_of(engine.method),
            "model_dtype": str(engine.setup.dtype),
            "model_num_parameters": sum(leaf.size for leaf in jax.tree.leaves(engine.params)),
            "model_sha": engine.fingerprint,
            "mesh": dict(engine.mesh.shape),
            "jax_device": engine.mesh.devices.flat[0].device_kind,
            **{name: getattr(self, name) for name in ASKED},
        }

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Token ids, by default with the beginning-of-text token if the tokenizer uses one."""
        # Every text of the harness begins: it cuts continuations off as ids.
        bos = add_special_tokens is not False
        return self.tokenizer.encode(string, bos=bos, begins=True, parse_special=True)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The messages in the checkpoint's chat layout.

        Without a generation prompt the text ends with the last message, the start of the answer. If
        the template refuses the system's message, it is left out with a warning.
        """
        try:
            text = self.tokenizer.chat(chat_history, answer=add_generation_prompt).text
        except InputError as error:
            others = [message for message in chat_history if message["role"] != "system"]
            if len(others) == len(chat_history):
                raise
            utils.warning_once(logger, f"{error}; the system's message is left out")
            chat_history = others
            text = self.tokenizer.chat(chat_history, answer=add_generation_prompt).text
        return text if add_generation_prompt else _open_ended(text, chat_history[-1]["content"])

    def set_cache_hook(self, cache_hook: Any) -> None:
        """Takes the harness's cache of answers (`--use_cache`), whose keys are requests alone.

        Raises:
          OriginError: it holds answers of another model, method or way to ask, or does not say.
        """
        if (kept := cache_hook.dbdict) is not None:
            names = (*ASKED, "max_gen_toks", "truncation", "sample_seed")
            given = self.model.made_by | {name: getattr(self, name) for name in names}
            known = kept.get(MADE_FROM, {}) if len(kept) else given
            check_same(Path(kept.filename), known, given, "name another file for --use_cache")
            kept[MADE_FROM] = json.loads(json.dumps(given))
        super().set_cache_hook(cache_hook)

    # Requests of the harness.

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """The answers, each cut before the first of its task's stop strings."""
        start = [self.prefix_token_id]
        prompts = [self.tok_encode(request.args[0]) or start for request in requests]
        limit = self.max_gen_toks
        wanted: list[dict[str, Any]] = [
            {**normalize_gen_kwargs(request.args[1], limit)} for request in requests
        ]
        samplings = list(map(_sampling, wanted))
        prompts = self._fitting(prompts, [kwargs["max_gen_toks"] for kwargs in wanted])
        kinds = [json.dumps(kwargs, sort_keys=True) for kwargs in wanted]
        answers = [""] * len(requests)
        batches = _batches([len(prompt) for prompt in prompts], kinds, self.batch_size)
        with tqdm(total=len(requests), disable=disable_tqdm, desc="generate_until") as progress:
            for indices, padded in batches:
                first = indices[0]
                # Seeds depend on the request's index: repeated requests draw differently.
                sampling = Sampling(**samplings[first], seed=self.sample_seed)
                sampling = sampling.at((index,) for index in padded)
                texts = self._generate([prompts[i] for i in padded], wanted[first], sampling)
                for index, text in zip(indices, texts, strict=False):
                    answers[index] = text
                    self.cache_hook.add_partial("generate_until", requests[index].args, text)
                progress.update(len(indices))
        return answers

    def _generate(self, prompts: list[list[int]], kwargs: Any, sampling: Sampling) -> list[str]:
        stop, max_tokens = [text for text in kwargs["until"] if text], kwargs["max_gen_toks"]
        contexts, questions = self._split(prompts)
        context = self.model.engine.prefill(
            contexts,
            reserve=self.question_tokens + max_tokens,
            questions=questions,
            total=list(map(len, prompts)),
        )
        options: Any = {"sampling": sampling, "max_tokens": max_tokens, "stop": stop}
        answers = self.model.ask(context, questions, keep=False, **options)
        ends = self.tokenizer.eos_ids
        # The harness decodes an answer alone, without the prompt before it.
        alone = [self.tokenizer.decode([t for t in a.tokens if t not in ends]) for a in answers]
        return [postprocess_generated_text(text, stop, None) for text in alone]

    def _loglikelihood_tokens(
        self, requests: list[Request], disable_tqdm: bool = False, way: str | None = None
    ) -> list[tuple[float, bool]]:
        """Log-probability of each continuation, and whether greedy decoding would have written it.

        Args:
          requests: (texts, or None where the caller keeps its own cache; context; continuation).
        """
        contexts = self._fitting([r[1] for r in requests], [len(r[2]) - 1 for r in requests])
        found: list[Any] = [None] * len(requests)
        lengths = [len(c) + len(r[2]) for c, r in zip(contexts, requests, strict=True)]
        with tqdm(total=len(requests), disable=disable_tqdm, desc="loglikelihood") as progress:
            for indices, padded in _batches(lengths, [None] * len(lengths), self.batch_size):
                rows = [contexts[i] for i in padded], [requests[i][2] for i in padded]
                scored = self._scores(*rows, way or self.through)
                for index, answer in zip(indices, scored, strict=False):
                    found[index], texts = answer, requests[index][0]
                    if texts is not None:
                        self.cache_hook.add_partial("loglikelihood", texts, answer)
                progress.update(len(indices))
        return found

    def _scores(
        self, contexts: list[list[int]], continuations: list[list[int]], way: str
    ) -> list[tuple[float, bool]]:
        engine = self.model.engine
        read, questions = self._split(contexts)
        if way == "context":
            # In this way the question is not part of the text.
            read, questions = contexts, questions if engine.method.info.needs_question else None
        options: Any = {"through": way, "questions": questions}
        try:
            scored = loglikelihoods(engine, read, continuations, **options)
        except InputError as error:
            raise InputError(f"{error} (here {way}: through= and rolling= say how)") from error
        return [(one.total, one.is_greedy) for one in scored]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of each text, in windows of `max_length` tokens that do not overlap."""
        windows: list[list[Request]] = []
        for request in requests:
            cut = utils.get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            windows.append([(None, *utils.make_disjoint_window(window)) for window in cut])
        flat = list(itertools.chain.from_iterable(windows))
        scored = iter(self._loglikelihood_tokens(flat, disable_tqdm, self.rolling))
        totals = []
        for request, own in zip(requests, windows, strict=True):
            totals.append(sum(total for total, _ in itertools.islice(scored, len(own))))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, totals[-1])
        return totals

    def _split(self, rows: Sequence[list[int]]) -> tuple[list[list[int]], list[list[int]]]:
        """Contexts and questions; the question is the last `question_tokens` of a row."""
        size = self.question_tokens
        return [row[:-size] for row in rows], [row[-size:] for row in rows]

    def _fitting(self, rows: list[list[int]], after: Sequence[int]) -> list[list[int]]:
        """The rows, cut so that each fits `max_length` with `after` more tokens.

        Raises:
          InputError: a row is too long and `truncation` is off, or `after` alone is too long.
        """
        rooms = [self.max_length - extra for extra in after]
        over = [i for i, (row, room) in enumerate(zip(rows, rooms, strict=True)) if len(row) > room]
        if not over:
            return rows
        worst = max(over, key=lambda i: len(rows[i]) - rooms[i])
        what = (
            f"{len(over)} of {len(rows)} requests are longer than max_length={self.max_length}, "
            f"one has {len(rows[worst])} tokens and {after[worst]} to follow"
        )
        if not self.truncation or rooms[worst] < 1:
            raise InputError(
                f"{what}; raise max_length= where model and method read that far, ask for shorter "
                f"answers, or let truncation=true leave out the start of such prompts"
            )
        logger.warning("%s; the start of such prompts is left out (truncation=true)", what)
        return [row[-room:] for row, room in zip(rows, rooms, strict=True)]


def _placed(mesh: str, device: str | None) -> Mesh:
    """The platform's devices for a mesh such as `data=2/tensor=4`."""
    sizes: dict[str, Any] = dict(parse_mesh(mesh.replace("/", ",")))
    try:
        devices = None if device in (None, HARNESS_DEVICE) else jax.devices(device)
    except RuntimeError as error:
        raise ConfigError(f"device={device}: {error}; JAX found {jax.devices()[0]}") from error
    return make_mesh(**sizes, devices=devices)


def _sampling(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The sampling options of a task's generation settings. Raises InputError on unknown ones."""
    beams = kwargs.get("num_beams", 1)
    unknown = set(kwargs) - {"until", "max_gen_toks", "do_sample", "num_beams", *SAMPLING}
    if unknown or beams != 1:
        raise InputError(
            f"generation settings {', '.join(sorted(unknown)) or f'num_beams={beams}'} are not "
            f"known here; known: until, max_gen_toks, do_sample, {', '.join(SAMPLING)}"
        )
    return {name: kwargs[name] for name in SAMPLING if kwargs.get(name) is not None}


def _batches(
    lengths: Sequence[int], kinds: Sequence[str | None], size: int
) -> Iterator[tuple[list[int], list[int]]]:
    """Indices of requests that are computed together: of one kind, the longest first.

    Each batch comes with the indices of its rows, which repeat the last request up to `size`, so
    that all batches share their programs.
    """
    groups: dict[str | None, list[int]] = {}
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        groups.setdefault(kinds[index], []).append(index)
    for group in groups.values():
        for batch in itertools.batched(group, size):
            yield list(batch), [*batch, *[batch[-1]] * (size - len(batch))]


def _open_ended(text: str, content: str) -> str:
    """The rendered chat up to the end of its last message, which the model continues."""
    at = text.rfind(content.strip())
    if at < 0:
        raise InputError(
            "the chat template changes the last message, so that it cannot be continued; leave the "
            "start of the answer out (gen_prefix), or the chat template"
        )
    end = at + len(content.strip())
    # Spaces after it stay if the template keeps them.
    behind = content[len(content.rstrip()) :]
    return text[: end + len(behind)] if text.startswith(behind, end) else text[:end]
