"""`jax-longctx generate`: plain completion of a prompt."""

import functools
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from jax_longctx.cli import options
from jax_longctx.cli.options import argument
from jax_longctx.cli.terminal import (
    Compiling,
    Terminal,
    check_argument,
    choose_method,
    closing_note,
    read_text,
)
from jax_longctx.errors import InputError

if TYPE_CHECKING:
    from jax_longctx.api import LongContext
    from jax_longctx.engine.ahead import Compilation
    from jax_longctx.text import Tokenizer


@options.command
def generate(
    *,
    # Special tokens in a prompt are always read as tokens.
    model: options.ModelChoice = options.only("checkpoint", *options.RUN),
    method: options.MethodChoice,
    answers: options.AnswerChoice,
    prompt: str | None = argument(
        "The text to continue; - reads stdin (its last line break is dropped), which is "
        "also read when PROMPT is left out and stdin is not a terminal.",
        show_default=False,
    ),
    as_json: bool = options.as_json(),
) -> None:
    """Continue a prompt, of any length, without chat template.

    [bold]Examples[/bold]

        jax-longctx generate "The capital of France is" -c smollm2 --stop .

        cat notes.txt | jax-longctx generate - -c smollm2 --temperature 0.8
    """
    text = _prompt_text(prompt)
    terminal = Terminal(as_json=as_json)
    compiling = Compiling(terminal)

    @functools.cache
    def encoded(tokenizer: "Tokenizer") -> list[int]:
        return tokenizer.encode(text, bos=True, parse_special=True)

    def ahead(loaded: "LongContext") -> "Compilation":
        from jax_longctx.engine import Lengths

        length = len(encoded(loaded.tokenizer))
        how = answers.arguments()
        lengths = Lengths([length - 1], [(1, how.pop("max_tokens"))])
        return loaded.compile(lengths, keep=False, **how)

    def chosen(loaded: "LongContext") -> Any:
        tokens = len(encoded(loaded.tokenizer)) + answers.max_tokens
        return choose_method(terminal, loaded, tokens, reserve=answers.max_tokens)

    def sizes(loaded: "LongContext") -> dict[str, int]:
        return {"context": len(encoded(loaded.tokenizer)), "reserve": answers.max_tokens}

    how: dict[str, Any] = {"choose": chosen} if method.method == options.AUTO else {}
    with compiling.watching():
        loaded = model.open(terminal, method, ahead=compiling.ahead(ahead), sizes=sizes, **how)
        row = encoded(loaded.tokenizer)
        compiling.wait()
        with terminal.warnings(), terminal.progress("reading") as update:
            began = time.perf_counter()
            # The bar is erased when the first text comes; there is no spinner after it.
            answer = terminal.stream(
                lambda on_text: loaded.generate(
                    [row],
                    progress=lambda now: update(now.done, now.total),
                    on_text=on_text,
                    **answers.arguments(),
                ),
            )
        asked = began + answer.prefill_seconds
        seconds = answer.prefill_seconds - compiling.clock.seconds(began, asked)
        answer, compiled = compiling.apart(answer, asked), compiling.news()
    terminal.note(closing_note(answer, len(row), seconds, None, compiled))
    if as_json:
        record = answers.record(loaded, answer, {"prompt": len(row)}, seconds, {}, compiled)
        terminal.record({"prompt": text, **record})


def _prompt_text(prompt: str | None) -> str:
    if prompt is None and (sys.stdin is None or sys.stdin.isatty()):
        raise InputError("no prompt given; give PROMPT, or pipe a text in")
    if prompt is None or prompt == "-":
        return read_text("-").removesuffix("\n")
    if os.path.isfile(prompt):
        raise InputError(
            f"{prompt} is a file; to continue its text: jax-longctx generate - < {prompt}"
        )
    if not prompt:
        raise InputError("the prompt is empty; give some text")
    return check_argument("the prompt", prompt)
