"""`jax-longctx methods`: what each method does, from its own metadata."""

from typing import Annotated, Any

import rich.console
import rich.table
import typer

from jax_longctx.cli import options
from jax_longctx.cli.terminal import Terminal

__all__ = ["methods"]


def methods(
    name: Annotated[
        str | None,
        typer.Argument(help="One method, with its settings; all of them unless given."),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """List the long-context methods and what each changes.

    [bold]Examples[/bold]

        jax-longctx methods

        jax-longctx methods NAME

        jax-longctx methods --json
    """
    from jax_longctx.methods import METHODS, describe

    described = [describe(name)] if name is not None else [describe(known) for known in METHODS]
    if as_json:
        for entry in described:
            Terminal(as_json=True).record(entry)
    elif name is not None:
        _show_one(described[0])
    else:
        _show_all(described)


def _show_all(described: list[dict[str, Any]]) -> None:
    table = rich.table.Table(box=None, header_style="bold", pad_edge=False)
    for header in ("method", "changes", "query-aware", "keeps every key", "what it does"):
        table.add_column(header, no_wrap=header == "method")
    for entry in described:
        table.add_row(
            entry["name"],
            entry["phase"],
            _yes(entry["query_aware"]),
            _yes(entry["keeps_all"]),
            entry["summary"],
        )
    rich.console.Console().print(table)


def _show_one(entry: dict[str, Any]) -> None:
    console = rich.console.Console(highlight=False)
    table = rich.table.Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for key, value in entry.items():
        if key != "settings":
            table.add_row(key.replace("_", " "), _yes(value) if value in (True, False) else value)
    console.print(table)
    settings = entry["settings"]
    console.print("\nsettings (--set KEY=VALUE)" if settings else "\nno settings", style="bold")
    for key, about in settings.items():
        console.print(f"  {key}: {about['type']} = {about['default']}", markup=False)


def _yes(value: bool) -> str:
    return "yes" if value else "no"
