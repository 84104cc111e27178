"""`jax-longctx eval`: tasks with known answers, over methods and lengths, with intervals."""

import copy
import dataclasses
import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
import typer.core

from jax_longctx.cli import eval_texts, options, process
from jax_longctx.cli.options import argument, only, option
from jax_longctx.cli.terminal import (
    Terminal,
    check_checkpoint,
    check_folder,
    check_matplotlib,
    read_text,
)
from jax_longctx.errors import InputError
from jax_longctx.origin import MADE_FROM
from jax_longctx.run_spec import run_facts

if TYPE_CHECKING:
    from jax_longctx.api import LongContext
    from jax_longctx.evaluation.config import EvalConfig
    from jax_longctx.evaluation.runner import EvalProgress
    from jax_longctx.replicas import Replicas

# Stands for a checkpoint: the model of `jax-longctx demo`, converted where it is missing.
DEMO = "demo"


eval_app = options.App(
    cls=options.Group, no_args_is_help=True, help="Score methods on tasks with known answers."
)
eval_app.command()(eval_texts.perplexity)
eval_app.command()(eval_texts.agreement)


def _folder() -> Any:
    return option(
        "Folder of rows and report. An interrupted run resumes there, and a run with more methods, "
        "tasks, lengths or trials adds to it.",
        "--output",
        "-o",
        metavar="DIR",
    )


def _run_option(name: str) -> Any:
    """The option of one field of a `RunSpec`, None where it is not given."""
    field = copy.copy(options.RUN[name])
    field.default = None
    return field


@dataclasses.dataclass(frozen=True, kw_only=True)
class Overrides:
    """Options that override `[run]` of a file or suite; None where not given."""

    checkpoint: str | None = option(
        "Converted checkpoint; [bold]demo[/bold] is the demo's model. A suite or file may "
        "name its own.",
        "--checkpoint",
        "-c",
        metavar="DIR",
    )
    batch: int | None = option("Rows of one batch; fewer where memory is short.")
    chunk: int | None = option("Tokens of a prefill pass.")
    dtype: str | None = _run_option("dtype")
    kv: str | None = _run_option("kv")
    weights: str | None = _run_option("weights")
    offload: str | None = _run_option("offload")
    working_set: int | None = _run_option("working_set")
    reading: str | None = _run_option("reading")
    mesh: str | None = _run_option("mesh")
    chat: bool | None = option(
        "The checkpoint's chat template around each prompt; plain completion unless given.",
        "--chat/--no-chat",
        show_default=False,
    )
    seed: int | None = option("Seed of the prompts.")

    def over(self, config: "EvalConfig") -> "EvalConfig":
        """The configuration with the given options in place of its own."""
        given = {key: value for key, value in dataclasses.asdict(self).items() if value is not None}
        return dataclasses.replace(config, run=dataclasses.replace(config.run, **given))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """What is evaluated: a configuration file, or one part given as options."""

    config: Path | None = option("A configuration file in place of the options.", metavar="TOML")
    methods: list[str] | None = options.methods(
        "A method and its settings, L/8 for an eighth of the length; repeat for several. "
        "Exact attention unless given."
    )
    tasks: list[str] | None = option(
        "A task and its settings; repeat for several. [bold]jax-longctx eval tasks[/bold] "
        "lists them.",
        "--task",
        "-t",
        metavar="NAME[:KEY=VALUE,...]",
    )
    lengths: list[int] | None = option(
        "Length of a prompt, room for the answer included; repeat for several.",
        "--length",
        metavar="TOKENS",
    )
    trials: int | None = option(
        "Prompts of each task and length; 20 unless given, and all of [bold]questions[/bold]."
    )

    def read(self) -> "EvalConfig":
        """The file's configuration, or the options'."""
        from jax_longctx.evaluation.config import EvalConfig, Part, RunOptions, read_config

        given = {"--method": self.methods, "--task": self.tasks, "--length": self.lengths}
        given["--trials"] = self.trials
        if self.config is not None:
            for name in filter(given.get, given):
                raise InputError(
                    f"{name} and --config exclude each other; write it in {self.config}"
                )
            return read_config(self.config)
        for name in ("--task", "--length"):
            if not given[name]:
                raise InputError(f"{name} is missing; give at least one, or --config or --suite")
        lengths = tuple(self.lengths or ())
        parts = [
            Part(
                name="part",
                methods=tuple(self.methods or ["full"]),
                tasks=(task,),
                lengths=lengths,
                trials=self._usual(task, lengths[0]) if self.trials is None else self.trials,
            )
            for task in self.tasks or ()
        ]
        return EvalConfig(run=RunOptions(), part=tuple(parts))

    def _usual(self, task: str, length: int) -> int:
        """Trials of a task where none are given; a user's file is there for the first process."""
        from jax_longctx.evaluation.specs import Spec
        from jax_longctx.evaluation.tasks import make_task

        spec = Spec.parse(task)
        made = make_task(spec.name, spec.at(length))
        return made.usual_trials if process.is_leader() else 1


