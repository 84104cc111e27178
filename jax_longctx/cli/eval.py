"""`jax-longctx eval`: tasks with known answers, over methods and lengths, with intervals."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core

from jax_longctx.cli import eval_run, options, processes
from jax_longctx.cli.inputs import read_text
from jax_longctx.cli.results import check_file, check_plot, save
from jax_longctx.cli.terminal import Terminal
from jax_longctx.errors import InputError
from jax_longctx.evaluation.specs import Spec

if TYPE_CHECKING:
    from jax_longctx.api import LongContext

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
    at = _depths(depths, depth)
    chosen = [parse_method(spec) for spec in methods or ["full"]]
    wanted = lengths or [4096, 8192]
    if min(wanted) < 64:
        raise InputError(f"--length must be at least 64 tokens, got {min(wanted)}")
    source = _source(text, noise)
    terminal = Terminal(as_json=as_json)
    choice = options.ModelChoice(
        checkpoint, *chosen[0], mesh=mesh, dtype=dtype, chunk=chunk, by_layer=by_layer
    )
    model = choice.open(terminal)
    runs = _runs(model, chosen, sorted(wanted), at, trials, batch, source, seed, terminal, out)
    _report(runs, heatmap, terminal)


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
    runs = []
    for file in files:
        try:
            runs.extend(json.loads(read_text(str(file)))["runs"])
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{file} holds no results of eval passkey: {error}") from error
    _report(runs, heatmap, Terminal())


def _depths(count: int | None, given: list[float] | None) -> list[float]:
    """The depths that trials take in turn."""
    if given and count is not None:
        raise InputError("--depths and --depth are two ways to say it; give one")
    count = 10 if count is None else count
    return given or [i / max(count - 1, 1) for i in range(count)]


def _source(text: Path | None, noise: bool) -> str | None:
    """The text to hide the key in; None for the default."""
    if noise and text is not None:
        raise InputError("--noise and --text are two texts; give one")
    if text is not None:
        return read_text(str(text))
    if not noise:
        return None
    from jax_longctx.evaluation.haystack import NOISE

    return NOISE


def parse_method(spec: str) -> tuple[str, list[str]]:
    """`"citrus:budget=1024,chunk=256"` -> `("citrus", ["budget=1024", "chunk=256"])`."""
    parsed = Spec.parse(spec)
    return parsed.name, [f"{key}={value}" for key, value in parsed.settings]


def _runs(
    model: "LongContext",
    chosen: list[tuple[str, list[str]]],
    lengths: list[int],
    depths: list[float],
    each: int,
    batch: int,
    text: str | None,
    seed: int,
    terminal: Terminal,
    out: Path | None,
) -> list[dict[str, Any]]:
    """Every method over the same trials; `out` is written anew after each batch."""
    from jax_longctx.evaluation.compute import engine_of
    from jax_longctx.evaluation.haystack import Haystack, python_topics
    from jax_longctx.evaluation.passkey import make_trials
    from jax_longctx.evaluation.passkey_trials import run_trials
    from jax_longctx.methods import make_method

    tokenizer = model.tokenizer
    haystack = Haystack(text or python_topics(), lambda piece: len(tokenizer.encode(piece)))
    trials = make_trials(haystack, lengths, depths, each, seed)
    # Every method is made before any runs: a mistake in the last one shows at once.
    made = [make_method(name, options.parse_settings(pairs)) for name, pairs in chosen]
    engines = [engine_of(model, method) for method in made]
    runs = []
    for (name, pairs), engine in zip(chosen, engines, strict=True):
        model.engine, rows = engine, []
        facts = options.run_facts(model)
        runs.append({**facts, "given": options.parse_settings(pairs), "seed": seed, "rows": rows})
        with terminal.progress(name, "trials") as update:
            for found in run_trials(engine, tokenizer, trials, batch=batch, progress=update):
                rows.extend(found)
                save({"runs": runs}, out)
    return runs


def _report(runs: list[dict[str, Any]], heatmap: Path | None, terminal: Terminal) -> None:
    from jax_longctx.evaluation import passkey_report as report

    if heatmap is not None and processes.is_leader():
        report.heatmap(runs, heatmap)
    if terminal.as_json:
        for run in runs:
            terminal.record(run)
    else:
        terminal.write(report.markdown(runs))
