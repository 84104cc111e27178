"""`jax-longctx methods`: what each method does and costs, from its own metadata and caches."""

import dataclasses
from pathlib import Path
from typing import Any

from rich.text import Text

from jax_longctx.cli import options
from jax_longctx.cli.options import argument, option
from jax_longctx.cli.terminal import Terminal, check_checkpoint, table
from jax_longctx.errors import ConfigError, InputError
from jax_longctx.memory import shown_bytes
from jax_longctx.methods import METHODS, describe, make_method
from jax_longctx.models.presets import preset
from jax_longctx.run_spec import RunSpec
from jax_longctx.settings import parse_pairs

# Tokens reserved for question and answer in the memory shown.
RESERVE = 256


@options.command
def methods(
    name: str | None = argument(
        "One method, with its settings; all of them unless given.",
        **options.ONE_METHOD,
    ),
    settings: list[str] | None = options.settings(),
    model: str = options.shape(),
    checkpoint: Path | None = option(
        "Take the model's shape from this checkpoint.",
        "--checkpoint",
        "-c",
        metavar="DIR",
        callback=options.checked(check_checkpoint),
    ),
    context: int = option("Tokens of context, for the memory shown.", default=32768),
    batch: int = option("Rows, for the memory shown.", default=1),
    run: RunSpec = options.run(
        "dtype", "kv", "offload", "working_set", dtype=options.dtype(default="bfloat16")
    ),
    as_json: bool = options.as_json(),
) -> None:
    """List the long-context methods: what each changes, and what its caches cost.

    Memory is the KV caches': at the peak of prefill, kept after it for more questions, while
    answering the last one, and read by each decode step.

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
    described, failed = [], []
    with terminal.starting():
        from jax_longctx.models.storage import read_manifest

        config = preset(model) if checkpoint is None else read_manifest(checkpoint).config
        for each in [name] if name is not None else METHODS:
            try:
                entry = describe(each)
            except ConfigError as error:
                if name is not None:
                    raise
                failed.append(str(error))
                continue
            method = make_method(each, parse_pairs(settings or ()))
            measured = {"context": context, "batch": batch, "dtype": run.dtype, "kv": run.kv}
            measured["offload"] = run.offload
            memory = _memory(config, dataclasses.replace(run, method=method), context, batch)
            described.append(entry | {"memory": measured | memory})
    if as_json:
        for entry in described:
            terminal.record(entry)
    elif name is not None:
        terminal.show(*_one(described[0]))
    else:
        shape = model if checkpoint is None else checkpoint
        terminal.show(
            *_all(described),
            f"\nmemory: {shape}, {run.kv or run.dtype}, {batch} x {context:,} tokens of context",
        )
    if failed:
        raise ConfigError("; ".join(failed))


def _memory(config: Any, spec: RunSpec, context: int, batch: int) -> dict[str, Any]:
    """Bytes by name, or why the method does not run on this model."""
    import jax

    from jax_longctx.engine.capacity import footprint, setup_of
    from jax_longctx.sharding import make_mesh

    try:
        mesh = make_mesh(devices=jax.local_devices())
        setup = setup_of(config, dataclasses.replace(spec, mesh=mesh))
    except ConfigError as error:
        return {"refused": str(error)}
    found = footprint(setup, batch=batch, context=context, reserve=RESERVE)
    return {f"{key}_bytes": value for key, value in dataclasses.asdict(found).items()}


def _all(described: list[dict[str, Any]]) -> list[Any]:
    """A table of costs, and a second one of summaries, as lines have 80 characters."""
    headers = ("method", "changes", "asks\nfirst", "keeps\nall")
    sizes = ("peak", "kept", "answering", "read\na step")
    hosts = any(entry["memory"]["offload"] for entry in described)
    if hosts:
        # As lines have 80 characters.
        headers, sizes = headers[:2], (*sizes, "in the\nhost")
    rows = [
        (
            entry["name"],
            entry["phase"],
            *([] if hosts else [_yes(entry["needs_question"]), _yes(entry["keeps_all"])]),
            *_sizes(entry["memory"]),
            *([_size(entry["memory"], "host")] if hosts else []),
        )
        for entry in described
    ]
    costs = table((*headers, *sizes), rows, left=len(headers))
    costs.padding = (0, 1, 0, 0)
    summaries = table(
        ("method", "what it does"), [(e["name"], e["summary"]) for e in described], left=2
    )
    for column in (*costs.columns, summaries.columns[0]):
        column.no_wrap = True
    return [costs, "", summaries]


def _sizes(memory: dict[str, Any]) -> list[str]:
    return [_size(memory, name) for name in ("peak", "kept", "resident", "read")]


def _size(memory: dict[str, Any], name: str) -> str:
    return shown_bytes(memory[f"{name}_bytes"]) if f"{name}_bytes" in memory else "-"


def _one(entry: dict[str, Any]) -> list[Any]:
    rows = [
        (key.replace("_", " "), _yes(value) if value in (True, False) else value)
        for key, value in entry.items()
        if key not in ("settings", "memory")
    ]
    memory, settings = entry["memory"], entry["settings"]
    if "refused" in memory:
        rows.append(("memory", memory["refused"]))
    else:
        what = ("at the peak of prefill", "kept after prefill", "while answering", "read a step")
        rows += zip(what, _sizes(memory), strict=True)
        if memory["offload"]:
            rows.append(("in the host's memory", shown_bytes(memory["host_bytes"])))
        rows.append(("for", f"{memory['batch']} x {memory['context']:,} tokens of context"))
    about = table(("", ""), rows, left=2)
    about.show_header, about.columns[0].no_wrap, about.columns[0].style = False, True, "bold"
    heading = "\nsettings (--set KEY=VALUE)" if settings else "\nno settings"
    lines = [f"  {key}: {about['type']} = {about['default']}" for key, about in settings.items()]
    return [about, Text(heading, style="bold"), *lines]


def _yes(value: bool) -> str:
    return "yes" if value else "no"