@eval_app.callback(invoke_without_command=True)
@options.command
def _eval(
    context: typer.Context,
    given: Overrides = only("checkpoint", "batch", "chat", "dtype", "mesh"),
    suite: str | None = option(
        "Run a suite in place of a command; [bold]eval suites[/bold] lists them.", metavar="NAME"
    ),
    output: Path | None = _folder(),
    overwrite: bool = options.overwrite("the rows of a folder"),
    replicas: options.ReplicaChoice = options.ReplicaChoice(),
) -> None:
    """Score methods on tasks with known answers.

    [bold]Examples[/bold]

        jax-longctx eval --suite quick --output out

        jax-longctx eval run -c smollm2 -m snapkv:budget=512 -t passkey --length 4096 -o out
    """
    if context.invoked_subcommand is not None:
        alone = Overrides(), options.ReplicaChoice()
        if suite is not None or output is not None or overwrite or (given, replicas) != alone:
            raise InputError(
                f"options before {context.invoked_subcommand} are for --suite, which takes no "
                f"command; write them after it"
            )
        return
    if suite is None:
        raise InputError("--suite is missing; give its name, or a command: see eval --help")
    from jax_longctx.evaluation.config import read_suite

    _run(given.over(read_suite(suite)), output, Terminal(), overwrite, replicas)


@eval_app.command()
@options.command
def run(
    choice: Choice,
    overrides: Overrides,
    output: Path | None = _folder(),
    overwrite: bool = options.overwrite("the rows of a folder"),
    replicas: options.ReplicaChoice = options.ReplicaChoice(),
    as_json: bool = options.as_json(),
) -> None:
    """Run methods on tasks and lengths, and write rows and a report.

    All methods get the same prompts. Rows are saved batch by batch: run the same command again to
    resume; no row is computed twice. The report is DIR/report.html and DIR/report.md.

    [bold]Examples[/bold]

        jax-longctx eval run -c smollm2 -m full -m snapkv:budget=L/8 -t passkey --length 4096 -o out

        jax-longctx eval run --config eval.toml --output out
    """
    _run(overrides.over(choice.read()), output, Terminal(as_json=as_json), overwrite, replicas)


def _run(
    config: "EvalConfig",
    output: Path | None,
    terminal: Terminal,
    overwrite: bool,
    replicas: options.ReplicaChoice,
) -> None:
    """Computes the rows that `output` does not hold yet, and writes the report.

    The bar shows this run's rows alone.
    """
    if output is None:
        raise InputError("--output is missing; name a folder for rows and report")
    if not config.run.checkpoint:
        raise InputError("no model given; name one with --checkpoint")
    if config.run.checkpoint != DEMO:
        check_checkpoint(Path(config.run.checkpoint))
    check_matplotlib("the report")
    with terminal.starting():
        from jax_longctx.evaluation.report import write_about
        from jax_longctx.evaluation.runner import check_config, check_files, run_eval

        # A mistake in the last method is reported before a folder is made and the model loaded.
        check_config(config)
        if process.is_leader():
            check_files(config)
    check_folder(output, "--output")
    model = _open(config, terminal, replicas)
    with terminal.progress("evaluating", "rows") as update:
        told = False

        def show(progress: "EvalProgress") -> None:
            nonlocal told
            if progress.before and not told:
                told = True
                terminal.note(f"{progress.before:,} of {progress.total:,} rows are there already")
            update(progress.done, progress.total - progress.before, progress.doing)

        facts = functools.partial(_facts, config.run.checkpoint)
        watch = show if process.is_leader() else None
        rows = run_eval(model, config, output, facts=facts, overwrite=overwrite, progress=watch)
    if rows is None:
        return
    about = {"title": config.title, "about": config.about, "published": list(config.published)}
    write_about(output, about)
    _report(output, rows, about, terminal)


