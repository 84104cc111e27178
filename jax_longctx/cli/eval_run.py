"""`jax-longctx eval run`, `eval --suite` and `eval report`: methods on tasks, rows and a report."""

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jax_longctx.cli import options, processes
from jax_longctx.cli.inputs import read_text
from jax_longctx.cli.results import check_folder, check_matplotlib
from jax_longctx.cli.start import starting
from jax_longctx.cli.terminal import Terminal
from jax_longctx.errors import InputError

if TYPE_CHECKING:
    from jax_longctx.api import LongContext
    from jax_longctx.evaluation.config import EvalConfig
    from jax_longctx.evaluation.runner import Progress

__all__ = [
    "Batch",
    "Chat",
    "Model",
    "Output",
    "Overrides",
    "report",
    "run",
    "run_suite",
    "suites",
    "tasks",
]

# In place of a checkpoint: the model of `jax-longctx demo`, converted where it is not there.
DEMO = "demo"

Model = Annotated[
    str | None,
    typer.Option(
        "--checkpoint",
        "-c",
        metavar="DIR",
        help="Converted checkpoint; [bold]demo[/bold] is the demo's model. A suite or file may "
        "name its own.",
    ),
]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="DIR",
        help="Where rows and report go. A run that was ended goes on there, and one with more "
        "methods, tasks, lengths or trials adds to it.",
    ),
]
Batch = Annotated[
    int | None,
    typer.Option(help="Rows that are computed together; fewer where memory asks for it."),
]
Chat = Annotated[
    bool | None,
    typer.Option(
        "--chat/--no-chat",
        help="The checkpoint's chat template around each prompt; plain completion unless given.",
        show_default=False,
    ),
]
_Config = Annotated[
    Path | None,
    typer.Option(metavar="TOML", help="A file that says all of it, in place of the options."),
]
_Methods = Annotated[
    list[str] | None,
    typer.Option(
        "--method",
        "-m",
        metavar="NAME[:KEY=VALUE,...]",
        callback=options.checked_methods,
        autocompletion=options.method_names,
        help="A method and its settings, L/8 for an eighth of the length; repeat for several. "
        "Exact attention unless given.",
    ),
]
_Tasks = Annotated[
    list[str] | None,
    typer.Option(
        "--task",
        "-t",
        metavar="NAME[:KEY=VALUE,...]",
        help="A task and its settings; repeat for several. [bold]jax-longctx eval tasks[/bold] "
        "lists them.",
    ),
]
_Lengths = Annotated[
    list[int] | None,
    typer.Option(
        "--length",
        metavar="TOKENS",
        help="Of a prompt, room for the answer included; repeat for several.",
    ),
]
_Trials = Annotated[
    int | None, typer.Option(help="Prompts of each task and length; 20 unless given.")
]
_Seed = Annotated[int | None, typer.Option(help="Of the prompts.")]
_Chunk = Annotated[int | None, typer.Option(help="Tokens read in one pass.")]
_ByLayer = Annotated[
    bool | None,
    typer.Option(
        "--by-layer/--whole",
        help="Compile one layer in place of all: ready sooner, slower from then on. All unless "
        "given.",
        show_default=False,
    ),
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Overrides:
    """Options that win over a file's or suite's `[run]`; None where they were not given."""

    checkpoint: str | None = None
    batch: int | None = None
    chunk: int | None = None
    dtype: str | None = None
    mesh: str | None = None
    chat: bool | None = None
    seed: int | None = None
    by_layer: bool | None = None

    def over(self, config: "EvalConfig") -> "EvalConfig":
        """The configuration with these in place of its own."""
        given = {key: value for key, value in dataclasses.asdict(self).items() if value is not None}
        return dataclasses.replace(config, run=dataclasses.replace(config.run, **given))


def run(
    *,
    config: _Config = None,
    checkpoint: Model = None,
    methods: _Methods = None,
    tasks: _Tasks = None,
    lengths: _Lengths = None,
    trials: _Trials = None,
    output: Output = None,
    batch: Batch = None,
    chat: Chat = None,
    seed: _Seed = None,
    dtype: options.Dtype = None,
    mesh: options.MeshSizes = None,
    chunk: _Chunk = None,
    by_layer: _ByLayer = None,
    as_json: options.AsJson = False,
) -> None:
    """Run methods on tasks and lengths, and write rows and a report.

    All methods get the same prompts. Rows are kept batch by batch: the same command goes on where
    it was ended, and computes no row twice. The report is DIR/report.html and DIR/report.md.

    [bold]Examples[/bold]

        jax-longctx eval run -c smollm2 -m full -m snapkv:budget=L/8 -t passkey --length 4096 -o out

        jax-longctx eval run --config eval.toml --output out
    """
    overrides = Overrides(
        checkpoint=checkpoint,
        batch=batch,
        chunk=chunk,
        dtype=dtype,
        mesh=mesh,
        chat=chat,
        seed=seed,
        by_layer=by_layer,
    )
    chosen = _chosen(config, methods, tasks, lengths, trials)
    run_config(overrides.over(chosen), output, Terminal(as_json=as_json))


def _chosen(
    config: Path | None,
    methods: list[str] | None,
    tasks: list[str] | None,
    lengths: list[int] | None,
    trials: int | None,
) -> "EvalConfig":
    """The file's configuration, or that of the options."""
    from jax_longctx.evaluation.config import EvalConfig, Part, RunOptions, read_config

    given = {"--method": methods, "--task": tasks, "--length": lengths, "--trials": trials}
    if config is not None:
        for name, value in given.items():
            if value:
                raise InputError(f"{name} and --config exclude each other; write it in {config}")
        return read_config(config)
    for name in ("--task", "--length"):
        if not given[name]:
            raise InputError(f"{name} is missing; give at least one, or --config or --suite")
    part = Part(
        name="part",
        methods=tuple(methods or ["full"]),
        tasks=tuple(tasks or ()),
        lengths=tuple(lengths or ()),
        trials=20 if trials is None else trials,
    )
    return EvalConfig(run=RunOptions(), part=(part,))


def run_suite(name: str, overrides: Overrides, output: Path | None, terminal: Terminal) -> None:
    """Runs a suite of the library's."""
    from jax_longctx.evaluation.suite import read_suite

    run_config(overrides.over(read_suite(name)), output, terminal)


def run_config(config: "EvalConfig", output: Path | None, terminal: Terminal) -> None:
    """Computes what `output` does not hold yet, and writes the report."""
    if output is None:
        raise InputError("--output is missing; name a folder for rows and report")
    if not config.run.checkpoint:
        raise InputError("no model given; name one with --checkpoint")
    if config.run.checkpoint != DEMO:
        options.checked_checkpoint(Path(config.run.checkpoint))
    check_matplotlib("the report")
    with starting(terminal):
        from jax_longctx.evaluation.runner import check_config, run_eval

        # A mistake in the last method shows before a folder is made and the model loaded.
        check_config(config)
    check_folder(output, "--output")
    model = _open(config, terminal)
    about = {"title": config.title, "about": config.about, "published": list(config.published)}
    with _shown(terminal) as update:
        rows = run_eval(
            model,
            config,
            output,
            facts=_facts(model, config),
            progress=update if processes.is_leader() else None,
        )
    if rows is None:
        return
    from jax_longctx.evaluation.report import write_about

    write_about(output, about)
    _report(output, rows, about, terminal)


def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", exists=True, help="A run's --output.")],
    more: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[DIR ...]", help="Other runs, whose rows join the report."),
    ] = None,
    perplexity: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="JSON",
            help="What eval perplexity --out wrote, for tables and curves; repeat for several.",
        ),
    ] = None,
) -> None:
    """Write the report of rows that are there, also of a run that is not finished.

    Rows of further folders of the same model join it: other methods on the same prompts, say.

    [bold]Example[/bold]

        jax-longctx eval report out
    """
    check_matplotlib("the report")
    terminal = Terminal()
    with starting(terminal):
        from jax_longctx.evaluation.report import read_about
        from jax_longctx.evaluation.rows import read_rows

    rows = read_rows(folder, *(more or ()))
    rows += [row for file in perplexity or () for row in _perplexity(file)]
    _report(folder, rows, read_about(folder), terminal)


