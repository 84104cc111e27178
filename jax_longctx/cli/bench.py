"""`jax-longctx bench`: measured times beside a baseline and a roofline of the same run."""

import importlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import typer

from jax_longctx.bench.asked import Decode, Prefill, Serve
from jax_longctx.cli import bench_tables, options, process
from jax_longctx.cli.options import marked, option
from jax_longctx.cli.terminal import (
    Terminal,
    check_file,
    save,
)
from jax_longctx.errors import InputError
from jax_longctx.models.presets import preset
from jax_longctx.run_spec import RunSpec
from jax_longctx.settings import AUTO

# Fields of a run that say what is stored, and where, and what a pass takes.
STORED = ("chunk", "kv", "weights", "offload", "working_set")

bench_app = options.App(
    cls=options.Group,
    no_args_is_help=True,
    help="Measure on this device, as ratios in one run.",
)


_CHUNK = option("Tokens of a prefill pass.", default=8192)
_MESH = options.mesh(
    "Devices, e.g. tensor=4 or seq=2,tensor=2, without data, or auto. One device unless given."
)
_METHODS = "A method and its settings; repeat for several."
_COMPARED = {
    "methods": options.methods(f"{_METHODS} All methods unless given."),
    "model": options.shape(names=("--model", "--preset")),
}
_LAYERS = option("Time this many layers, and one, and scale to all; all unless given.")


def _measure(
    module: str,
    asked: Any,
    spec: RunSpec,
    output: options.Output,
    shown: Callable[[Any], Iterable[Any]],
    **sizes: int,
) -> None:
    """Runs a module of `jax_longctx.bench`, and hands over what it measured."""
    terminal = output.terminal()
    with terminal.starting():
        run = importlib.import_module(f"jax_longctx.bench.{module}").run
        if spec.mesh == AUTO:
            from jax_longctx.planning.plan import on_best_mesh

            how: dict[str, Any] = {"divide": {"data": 1}, "say": terminal.note, **sizes}
            spec = on_best_mesh(spec.over("bfloat16"), preset(asked.model), **how)
    result = run(asked, spec, terminal.note)
    output.hand_over(result, shown)


@bench_app.command()
@options.command
def kernels(
    output: options.Output,
    only: str = option("Run the cases whose name holds this, e.g. 'topk_scores'.", default=""),
    shrink: int = option("Take 1/N of the slots, to try it on a small device.", default=1, min=1),
    repeats: int = option("Timed loops; the median counts.", default=20, min=1),
) -> None:
    """Time every kernel on this device, random bfloat16 inputs.

    The roofline is what a large copy and a large matmul reach in the same run.

    [bold]Example[/bold]

        jax-longctx bench kernels --only decode_attention --out kernels.json
    """
    terminal = output.terminal()
    with terminal.starting():
        from jax_longctx.bench.kernels import markdown, run

    result = run(only=only, shrink=shrink, repeats=repeats, say=terminal.note)
    output.save(result)
    terminal.records([result], lambda _: markdown(result))


@bench_app.command()
@options.command
def decode(
    output: options.Output,
    asked: Decode = marked(
        **_COMPARED,
        random_cache=option(
            "Draw the cache at random instead of reading a context (methods that keep all keys).",
            default=False,
        ),
        kernels=option(
            "Count the kernels of a step in a profile (on GPUs).",
            "--kernels/--no-kernels",
            default=True,
        ),
        blocks=option("Blocks of 32 steps that are timed.", default=5, min=1),
        layers=_LAYERS,
        cases=option(
            "E.g. 3x131072, or 131072 for the most rows that fit the memory; repeat for several.",
            "--case",
            metavar="[BATCHx]CONTEXT",
        ),
    ),
    spec: RunSpec = options.run(*STORED, "mesh", chunk=_CHUNK, mesh=_MESH),
) -> None:
    """Time a decode step of methods beside full attention's, random bfloat16 weights.

    All rows are copies of one, so that a method prefills one context. The most rows that fit are
    found by the engine's own arithmetic and confirmed by a run. Tokens a second are of a device.
    The limit is the time to read the bytes of a step, weights included, at the bandwidth of a copy
    in the same run. On a GPU a profile counts the kernels of a step. The gaps are its wall time
    less the kernels' times.

    [bold]Examples[/bold]

        jax-longctx bench decode --out decode.json

        jax-longctx bench decode -m refreshkv:schedule=fixed,stride=10 --case 3x131072

        jax-longctx bench decode -m snapkv -m streaming-llm --case 32768 --case 131072
    """
    rows, tokens = zip(*asked.sizes, strict=True)
    sizes = {"context": max(tokens), "batch": max(count or 1 for count in rows)}
    _measure("decode", asked, spec, output, bench_tables.steps, **sizes)


