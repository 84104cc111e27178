"""How rows are answered, and the answers to a batch of them on one mesh."""

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jax_longctx.api import Answer, LongContext
from jax_longctx.batch.requests import Request
from jax_longctx.engine import Lengths, Sampling
from jax_longctx.engine.ahead import Compilation
from jax_longctx.errors import CapacityError, InputError, LongctxError

# Full batches of a window: enough to find rows of similar length, few enough that the output is
# written soon after the input is read.
WINDOW_BATCHES = 16
# For each part of a batch, the answers to its questions.
Answers = list[list[dict[str, Any]]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """How rows are answered.

    Attributes:
      rows: most rows of a batch; fewer where memory is short.
      chat: whether contexts with questions are laid out by the chat template; None for where there
        is one. Prompts are continued as they are.
      files_under: the folder that the rows' files must be in; any folder if None.
    """

    rows: int = 8
    chat: bool | None = None
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    max_tokens: int = 128
    stop: tuple[str, ...] = ()
    files_under: str | None = None

    def __post_init__(self) -> None:
        if self.files_under is not None and not Path(self.files_under).is_dir():
            raise InputError(f"{self.files_under} is no folder; name the one that files are in")
        if self.rows < 1:
            raise InputError(f"rows of a batch must be at least 1, got {self.rows}")

    @property
    def usual(self) -> Request:
        """How a request is answered that does not say it."""
        return Request(self.sampling, self.max_tokens, self.stop)

    def of(self, request: dict[str, Any] | None) -> "BatchOptions":
        """The options with those of a request, JSON values, in place of the run's own."""
        if request is None:
            return self
        how = {"max_tokens": request["max_tokens"], "stop": tuple(request["stop"])}
        return dataclasses.replace(self, sampling=Sampling(**request["sampling"]), **how)

    @property
    def window(self) -> int:
        """Rows that are sorted by length together."""
        return WINDOW_BATCHES * self.rows


def computing(model: LongContext, given: BatchOptions) -> Callable[[dict[str, Any]], Answers]:
    """What answers a batch, JSON values."""
    shapes = set[tuple[Any, ...]]()

    def compute(batch: dict[str, Any]) -> Answers:
        options = given.of(batch["request"])
        shape = batch["rows"], batch["slots"], batch["reserve"], str(batch["request"])
        if model.compiles_ahead and shape not in shapes:
            shapes.add(shape)
            compilation = _compile(model, options, batch)
            if compilation is not None:
                compilation.wait()
        return _compute(model, options, batch)

    return compute


def _compute(model: LongContext, options: BatchOptions, work: dict[str, Any]) -> Answers:
    """The answers to each part's questions; a batch that does not fit is halved."""
    parts = work["parts"]
    try:
        return _answers(model, options, work)
    except CapacityError as error:
        if len(parts) == 1:
            return [[{"error": str(error), "read": 0}] * len(parts[0]["questions"])]
    half = len(parts) // 2
    halves = [{**work, "rows": len(each), "parts": each} for each in (parts[:half], parts[half:])]
    return [answers for each in halves for answers in _compute(model, options, each)]


def _compile(model: LongContext, options: BatchOptions, work: dict[str, Any]) -> Compilation | None:
    """Begins to compile a batch's programs and its first questions'; None where it does not fit."""
    parts = _padded(work)
    size = {"reserve": work["reserve"], "capacity": work["slots"]}
    contexts = [len(part["context"]) for part in parts]
    asked = [list(map(len, part["questions"])) for part in parts]
    with contextlib.suppress(LongctxError):
        if _together(model, parts):
            return model.compile_all(contexts[0], asked[0], **size, **_ends(options))
        first, more = max(sizes[0] for sizes in asked), max(map(len, asked)) > 1
        lengths = Lengths(contexts, [(first, options.max_tokens)], **size)
        how = {"sampling": options.sampling, "stop": options.stop, "keep": more}
        return model.compile(lengths, **how)
    return None


def _ends(options: BatchOptions) -> dict[str, Any]:
    """Where answers end, as `ask` takes it."""
    return {"max_tokens": options.max_tokens, "stop": options.stop}


def _together(model: LongContext, parts: list[dict[str, Any]]) -> bool:
    """Whether a batch is one text whose questions are answered together."""
    return len(parts) == 1 and model.together(len(parts[0]["questions"]))


def _padded(work: dict[str, Any]) -> list[dict[str, Any]]:
    """A batch's parts. Padding rows repeat the last one, so they end when it ends."""
    parts = list(work["parts"])
    return parts + parts[-1:] * (work["rows"] - len(parts))


def _answers(model: LongContext, options: BatchOptions, work: dict[str, Any]) -> Answers:
    engine, count, parts = model.engine, len(work["parts"]), _padded(work)
    if (work["request"] or {}).get("seeded"):
        # As the server draws.
        parts = [{**part, "places": [(0, 0)]} for part in parts]
    contexts, questions = ([part[key] for part in parts] for key in ("context", "questions"))
    rounds = max(map(len, questions))
    context = engine.prefill(
        contexts,
        reserve=work["reserve"],
        capacity=work["slots"],
        questions=[asked[0] for asked in questions],
        total=[part["total"] for part in parts],
    )
    if _together(model, parts):
        (asked,), (part,) = questions, parts
        answers = model.ask_all(
            context,
            asked,
            sampling=options.sampling.at(part["places"]),
            keep=False,
            **_ends(options),
        )
        length = len(contexts[0])
        return [[_answer(answer, length, len(asked[i]), i) for i, answer in enumerate(answers)]]
    found: Answers = [[] for _ in range(count)]
    for number in range(rounds):
        # A row with fewer questions repeats its last one.
        at = [min(number, len(row) - 1) for row in questions]
        asked = [row[i] for row, i in zip(questions, at, strict=True)]
        places = [part["places"][i] for part, i in zip(parts, at, strict=True)]
        answers = model.ask(
            context,
            asked,
            sampling=options.sampling.at(places),
            keep=number + 1 < rounds,
            **_ends(options),
        )
        for row, answer in zip(range(count), answers, strict=False):
            if number < len(questions[row]):
                found[row].append(_answer(answer, len(contexts[row]), len(asked[row]), number))
    return found


def _answer(answer: Answer, context: int, question: int, number: int) -> dict[str, Any]:
    return {
        "text": answer.text,
        "finish": answer.finish,
        "context": context,
        "question": question,
        "answer": len(answer.tokens),
        # The context is prefilled once for all questions.
        "read": question + (0 if number else context),
        **({} if answer.warning is None else {"warning": answer.warning}),
    }