def _perplexity(file: Path) -> list[dict[str, Any]]:
    """The rows of what `eval perplexity` wrote."""
    from jax_longctx.evaluation.perplexity import perplexity_rows

    try:
        runs = json.loads(read_text(str(file)))["runs"]
        return [row for run in runs for row in perplexity_rows(run)]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{file} holds no results of eval perplexity: {error}") from error


def suites() -> None:
    """List the suites: what each runs.

    [bold]Example[/bold]

        jax-longctx eval suites
    """
    from jax_longctx.evaluation import suite

    terminal = Terminal()
    for name in suite.suites():
        config = suite.read_suite(name)
        cells = config.cells()
        rows = sum(cell.trials for cell in cells)
        terminal.write(f"{name}: {config.title}; {len(cells):,} cells, {rows:,} rows\n")
        terminal.write(f"    {' '.join(config.about.split())}\n")


def _open(config: "EvalConfig", terminal: Terminal) -> "LongContext":
    checkpoint = Path(config.run.checkpoint)
    if config.run.checkpoint == DEMO:
        from jax_longctx.cli.demo import MODEL_FOLDER, prepare_model

        checkpoint = MODEL_FOLDER
        if processes.process() is None:
            prepare_model(checkpoint, terminal)
        elif not (checkpoint / "manifest.json").is_file():
            # One process converts; the others would load what is not whole yet.
            raise InputError(
                f"{checkpoint} is not there; run jax-longctx demo once, before the job's processes"
            )
    choice = options.ModelChoice(
        checkpoint,
        mesh=config.run.mesh,
        dtype=config.run.dtype,
        chunk=config.run.chunk,
        by_layer=config.run.by_layer,
    )
    return choice.open(terminal)


