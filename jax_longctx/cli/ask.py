"""`jax-longctx ask`: one or many questions over one long text."""

from pathlib import Path
from typing import Annotated

import typer

from jax_longctx.cli import options
from jax_longctx.cli.answers import answer_options
from jax_longctx.cli.inputs import read_text
from jax_longctx.cli.request import Request
from jax_longctx.cli.results import check_folder
from jax_longctx.cli.terminal import Terminal

__all__ = ["ask"]

_CONTEXT = "Context"

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="FILE QUESTION",
        help="The text (UTF-8; - for stdin) and what to ask of it. --load-context stands for the "
        "text, --completion for the questions.",
        show_default=False,
    ),
]
Completion = Annotated[
    list[str] | None,
    typer.Option(
        "--completion",
        metavar="STEM",
        help="Instead of a question: the words an answer starts with, which the model continues, "
        "without chat template. The surest way to ask a small model; may be repeated.",
        rich_help_panel=_CONTEXT,
    ),
]
Chat = Annotated[
    bool | None,
    typer.Option(
        "--chat/--no-chat",
        help="The checkpoint's chat template, or a plain 'Question: ... Answer:'. The template is "
        "used where there is one.",
        rich_help_panel=_CONTEXT,
        show_default=False,
    ),
]
SaveContext = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Keep the context, once read, in a new folder: later questions start at once.",
        rich_help_panel=_CONTEXT,
    ),
]
LoadContext = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        exists=True,
        file_okay=False,
        help="Ask of a saved context (same checkpoint, method and settings); give no FILE.",
        rich_help_panel=_CONTEXT,
    ),
]


def ask(
    words: Words = None,
    *,
    checkpoint: options.Checkpoint,
    method: options.MethodName = None,
    settings: options.Settings = None,
    dtype: options.Dtype = None,
    mesh: options.MeshSizes = None,
    chunk: options.Chunk = 512,
    by_layer: options.ByLayer = False,
    completion: Completion = None,
    chat: Chat = None,
    save_context: SaveContext = None,
    load_context: LoadContext = None,
    max_tokens: options.MaxTokens = 128,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    repetition_penalty: options.Penalty = 1.0,
    seed: options.Seed = 0,
    stop: options.Stop = None,
    as_json: options.AsJson = False,
) -> None:
    """Ask one or many questions over one long text.

    The text is read once, whatever the number of questions.
    Answers stream to stdout; progress, timings and memory go to stderr.

    [bold]Two questions over one book[/bold]

        jax-longctx ask book.txt "Who tells it?" "How does it end?" -c llama3

    [bold]A completion that starts with the answer's own words[/bold]

        jax-longctx ask log.txt --completion "The pass key is" -c smollm2

    [bold]Read now, ask later[/bold]

        jax-longctx ask book.txt "Who?" -c llama3 --save-context read

        jax-longctx ask "And why?" -c llama3 --load-context read
    """
    request = Request.parse(words or [], completion or [], chat, save_context, load_context)
    if request.save is not None:
        check_folder(request.save.absolute().parent, "--save-context")
    document = None if request.file is None else read_text(request.file)
    choice = options.ModelChoice(checkpoint, method, settings, mesh, dtype, chunk, by_layer)
    terminal = Terminal(as_json=as_json)
    answers = answer_options(
        terminal, max_tokens, stop, temperature, top_k, top_p, repetition_penalty, seed
    )
    model = choice.open(terminal)
    # Late: it brings tokenizers and templates.
    from jax_longctx.cli.session import Session

    Session(model, request, answers, terminal).run(document)
