"""`jax-longctx methods`: what each method does and costs, from its own metadata and caches."""

from pathlib import Path
from typing import Annotated, Any

import rich.console
import rich.table
import typer

from jax_longctx.cli import options
from jax_longctx.cli.start import starting
from jax_longctx.cli.terminal import Terminal
from jax_longctx.errors import ConfigError, InputError
from jax_longctx.memory import shown_bytes
from jax_longctx.methods import METHODS, describe, make_method
from jax_longctx.models.presets import preset

__all__ = ["methods"]

# Tokens kept free for question and answer in the figures shown.
RESERVE = 256

Name = Annotated[
    str | None,
    typer.Argument(
        callback=options.checked_method,
        autocompletion=options.method_names,
        help="One method, with its settings; all of them unless given.",
    ),
]
Checkpoint = Annotated[
    Path | None,
    typer.Option(
        "--checkpoint",
        "-c",
        metavar="DIR",
        callback=options.checked_checkpoint,
        help="The model's shape from here.",
    ),
]


def methods(
    name: Name = None,
    settings: options.Settings = None,
    model: options.Preset = "llama-3.1-8b",
    checkpoint: Checkpoint = None,
    context: Annotated[int, typer.Option(help="Tokens of context, for the memory shown.")] = 32768,
    batch: Annotated[int, typer.Option(help="Rows, for the memory shown.")] = 1,
    dtype: options.Dtype = "bfloat16",
    as_json: options.AsJson = False,
) -> None:
    """List the long-context methods: what each changes, and what its caches cost.

    Memory is that of keys, values and what goes with them: at the peak of prefill, kept after it
    for more questions, while answering the last one, and read by each decode step.

    [bold]Examples[/bold]

        jax-longctx methods

        jax-longctx methods NAME --set budget=2048 --context 131072

        jax-longctx methods --json
    """
    if settings and name is None:
        raise InputError("--set is for a method's settings; name the method")
    if min(context, batch) < 1:
        raise InputError(f"--context and --batch must be at least 1, got {context} and {batch}")
    terminal = Terminal(as_json=as_json)
    described = []
    with starting(terminal):
        config = _shape(model, checkpoint)
        for each in [name] if name is not None else METHODS:
            entry = describe(each)
            method = make_method(each, options.parse_settings(settings or ()))
            measured = {"context": context, "batch": batch, "dtype": dtype}
            memory = _memory(config, method, context, batch, dtype or "bfloat16")
            described.append(entry | {"memory": measured | memory})
    if as_json:
        for entry in described:
            terminal.record(entry)
    elif name is not None:
        _show_one(described[0])
    else:
        _show_all(described)
        shape = model if checkpoint is None else checkpoint
        rich.console.Console(highlight=False).print(
            f"\nmemory: {shape}, {dtype}, {batch} x {context:,} tokens of context", markup=False
        )


def _shape(model: str, checkpoint: Path | None) -> Any:
    if checkpoint is not None:
        from jax_longctx.models.checkpoint import read_manifest

        return read_manifest(checkpoint).config
    return preset(model)


def _memory(config: Any, method: Any, context: int, batch: int, dtype: str) -> dict[str, Any]:
    """Bytes by name, or why the method does not run on this model."""
    import dataclasses

    import jax
    import jax.numpy as jnp

    from jax_longctx.engine.capacity import footprint
    from jax_longctx.engine.programs import Setup
    from jax_longctx.sharding import make_mesh

    try:
        method.validate(config)
    except ConfigError as error:
        return {"refused": str(error)}
    setup = Setup(config, method, make_mesh(devices=jax.local_devices()), jnp.dtype(dtype), 512)
    found = footprint(setup, batch=batch, context=context, reserve=RESERVE)
    return {f"{key}_bytes": value for key, value in dataclasses.asdict(found).items()}


def _show_all(described: list[dict[str, Any]]) -> None:
    """What each costs, and below it, for lines of 80 characters hold no more, what each does."""
    costs, summaries = (
        rich.table.Table(box=None, header_style="bold", padding=(0, 1, 0, 0)) for _ in range(2)
    )
    for header in ("method", "changes", "asks\nfirst", "keeps\nall"):
        costs.add_column(header, no_wrap=True)
    for header in ("peak", "kept", "answering", "read\na step"):
        costs.add_column(header, justify="right", no_wrap=True)
    summaries.add_column("method", no_wrap=True)
    summaries.add_column("what it does")
    for entry in described:
        answers = (_yes(entry["needs_question"]), _yes(entry["keeps_all"]))
        costs.add_row(entry["name"], entry["phase"], *answers, *_sizes(entry["memory"]))
        summaries.add_row(entry["name"], entry["summary"])
    rich.console.Console(highlight=False).print(costs, "", summaries, sep="\n")


def _sizes(memory: dict[str, Any]) -> list[str]:
    names = ("peak", "kept", "resident", "read")
    return [shown_bytes(memory[f"{n}_bytes"]) if f"{n}_bytes" in memory else "-" for n in names]


def _show_one(entry: dict[str, Any]) -> None:
    console = rich.console.Console(highlight=False)
    table = rich.table.Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for key, value in entry.items():
        if key not in ("settings", "memory"):
            table.add_row(key.replace("_", " "), _yes(value) if value in (True, False) else value)
    memory = entry["memory"]
    if "refused" in memory:
        table.add_row("memory", memory["refused"])
    else:
        what = ("at the peak of prefill", "kept after prefill", "while answering", "read a step")
        for label, size in zip(what, _sizes(memory), strict=True):
            table.add_row(label, size)
        table.add_row("for", f"{memory['batch']} x {memory['context']:,} tokens of context")
    console.print(table)
    settings = entry["settings"]
    console.print("\nsettings (--set KEY=VALUE)" if settings else "\nno settings", style="bold")
    for key, about in settings.items():
        console.print(f"  {key}: {about['type']} = {about['default']}", markup=False)


def _yes(value: bool) -> str:
    return "yes" if value else "no"
