"""`jax-longctx eval`: tasks with known answers, over methods and lengths, with intervals."""

import json
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from jax_longctx.cli import eval_run, options, processes
from jax_longctx.cli.inputs import read_text
from jax_longctx.cli.results import check_file, check_plot, save
from jax_longctx.cli.start import starting
from jax_longctx.cli.terminal import Terminal
from jax_longctx.errors import InputError
from jax_longctx.evaluation.specs import Spec

__all__ = ["eval_app"]


class _Group(typer.core.TyperGroup):
    """Contexts are of the class that the callback below asks for; the stock ones are its base."""

    context_class = typer.Context


eval_app = typer.Typer(
    cls=_Group, no_args_is_help=True, help="Score methods on tasks with known answers."
)

Out = Annotated[
    Path | None, typer.Option(help="Write every answer to this JSON file, as they come.")
]
Heatmap = Annotated[Path | None, typer.Option(help="Write a PNG: share found by length and depth.")]
_Depths = Annotated[
    int | None, typer.Option(min=1, help="Depths from 0 to 1, evenly spaced; 10 unless given.")
]
_Depth = Annotated[
    list[float] | None,
    typer.Option(min=0, max=1, help="A depth from 0 to 1, in place of --depths; repeat."),
]
_Text = Annotated[
    Path | None,
    typer.Option(help="Text to hide the key in; the help texts of Python unless given."),
]


@eval_app.callback(invoke_without_command=True)
def _eval(
    context: typer.Context,
    suite: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Run a suite in place of a command; [bold]eval suites[/bold] lists them.",
        ),
    ] = None,
    output: eval_run.Output = None,
    checkpoint: eval_run.Model = None,
    batch: eval_run.Batch = None,
    chat: eval_run.Chat = None,
    dtype: options.Dtype = None,
    mesh: options.MeshSizes = None,
) -> None:
    """Score methods on tasks with known answers.

    [bold]Examples[/bold]

        jax-longctx eval --suite quick --output out

        jax-longctx eval run -c smollm2 -m snapkv:budget=512 -t passkey --length 4096 -o out
    """
    given = eval_run.Overrides(
        checkpoint=checkpoint, batch=batch, chat=chat, dtype=dtype, mesh=mesh
    )
    if context.invoked_subcommand is not None:
        if suite is not None or output is not None or given != eval_run.Overrides():
            raise InputError(
                f"options before {context.invoked_subcommand} are for --suite, which takes no "
                f"command; write them after it"
            )
        return
    if suite is None:
        raise InputError("--suite is missing; give its name, or a command: see eval --help")
    eval_run.run_suite(suite, given, output, Terminal())


eval_app.command()(eval_run.run)
eval_app.command()(eval_run.report)
eval_app.command()(eval_run.suites)
eval_app.command()(eval_run.tasks)


