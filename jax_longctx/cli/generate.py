"""`jax-longctx generate`: plain completion of a prompt."""

import sys
from typing import Annotated

import typer

from jax_longctx.cli import options
from jax_longctx.cli.answers import (
    answer_options,
    closing_note,
    on_progress,
    seconds_of,
    stream_answer,
)
from jax_longctx.cli.inputs import check_argument, read_text
from jax_longctx.cli.terminal import Terminal
from jax_longctx.errors import InputError
from jax_longctx.memory import peak_memory

__all__ = ["generate"]

Prompt = Annotated[
    str | None,
    typer.Argument(
        help="The text to continue; - reads stdin (its last line break is dropped), which is also "
        "read when PROMPT is left out and stdin is not a terminal.",
        show_default=False,
    ),
]


def generate(
    prompt: Prompt = None,
    *,
    checkpoint: options.Checkpoint,
    method: options.MethodName = None,
    settings: options.Settings = None,
    dtype: options.Dtype = None,
    mesh: options.MeshSizes = None,
    chunk: options.Chunk = 512,
    by_layer: options.ByLayer = False,
    max_tokens: options.MaxTokens = 128,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    repetition_penalty: options.Penalty = 1.0,
    seed: options.Seed = 0,
    stop: options.Stop = None,
    as_json: options.AsJson = False,
) -> None:
    """Continue a prompt, of any length, without chat template.

    [bold]Examples[/bold]

        jax-longctx generate "The capital of France is" -c smollm2 --stop .

        cat notes.txt | jax-longctx generate - -c smollm2 --temperature 0.8
    """
    text = _prompt_text(prompt)
    choice = options.ModelChoice(checkpoint, method, settings, mesh, dtype, chunk, by_layer)
    terminal = Terminal(as_json=as_json)
    answers = answer_options(
        terminal, max_tokens, stop, temperature, top_k, top_p, repetition_penalty, seed
    )
    model = choice.open(terminal)
    with terminal.warnings(), terminal.progress("reading") as update:
        # The bar is gone when the first text comes, so there is no spinner here, also for JSON.
        answer = stream_answer(
            terminal,
            lambda on_text: model.generate(
                text, progress=on_progress(update), on_text=on_text, **answers.arguments()
            ),
        )
    length = len(model.tokenizer.encode(text, bos=True))
    terminal.note(closing_note(answer, length, answer.prefill_seconds, None))
    if as_json:
        terminal.record(
            {
                "prompt": text,
                "answer": answer.text,
                "finish": answer.finish,
                "warning": answer.warning,
                "tokens": {"prompt": length, "answer": len(answer.tokens)},
                "seconds": seconds_of(answer, answer.prefill_seconds),
                "memory": {"peak_bytes": peak_memory()},
                **options.run_facts(model),
                **answers.facts(),
            }
        )


def _prompt_text(prompt: str | None) -> str:
    if prompt is None and (sys.stdin is None or sys.stdin.isatty()):
        raise InputError("no prompt given; give PROMPT, or pipe a text in")
    if prompt is None or prompt == "-":
        return read_text("-").removesuffix("\n")
    if not prompt:
        raise InputError("the prompt is empty; give some text")
    return check_argument("the prompt", prompt)