@eval_app.command()
@options.command
def report(
    folder: Path = argument("A run's --output.", default=..., metavar="DIR", exists=True),
    more: list[Path] | None = argument(
        "Other runs, whose rows are added to the report.", metavar="[DIR ...]"
    ),
    perplexity: list[Path] | None = option(
        "Results of eval perplexity --out, for tables and curves; repeat for several.",
        metavar="JSON",
    ),
    rows_too: bool = option(
        "Print every question too, with its right answers and each method's answer and score.",
        "--rows",
        default=False,
    ),
) -> None:
    """Write the report of the rows so far, also of an unfinished run.

    Rows of further folders of the same model are added: of other methods on the same prompts, say.

    [bold]Example[/bold]

        jax-longctx eval report out --rows
    """
    check_matplotlib("the report")
    terminal = Terminal()
    with terminal.starting():
        from jax_longctx.evaluation.perplexity import perplexity_rows
        from jax_longctx.evaluation.report import read_about
        from jax_longctx.evaluation.rows import check_model, read_rows

    rows = read_rows(folder, *(more or ()))
    for file in perplexity or ():
        try:
            found = json.loads(read_text(str(file)))
            rows += [row for run in found["runs"] for row in perplexity_rows(run)]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise InputError(f"{file} holds no results of eval perplexity: {error}") from error
        check_model(folder, file, found.get(MADE_FROM, {}))
    _report(folder, rows, read_about(folder), terminal, rows_too)


@eval_app.command()
def suites() -> None:
    """List the suites and what each runs.

    [bold]Example[/bold]

        jax-longctx eval suites
    """
    from jax_longctx.evaluation.config import read_suite, suites

    terminal = Terminal()
    for name in suites():
        config = read_suite(name)
        cells = config.cells()
        rows = sum(cell.trials for cell in cells)
        terminal.write(f"{name}: {config.title}; {len(cells):,} cells, {rows:,} rows\n")
        terminal.write(f"    {' '.join(config.about.split())}\n")


def _facts(name: str, model: "LongContext") -> dict[str, Any]:
    """Fields of every row."""
    known = run_facts(model.engine)
    if model.manifest is not None:
        name = f"{name} ({Path(model.manifest.source).name})"
    return {"checkpoint": name, **{k: known[k] for k in ("device", "mesh", "versions")}}


def _open(
    config: "EvalConfig", terminal: Terminal, replicas: options.ReplicaChoice
) -> "LongContext | Replicas":
    checkpoint = Path(config.run.checkpoint)
    if config.run.checkpoint == DEMO:
        from jax_longctx.cli.demo import MODEL_FOLDER, check_installed, prepare_model

        checkpoint = MODEL_FOLDER
        if process.number() is None:
            if (source := check_installed(checkpoint)) is not None:
                prepare_model(source, checkpoint, terminal)
        elif not (checkpoint / "manifest.json").is_file():
            # One process would convert while the others load an incomplete checkpoint.
            raise InputError(
                f"{checkpoint} is not there; run jax-longctx demo once, before the job's processes"
            )
    choice = options.ModelChoice(checkpoint=checkpoint, run=config.run.spec)
    longest = max(max(part.lengths) for part in config.part)
    sizes = {"context": longest, "batch": config.run.batch}
    return replicas.of(choice, resident=True) or choice.open(
        terminal, resident=True, sizes=lambda loaded: sizes
    )


def _report(
    folder: Path,
    rows: list[dict[str, Any]],
    about: dict[str, Any],
    to: Terminal,
    rows_too: bool = False,
) -> None:
    """Writes the report and prints its scores."""
    from jax_longctx.evaluation.report import write_report
    from jax_longctx.evaluation.summary import with_short_labels
    from jax_longctx.evaluation.tables import answers_text, score_table, table_text

    shown = with_short_labels(rows)
    with to.waiting("writing the report"):
        summary = write_report(folder, shown, about)
    if to.as_json:
        for row in rows:
            to.record(row)
    for group in summary.groups:
        table = score_table(group, summary)
        to.write(f"{table.title}\n\n{table_text(table)}\n\n")
    if rows_too:
        to.write(answers_text(shown))
    refused = sum(summary.refused.values())
    if refused:
        to.note(f"{refused:,} prompts were refused; the report says why")
    if short := sum("short_of_memory" in row for row in rows):
        to.note(f"{short:,} of them for want of memory; the same command tries these again")
    to.note(f"{len(rows):,} rows; {folder / 'report.html'}, {folder / 'report.md'}")


@eval_app.command()
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