@bench_app.command()
@options.command
def serve(
    output: options.Output,
    asked: Serve = marked(
        methods=options.methods(f"{_METHODS} full and quest unless given."),
        model=_COMPARED["model"],
        context=option("Tokens of the text that all rows ask about.", default=131072, min=1),
        rows=option("Answers that are decoded together.", default=16, min=1),
        question=option("Tokens of each question.", default=32, min=1),
        read=option(
            "Tokens of another text that is prefilled between decode blocks; 0 for none. As "
            "--context unless given.",
            metavar="TOKENS",
            min=0,
        ),
        blocks=option("Blocks of 32 steps that are timed.", default=5, min=1),
        random_cache=option(
            "Draw the context's cache at random instead of reading it (methods that keep all "
            "keys).",
            default=True,
        ),
    ),
    spec: RunSpec = options.run("chunk", "kv", "weights", "mesh", mesh=_MESH),
) -> None:
    """Time many answers over one context, and decode beside prefill, random bfloat16 weights.

    Rows share the context where the method can. Beside them stands one row alone in the same run.
    Then another text is prefilled between decode blocks, at the server's pace: the gaps
    between a row's tokens, and the speed of prefill beside decode and alone.

    [bold]Example[/bold]

        jax-longctx bench serve --model llama-3.1-8b --context 131072 --rows 16 --out serve.json
    """
    _measure("serve", asked, spec, output, bench_tables.served, context=asked.context)


@bench_app.command()
@options.command
def prefill(
    output: options.Output,
    asked: Prefill = marked(
        methods=options.methods(f"{_METHODS} Speed is relative to the first.", default=...),
        model=options.shape(),
        layers=_LAYERS,
        cases=option(
            "Tokens of context, question and answer, and Star's block; repeat for several.",
            "--case",
            metavar="TOKENS[:BLOCK]",
        ),
        runs=option("Runs; the median counts.", default=3, min=1),
        question=option(
            "Tokens of the question, which some methods read beside each chunk.",
            default=1,
            min=1,
        ),
    ),
    spec: RunSpec = options.run(
        "mesh",
        "reading",
        *STORED,
        mesh=options.mesh("Devices, e.g. seq=4, or auto; all along seq unless given."),
        chunk=option("Tokens of a prefill pass on each shard.", default=8192),
    ),
) -> None:
    """Time to first token and memory of methods, random bfloat16 weights.

    Beside each time is the time that the method's FLOPs on the busiest device take, at the rates of
    projections and of attention measured in the same run; beside the most that a GPU or TPU held in
    a run of its own, what the engine says of the caches.

    [bold]Example[/bold]

        jax-longctx bench prefill -m ring -m ring:order=zigzag -m star
            -m star:anchor_kv=broadcast --case 131072:32768 --mesh seq=4 --layers 8

        jax-longctx bench prefill -m infllm --case 1048576 --kv int8 --offload host
    """
    longest = max(tokens for tokens, _ in asked.sizes)
    _measure("prefill", asked, spec, output, bench_tables.first_tokens, context=longest)


@bench_app.command()
@options.command
def tpu_check(
    out: Path = option(
        "Write everything to this JSON file.", "--out", "-o", default=Path("tpu-check.json")
    ),
    interpret: bool = option(
        "Run the kernels' checks alone, in an interpreter on a CPU.", "--interpret", default=False
    ),
    minutes: float = option("What no time is left for is left out.", default=10.0),
    as_json: bool = options.as_json(),
) -> None:
    """Check every TPU kernel on this TPU, and time kernels and steps beside their limits.

    It takes ten minutes. The file holds all that it found. Exit code 3: a check failed.

    [bold]Example[/bold]

        jax-longctx bench tpu-check
    """
    check_file(out)
    if minutes <= 0:
        raise InputError(f"--minutes must be above 0, got {minutes:g}")
    terminal = Terminal(as_json=as_json)
    with terminal.starting():
        from jax_longctx.bench.tpu_check import passed, run

    result = run(interpret=interpret, minutes=minutes, say=terminal.note)
    save(result, out)
    terminal.result(result, bench_tables.tpu_check)
    terminal.note(f"{out} holds all of it; please attach it to an issue")
    if not passed(result):
        raise typer.Exit(process.PARTLY)
