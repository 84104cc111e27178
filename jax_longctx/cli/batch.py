"""`jax-longctx batch`: many prompts and questions, JSON lines in, JSON lines out."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from jax_longctx.cli import options, process
from jax_longctx.cli.options import argument, option
from jax_longctx.cli.terminal import Terminal, check_file, per_second
from jax_longctx.errors import InputError
from jax_longctx.files import ADDRESS, check_plain, file_errors

if TYPE_CHECKING:
    from jax_longctx.batch import BatchProgress


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """How rows are read and put into batches."""

    PANEL = "Batch"

    rows: int = option("Most rows of one batch; fewer where memory is short.", default=8)
    chat: bool | None = option(
        "The checkpoint's chat template for questions, or a plain 'Question: ... "
        "Answer:'. The template is used where there is one, and for messages always; prompts are "
        "continued as they are.",
        "--chat/--no-chat",
        show_default=False,
    )
    files_under: str | None = option(
        'Refuse rows whose "file" or "files" are not in this folder, links followed. Give it '
        "where others write the rows: answers show what is in the files.",
        metavar="DIR",
    )


@options.command
def batch(
    *,
    source: str = argument(
        'Rows: {"prompt": ...}, {"messages": [...]} as OpenAI\'s clients send them, or '
        '{"context": ..., "question": ...}, with "file" or "files" (as --file of `ask`, but no '
        'folders) in place of the context and "questions" as you like; an "id" comes back. Or '
        "requests in OpenAI's batch file format. Files are relative to the folder of IN.jsonl, "
        "and may be any that can be read (see --files-under). Or a .parquet file with these "
        "columns; or the address of either, as s3://BUCKET/IN.jsonl (extra 'parquet').",
        default=...,
        metavar="IN.jsonl",
        show_default=False,
    ),
    output: Path = argument(
        "One line for each row, in the same order: answer, or error.",
        default=...,
        metavar="OUT.jsonl",
        show_default=False,
    ),
    model: options.ModelChoice,
    method: options.MethodChoice,
    answers: options.AnswerChoice,
    rows: Rows,
    replicas: options.ReplicaChoice,
    overwrite: bool = options.overwrite("an OUT.jsonl, or an interrupted run of it,"),
    retry_errors: bool = option(
        "Try the rows again that have an error in OUT.jsonl, or in an interrupted run of it. They "
        "may have changed since; answered rows stay.",
        "--retry-errors",
        default=False,
        rich_help_panel=Rows.PANEL,
    ),
) -> None:
    """Answer many prompts or questions, from JSON lines to JSON lines.

    Rows of similar length are computed together and written, in the order of the input, to
    OUT.jsonl.partial, which becomes OUT.jsonl. Run the same command again to go on after an
    interruption. OUT.jsonl.origin says what the answers were made from: an output of another input,
    model, method or options is an error. A row without an answer gets a line with "error", and the
    exit code is 3; mend such rows, or give more memory, and run again with --retry-errors.

    [bold]Examples[/bold]

        jax-longctx batch questions.jsonl answers.jsonl -c llama3 --rows 16

        jax-longctx batch books.jsonl out.jsonl -c llama3 --mesh data=4,tensor=2 -m snapkv
    """
    given = source if ADDRESS in source else Path(source)
    if isinstance(given, Path):
        if given.resolve() == output.resolve():
            raise InputError(f"IN.jsonl and OUT.jsonl are both {source}; choose another output")
        with file_errors(f"{source} cannot be read", "give a file of JSON lines"):
            check_plain(given)
        if given.is_dir():
            raise InputError(f"{source} is a folder; give a file of JSON lines")
    check_file(output, "OUT.jsonl")
    terminal = Terminal()
    with terminal.starting():
        from jax_longctx.batch import BatchOptions, run_batch
        from jax_longctx.batch.source import lines_from

        if given is source:
            # Before the model is loaded.
            next(lines_from(source, 0), None)

    wanted = BatchOptions(**dataclasses.asdict(rows), **answers.arguments())
    loaded = replicas.of(model, method) or model.open(
        terminal,
        method,
        check=lambda loaded: loaded.layout(rows.chat),
        # The texts are read later.
        sizes=lambda loaded: {"batch": rows.rows},
    )
    with terminal.warnings(), terminal.progress("answering", "rows") as update:
        how = {"overwrite": overwrite, "retry_errors": retry_errors}
        outcome = run_batch(loaded, given, output, wanted, progress=_told(terminal, update), **how)
    if outcome is not None:
        terminal.note(_closing(outcome, output))
    if outcome is not None and outcome.errors:
        raise typer.Exit(process.PARTLY)


def _told(terminal: Terminal, update: Callable[..., None]) -> Callable[["BatchProgress"], None]:
    """Shows the progress of a run; once, that it goes on."""
    first = True

    def progress(now: "BatchProgress") -> None:
        nonlocal first
        if first and now.resumed:
            terminal.note(f"going on: {now.before:,} of {now.total:,} rows were answered")
        first = False
        rate = per_second(now.tokens, now.seconds)
        detail = f"{rate:,.0f} tokens/s, {now.errors:,} with an error"
        update(now.done, now.total - now.before, detail)

    return progress


def _closing(outcome: "BatchProgress", output: Path) -> str:
    if not outcome.done and outcome.before == outcome.total:
        return (
            f"{output} is complete already: {outcome.total:,} rows, {outcome.errors:,} with an "
            f"error; remove it to begin anew, or try these rows with --retry-errors"
        )
    rate = per_second(outcome.done, outcome.seconds)
    return (
        f"{outcome.done:,} rows in {outcome.seconds:.1f} s ({rate:.2g} rows/s, "
        f"{per_second(outcome.tokens, outcome.seconds):,.0f} tokens/s); {output} has "
        f"{outcome.total:,} rows, {outcome.errors:,} with an error"
    )