def _facts(model: "LongContext", config: "EvalConfig") -> dict[str, Any]:
    """What every row says of the run."""
    facts = options.run_facts(model)
    name = config.run.checkpoint
    if model.manifest is not None:
        name = f"{name} ({Path(model.manifest.source).name})"
    return {"checkpoint": name, **{key: facts[key] for key in ("device", "mesh", "versions")}}


@contextlib.contextmanager
def _shown(terminal: Terminal) -> Iterator[Any]:
    """Progress as a bar of rows with the time left, of this run's rows alone."""
    doing = [""]
    with terminal.progress("evaluating", "rows", lambda: doing[0]) as update:

        def show(progress: "Progress") -> None:
            doing[0] = progress.doing
            if progress.before and not progress.done:
                terminal.note(f"{progress.before:,} of {progress.total:,} rows are there already")
            update(progress.done, progress.total - progress.before)

        yield show


def _report(folder: Path, rows: list[dict[str, Any]], about: dict[str, Any], to: Terminal) -> None:
    """Writes the report, and shows its scores."""
    from jax_longctx.evaluation.report import write_report
    from jax_longctx.evaluation.tables import score_table, table_text

    with to.waiting("writing the report"):
        summary = write_report(folder, rows, about)
    if to.as_json:
        for row in rows:
            to.record(row)
    for group in summary.groups:
        table = score_table(group, summary)
        to.write(f"{table.title}\n\n{table_text(table)}\n\n")
    refused = sum(summary.refused.values())
    if refused:
        to.note(f"{refused:,} prompts were refused; the report says why")
    if short := sum("short_of_memory" in row for row in rows):
        to.note(f"{short:,} of them for want of memory; the same command tries these again")
    to.note(f"{len(rows):,} rows; {folder / 'report.html'}, {folder / 'report.md'}")


def tasks() -> None:
    """List the tasks and their settings.

    [bold]Example[/bold]

        jax-longctx eval tasks
    """
    from jax_longctx.evaluation.tasks import TASKS, describe

    terminal = Terminal()
    for name in TASKS:
        about: Any = describe(name)
        terminal.write(f"{name}: {about['about']} (score: {about['metric']})\n")
        for key, setting in about["settings"].items():
            terminal.write(f"    {key}: {setting['type']} = {setting['default']!r}\n")
