"""Answers on their way out: streamed text and a closing note, or one JSON record each."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jax_longctx.cli.inputs import check_argument
from jax_longctx.cli.options import make_sampling
from jax_longctx.cli.start import starting
from jax_longctx.cli.terminal import Terminal
from jax_longctx.errors import InputError
from jax_longctx.memory import peak_memory, shown_bytes

if TYPE_CHECKING:
    from jax_longctx.api import Answer
    from jax_longctx.engine import Progress, Sampling

__all__ = [
    "AnswerOptions",
    "Answered",
    "answer_options",
    "closing_note",
    "on_progress",
    "per_second",
    "seconds_of",
    "stream_answer",
]


Answered = Callable[[Callable[[int, str], None]], list["Answer"]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """How answers are drawn and where they end."""

    sampling: "Sampling"
    max_tokens: int
    stop: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise InputError(f"--max-tokens must be at least 1, got {self.max_tokens}")
        for text in self.stop:
            check_argument("--stop", text)
        # Late: its package brings tokenizers and templates.
        from jax_longctx.text import StopStrings

        StopStrings(self.stop)

    def arguments(self) -> dict[str, Any]:
        """As `LongContext.ask` and `generate` take them."""
        return {"sampling": self.sampling, "max_tokens": self.max_tokens, "stop": self.stop}

    def facts(self) -> dict[str, Any]:
        """As JSON records carry them."""
        sampling = dataclasses.asdict(self.sampling)
        return {"sampling": sampling, "max_tokens": self.max_tokens, "stop": list(self.stop)}


def answer_options(
    terminal: Terminal,
    max_tokens: int,
    stop: list[str] | None,
    temperature: float,
    top_k: int,
    top_p: float,
    repetition_penalty: float,
    seed: int,
) -> AnswerOptions:
    """The options of a command that answers. The sampling options need JAX to be checked."""
    with starting(terminal):
        sampling = make_sampling(temperature, top_k, top_p, repetition_penalty, seed)
    return AnswerOptions(sampling=sampling, max_tokens=max_tokens, stop=tuple(stop or ()))


def stream_answer(terminal: Terminal, answered: Answered) -> "Answer":
    """Runs `answered(on_text)` for one row and streams its text to stdout."""
    try:
        (answer,) = answered(lambda row, text: terminal.write(text))
    finally:
        # Also when interrupted: what follows starts on a line of its own.
        terminal.write("\n")
    return answer


def on_progress(update: Callable[[int, int], None]) -> Callable[["Progress"], None]:
    """The engine's progress as a bar takes it."""
    return lambda progress: update(progress.done, progress.total)


def per_second(count: int, seconds: float) -> float:
    """A rate; 0 where no time passed."""
    return count / seconds if seconds > 0 else 0.0


def seconds_of(answer: "Answer", prefill: float) -> dict[str, float]:
    """Durations of a JSON record."""
    return {
        "prefill": round(prefill, 4),
        "first_token": round(answer.first_token_seconds, 4),
        "decode": round(answer.decode_seconds, 4),
    }


def closing_note(answer: "Answer", context: int, prefill: float | None, cache: int | None) -> str:
    """Where time and memory went, in one line. `prefill` None: the context was read before."""
    # The first token's time is its own; the rate is that of the others.
    rate = per_second(len(answer.tokens) - 1, answer.decode_seconds)
    parts = [f"context {context:,} tokens"]
    if prefill is not None:
        parts.append(f"read in {prefill:.1f} s ({per_second(context, prefill):,.0f} tokens/s)")
    parts.append(f"first token after {answer.first_token_seconds:.2f} s")
    parts.append(f"{len(answer.tokens):,} tokens at {rate:,.1f} tokens/s")
    if cache is not None:
        parts.append(f"cache {shown_bytes(cache)}")
    parts.append(f"peak memory {shown_bytes(peak_memory())}")
    return "; ".join(parts)
