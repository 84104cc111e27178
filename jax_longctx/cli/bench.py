"""`jax-longctx bench`: measured times beside a baseline and a roofline, from one run."""

from pathlib import Path
from typing import Annotated, Any

import rich.console
import rich.table
import typer

from jax_longctx.cli import options, processes
from jax_longctx.cli.eval import parse_method
from jax_longctx.cli.results import check_file, check_folder, check_matplotlib, hand_over
from jax_longctx.cli.start import starting
from jax_longctx.cli.terminal import Terminal
from jax_longctx.errors import InputError
from jax_longctx.memory import shown_bytes

bench_app = typer.Typer(no_args_is_help=True, help="Measure on this device, as ratios in one run.")

Methods = Annotated[
    list[str],
    typer.Option(
        "--method",
        "-m",
        metavar="NAME[:KEY=VALUE,...]",
        callback=options.checked_methods,
        autocompletion=options.method_names,
        help="A method and its settings; repeat for several. The others' speed is told against the "
        "first (prefill) or against full attention (decode).",
    ),
]
Layers = Annotated[
    int | None,
    typer.Option(help="Time so many layers, and one, and scale; all of the shape's if not."),
]
Chunk = Annotated[int, typer.Option(min=1, help="Tokens a prefill pass takes of a shard.")]
Runs = Annotated[int, typer.Option(min=1, help="Runs; the median counts.")]
Out = Annotated[Path | None, typer.Option(help="Write everything to this JSON file.")]


@bench_app.callback()
def _bench() -> None:
    """Measure on this device, as ratios in one run."""