@eval_app.command()
def passkey(
    *,
    checkpoint: options.Checkpoint,
    methods: options.MethodSpecs = None,
    lengths: Annotated[
        list[int] | None, typer.Option("--length", help="Tokens of a prompt; repeat for several.")
    ] = None,
    depths: _Depths = None,
    depth: _Depth = None,
    trials: Annotated[int, typer.Option(min=1, help="Trials of each length and method.")] = 50,
    batch: Annotated[int, typer.Option(min=1, help="Rows that are read together.")] = 1,
    text: _Text = None,
    noise: Annotated[
        bool, typer.Option("--noise", help="Hide the key in five short sentences, repeated.")
    ] = False,
    seed: options.Seed = 0,
    dtype: options.Dtype = None,
    mesh: options.MeshSizes = None,
    chunk: options.Chunk = 512,
    by_layer: options.ByLayer = False,
    out: Out = None,
    heatmap: Heatmap = None,
    as_json: options.AsJson = False,
) -> None:
    """How often a number hidden in a long text is found.

    All methods get the same prompts; the interval is Wilson's, at 95%.
    A text that is shorter than a prompt starts over.

    [bold]Examples[/bold]

        jax-longctx eval passkey -c smollm2 --length 4096 --trials 20

        jax-longctx eval passkey -c smollm2 -m full -m citrus:budget=1024,chunk=256 --length 8192

        jax-longctx eval passkey -c smollm2 -m reattention --depth 0.1 --depth 0.9 --trials 2
    """
    check_file(out)
    check_plot(heatmap, "--heatmap")
    wanted = sorted(lengths or [4096, 8192])
    if wanted[0] < 64:
        raise InputError(f"--length must be at least 64 tokens, got {wanted[0]}")
    if depth and depths is not None:
        raise InputError("--depths and --depth are two ways to say it; give one")
    if noise and text is not None:
        raise InputError("--noise and --text are two texts; give one")
    terminal = Terminal(as_json=as_json)
    with starting(terminal):
        from jax_longctx.evaluation.config import EvalConfig, Part, RunOptions
        from jax_longctx.evaluation.rows import read_rows
        from jax_longctx.evaluation.runner import Progress, check_config, run_eval
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = "noise" if noise else "topics"
        if text is not None:
            # A copy: its path holds nothing that a task's settings would read otherwise.
            (folder / "text.txt").write_text(read_text(str(text)), encoding="utf-8")
            source = str(folder / "text.txt")
        where = f"at={'/'.join(map(str, depth))}" if depth else f"depths={depths or 10}"
        part = Part(
            name="passkey",
            methods=tuple(methods or ["full"]),
            tasks=(f"passkey:haystack={source},{where}",),
            lengths=tuple(wanted),
            trials=trials,
        )
        how = RunOptions(seed=seed, batch=batch, chunk=chunk, by_layer=by_layer)
        config = EvalConfig(run=how, part=(part,))
        check_config(config)
        choice = options.ModelChoice(
            checkpoint, mesh=mesh, dtype=dtype, chunk=chunk, by_layer=by_layer
        )
        model = choice.open(terminal)
        facts = {"checkpoint": str(checkpoint), **options.run_facts(model)}
        with terminal.progress("passkeys", "trials") as update:

            def show(progress: Progress) -> None:
                update(progress.done, progress.total)
                if out is not None and progress.done and processes.is_leader():
                    save({"rows": read_rows(folder)}, out)

            facts = {key: facts[key] for key in ("checkpoint", "device", "mesh", "versions")}
            rows = run_eval(model, config, folder, facts=facts, progress=show)
    if rows is not None:
        _report(rows, heatmap, terminal)


@eval_app.command()
def table(
    files: Annotated[list[Path], typer.Argument(help="Results that --out wrote.")],
    heatmap: Heatmap = None,
) -> None:
    """One table, and one heatmap, of several results.

    [bold]Example[/bold]

        jax-longctx eval table full.json citrus.json --heatmap passkey.png
    """
    check_plot(heatmap, "--heatmap")
    rows: list[dict[str, Any]] = []
    for file in files:
        try:
            found = json.loads(read_text(str(file)))["rows"]
            known = {row["label"] for row in rows}
            # The same method of two files is two lines.
            rows += [
                row | {"label": f"{row['label']} ({file.stem})"} if row["label"] in known else row
                for row in found
            ]
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{file} holds no results of eval passkey: {error}") from error
    _report(rows, heatmap, Terminal())


def parse_method(spec: str) -> tuple[str, list[str]]:
    """`"citrus:budget=1024,chunk=256"` -> `("citrus", ["budget=1024", "chunk=256"])`."""
    parsed = Spec.parse(spec)
    return parsed.name, [f"{key}={value}" for key, value in parsed.settings]


def _report(rows: list[dict[str, Any]], heatmap: Path | None, terminal: Terminal) -> None:
    """Every row in JSON mode, else the table by length; and the heat map of all rows."""
    from jax_longctx.evaluation.plots import heatmaps
    from jax_longctx.evaluation.tables import lengths_table, table_text

    refused = [row["refused"] for row in rows if "refused" in row]
    if refused:
        said = f"{len(refused):,} of {len(rows):,} prompts were refused, the first: {refused[0]}"
        if len(refused) == len(rows):
            raise InputError(said)
        terminal.note(said)
    # One heat map of all, whatever depths and texts they were asked with.
    rows = [row | {"task_label": "passkey"} for row in rows]
    if heatmap is not None and processes.is_leader():
        for plot in heatmaps(rows):
            heatmap.write_bytes(plot.png())
    if terminal.as_json:
        for row in rows:
            terminal.record(row)
    else:
        terminal.write(table_text(lengths_table(rows)) + "\n")