@bench_app.command()
def kernels(
    only: Annotated[
        str, typer.Option(help="Run the cases whose name holds this, e.g. 'topk_scores'.")
    ] = "",
    shrink: Annotated[
        int, typer.Option(min=1, help="Take 1/N of the slots, to try it on a small device.")
    ] = 1,
    repeats: Annotated[int, typer.Option(min=1, help="Timed loops; the median counts.")] = 20,
    out: Annotated[
        Path | None,
        typer.Option(help="Write kernels.json, kernels.md and kernels.png to this folder."),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Time every kernel on this device, random bfloat16 inputs.

    The roofline is what a large copy and a large matmul reach in the same run.

    [bold]Example[/bold]

        jax-longctx bench kernels --only decode_attention --out results
    """
    check_folder(out)
    if out is not None:
        check_matplotlib("--out")
    terminal = Terminal(as_json=as_json)
    with starting(terminal):
        from jax_longctx.bench.kernels import markdown, plot, run

    result = run(only=only, shrink=shrink, repeats=repeats, say=terminal.note)
    record = None
    if out is not None and processes.is_leader():
        (out / "kernels.md").write_text(markdown(result), encoding="utf-8")
        plot(result, out / "kernels.png")
        record = out / "kernels.json"
    hand_over(terminal, result, record, lambda result: terminal.write(markdown(result)))


@bench_app.command()
def e2e(
    model: options.Preset = "llama-3.1-8b",
    context: Annotated[
        list[int] | None, typer.Option(help="Context length in tokens; repeat for several.")
    ] = None,
    chunk: Chunk = 8192,
    runs: Runs = 3,
    peer: Annotated[
        bool, typer.Option(help="Also run transformers (needs PyTorch with CUDA).")
    ] = True,
    compiled: Annotated[
        bool, typer.Option(help="Also transformers' compiled decode over a static cache.")
    ] = False,
    out: Out = None,
    as_json: options.AsJson = False,
) -> None:
    """Time to first token and time a decode step, full attention, random bfloat16 weights.

    The baseline is transformers with sdpa in the same run. The roofline of a decode step is the
    bytes it must read (every weight but the embedding table, and the valid keys and values) over
    the copy bandwidth measured in the same run.

    [bold]Examples[/bold]

        jax-longctx bench e2e --context 32768 --context 131072

        jax-longctx bench e2e --model llama-3.2-1b --context 8192 --no-peer
    """
    check_file(out)
    terminal = Terminal(as_json=as_json)
    with starting(terminal):
        from jax_longctx.bench.e2e import run

    result = run(
        model=model,
        contexts=context or [32768, 131072],
        chunk=chunk,
        runs=runs,
        with_peer=peer,
        peer_options=("--compile",) if compiled else (),
        say=terminal.note,
    )
    hand_over(terminal, result, out, _show_e2e)


def _show_e2e(result: dict[str, Any]) -> None:
    rows = []
    for row in result["rows"]:
        cells = [row["what"], f"{row['context']:,}", _time(row["seconds"])]
        against = ["-", "-", "-"]
        if row["baseline_seconds"] is not None:
            against = [row["baseline"], _time(row["baseline_seconds"]), f"{row['ratio']:.2f}"]
        rows.append([*cells, *against])
    console = rich.console.Console(highlight=False)
    console.print(_table(("what", "context", "time", "against", "its time", "ours / its"), rows))
    console.print(
        f"{result['device']}, {result['model']} in bfloat16, batch 1, chunk {result['chunk']:,}, "
        f"jax {result['jax']}; copy {result['copy_bandwidth'] / 1e12:.2f} TB/s"
    )


@bench_app.command()
def decode(
    methods: Methods,
    model: options.Preset = "llama-3.1-8b",
    cases: Annotated[
        list[str] | None,
        typer.Option("--case", metavar="BATCHxCONTEXT", help="E.g. 3x131072; repeat for several."),
    ] = None,
    blocks: Annotated[int, typer.Option(min=1, help="Blocks of 32 steps that are timed.")] = 5,
    layers: Layers = None,
    random_cache: Annotated[
        bool,
        typer.Option(
            help="Draw the cache at random instead of reading a context (append-only methods)."
        ),
    ] = False,
    out: Out = None,
    as_json: options.AsJson = False,
) -> None:
    """Time a decode step of methods beside full attention's, random bfloat16 weights.

    The prediction is the ratio of bytes read a step, weights included.

    [bold]Example[/bold]

        jax-longctx bench decode -m refreshkv:schedule=fixed,stride=10 --case 3x131072
    """
    check_file(out)
    chosen = _methods(methods)
    sizes = [_numbers(text, "x", "BATCHxCONTEXT, as 3x131072") for text in cases or ["1x32768"]]
    terminal = Terminal(as_json=as_json)
    with starting(terminal):
        from jax_longctx.bench.decode import run

    result = run(
        model=model,
        methods=chosen,
        cases=[(batch, context) for batch, context in sizes],
        blocks=blocks,
        random_cache=random_cache,
        layers=layers,
        say=terminal.note,
    )
    hand_over(terminal, result, out, _show_decode)


def _show_decode(result: dict[str, Any]) -> None:
    rows = []
    for row in result["rows"]:
        cells = [_name(row), f"{row['batch']} x {row['context']:,}"]
        if "failed" in row:
            rows.append([*cells, row["failed"]])
            continue
        ratios = row["seconds"] / row["roofline_seconds"], row["speedup"], row["predicted_speedup"]
        shown = [f"{ratio:.2f}x" for ratio in ratios]
        rows.append([*cells, f"{row['seconds'] * 1e3:.2f} ms", *shown, shown_bytes(row["peak"])])
    headers = ("method", "batch x context", "step", "of roofline", "faster", "predicted", "peak")
    console = rich.console.Console(highlight=False)
    console.print(_table(headers, rows))
    console.print(
        f"{result['device']}, {result['model']} in bfloat16, {_layers_shown(result['layers'])}; "
        f"jax {result['jax']}; copy {result['copy_bandwidth'] / 1e12:.2f} TB/s"
    )


@bench_app.command()
def prefill(
    methods: Methods,
    model: options.Preset = "llama-3.1-8b",
    cases: Annotated[
        list[str] | None,
        typer.Option(
            "--case",
            metavar="TOKENS[:BLOCK]",
            help="Tokens of context, question and answer, and Star's block; repeat for several.",
        ),
    ] = None,
    mesh: Annotated[
        str | None,
        typer.Option(metavar="SIZES", help="Devices, e.g. seq=4; all along seq unless given."),
    ] = None,
    layers: Layers = None,
    runs: Runs = 3,
    blocks: Annotated[
        int, typer.Option(min=0, help="Blocks of 32 decode steps that are timed; 0 times none.")
    ] = 2,
    chunk: Chunk = 8192,
    out: Out = None,
    as_json: options.AsJson = False,
) -> None:
    """Time to first token of methods over several devices, random bfloat16 weights.

    Beside each time stands what the method's FLOPs on the busiest device take at the rates of
    projections and of attention that are measured in the same run.

    [bold]Example[/bold]

        jax-longctx bench prefill -m ring -m ring:order=zigzag -m star
            -m star:anchor_kv=broadcast --case 131072:32768 --mesh seq=4 --layers 8
    """
    chosen = _methods(methods)
    expected = "TOKENS or TOKENS:BLOCK, as 131072:32768"
    sizes = [
        _numbers(text, ":" if ":" in text else None, expected)
        for text in cases or ["32768:8192", "131072:32768"]
    ]
    check_file(out)
    terminal = Terminal(as_json=as_json)
    with starting(terminal):
        import jax

        from jax_longctx.bench.prefill import Case, run
        from jax_longctx.sharding import MESH_AXES, make_mesh, parse_mesh

    given = {"seq": len(jax.devices())} if mesh is None else parse_mesh(mesh)
    data, seq, tensor = (given.get(axis, 1) for axis in MESH_AXES)
    result = run(
        model=model,
        methods=chosen,
        cases=[Case(*case) for case in sizes],
        mesh=make_mesh(data, seq, tensor),
        layers=layers,
        runs=runs,
        blocks=blocks,
        chunk=chunk,
        say=terminal.note,
    )
    hand_over(terminal, result, out, _show_prefill)


def _show_prefill(result: dict[str, Any]) -> None:
    console = rich.console.Console(highlight=False)
    times, work = [], []
    for row in result["rows"]:
        cells = [_name(row), f"{row['tokens']:,}"]
        if "failed" in row:
            times.append([*cells, row["failed"]])
            continue
        step = _time(row["step"]) if "step" in row else "-"
        merging = f"{row['merge_share']:.1%}" if "merge_share" in row else "-"
        times.append([*cells, _time(row["first_token"]), f"{row['speedup']:.2f}x", step, merging])
        flops = [f"{row[kind] / 1e12:,.4g}" for kind in ("linear", "attention")]
        ratio = [_time(row["model_seconds"]), f"{row['of_model']:.2f}"]
        work.append([*cells, *flops, f"{row['received'] / 1e9:,.3g} GB", *ratio])
    first = result["rows"][0]["method"]
    headers = ("method", "tokens", "first token", f"{first} / this", "step", "merging")
    console.print(_table(headers, times))
    console.print("\nbusiest device:")
    headers = ("linear TFLOP", "attention TFLOP", "received", "takes", "time / that")
    console.print(_table(("method", "tokens", *headers), work))
    console.print()
    rates, merge = result["rates"], result["rates"]["merge"]
    devices = ", ".join(f"{axis}={size}" for axis, size in result["mesh"].items())
    console.print(
        f"{result['device']} {devices}, {result['model']} in bfloat16, "
        f"{_layers_shown(result['layers'])}; chunk {result['chunk']:,}, median of "
        f"{result['runs']}, jax {result['jax']}"
    )
    linear, attention = (f"{rates[kind] / 1e12:,.3g} TFLOP/s" for kind in ("linear", "attention"))
    received = rates["received"]
    console.print(
        f"rates: linear {linear}, attention {attention} (causal, {rates['square']:,} tokens)"
        + (f"; from a neighbour {received / 1e9:,.1f} GB/s" if received else "")
    )
    if merge:
        console.print(
            f"a decode step's merge in a layer: {merge['by_sum'] * 1e6:.1f} us by pmax and psum, "
            f"{merge['by_gather'] * 1e6:.1f} us by one all-gather; {merge['used']} is used"
        )


def _methods(specs: list[str]) -> list[tuple[str, dict[str, str]]]:
    """The methods by name and with their settings."""
    parsed = [parse_method(spec) for spec in specs]
    return [(name, options.parse_settings(pairs)) for name, pairs in parsed]


def _numbers(text: str, separator: str | None, expected: str) -> list[int]:
    """`"3x131072"` -> `[3, 131072]`; both above 0."""
    parts = text.split(separator) if separator else [text]
    if len(parts) != (2 if separator else 1) or not all(p.isdigit() and int(p) for p in parts):
        raise InputError(f"--case {text!r} is not understood; expected {expected}")
    return [int(part) for part in parts]


def _table(headers: tuple[str, ...], rows: list[list[str]]) -> rich.table.Table:
    table = rich.table.Table(box=None, header_style="bold", pad_edge=False)
    for header in headers:
        left = header in ("method", "what", "against")
        table.add_column(header, justify="left" if left else "right")
    for row in rows:
        table.add_row(*row)
    return table


def _name(row: dict[str, Any]) -> str:
    return " ".join([row["method"], *(f"{key}={value}" for key, value in row["settings"].items())])


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"


def _layers_shown(layers: dict[str, int]) -> str:
    """What a table's last line says of them; `layers` has `timed` and `of`."""
    if layers["timed"] == layers["of"]:
        return f"all {layers['of']} layers"
    return (
        f"{layers['timed']} layers and 1 timed, scaled to {layers['of']}: a layer's time is "
        f"their difference, the rest fixed"
    )
