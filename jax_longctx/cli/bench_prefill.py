"""`jax-longctx bench prefill`: time to first token over several devices, by method."""

from pathlib import Path
from typing import Annotated, Any

import rich.console
import rich.table
import typer

from jax_longctx.cli import options
from jax_longctx.cli.bench_decode import layers_shown
from jax_longctx.cli.eval import parse_method
from jax_longctx.cli.results import check_file, hand_over
from jax_longctx.cli.start import starting
from jax_longctx.cli.terminal import Terminal
from jax_longctx.errors import InputError

__all__ = ["prefill"]


Methods = Annotated[
    list[str],
    typer.Option(
        "--method",
        "-m",
        metavar="NAME[:KEY=VALUE,...]",
        callback=options.checked_methods,
        autocompletion=options.method_names,
        help="A method and its settings; repeat for several. The first is what the others' speed "
        "is told against.",
    ),
]
Cases = Annotated[
    list[str] | None,
    typer.Option(
        "--case",
        metavar="TOKENS[:BLOCK]",
        help="Tokens of context, question and answer, and Star's block; repeat for several.",
    ),
]


def prefill(
    methods: Methods,
    model: options.Preset = "llama-3.1-8b",
    cases: Cases = None,
    mesh: Annotated[
        str | None,
        typer.Option(metavar="SIZES", help="Devices, e.g. seq=4; all along seq unless given."),
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option(help="Time so many layers, and one, and scale; all of the shape's if not."),
    ] = None,
    runs: Annotated[int, typer.Option(min=1, help="Runs; the median counts.")] = 3,
    blocks: Annotated[
        int, typer.Option(min=0, help="Blocks of 32 decode steps that are timed; 0 times none.")
    ] = 2,
    chunk: Annotated[int, typer.Option(min=1, help="Tokens a pass takes of a shard.")] = 8192,
    out: Annotated[Path | None, typer.Option(help="Write everything to this JSON file.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Time to first token of methods over several devices, random bfloat16 weights.

    Beside each time stands what the method's FLOPs on the busiest device take at the rates of
    projections and of attention that are measured in the same run.

    [bold]Example[/bold]

        jax-longctx bench prefill -m ring -m ring:order=zigzag -m star
            -m star:anchor_kv=broadcast --case 131072:32768 --mesh seq=4 --layers 8
    """
    chosen = [parse_method(spec) for spec in methods]
    sizes = [parse_case(text) for text in cases or ["32768:8192", "131072:32768"]]
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
        methods=[(name, options.parse_settings(pairs)) for name, pairs in chosen],
        cases=[Case(*case) for case in sizes],
        mesh=make_mesh(data, seq, tensor),
        layers=layers,
        runs=runs,
        blocks=blocks,
        chunk=chunk,
        say=terminal.note,
    )
    hand_over(terminal, result, out, _show)


def parse_case(text: str) -> tuple[int, int | None]:
    """`"131072:32768"` -> `(131072, 32768)`; the block may be left out."""
    tokens, colon, block = text.partition(":")
    numbers = [tokens, block] if colon else [tokens]
    if not all(number.isdigit() and int(number) for number in numbers):
        raise InputError(
            f"--case {text!r} is not understood; expected TOKENS or TOKENS:BLOCK, as 131072:32768"
        )
    return int(tokens), int(block) if colon else None


def _show(result: dict[str, Any]) -> None:
    console = rich.console.Console(highlight=False)
    console.print(_times(result))
    console.print("\nbusiest device:")
    console.print(_work(result))
    console.print()
    rates, layers, mesh = result["rates"], result["layers"], result["mesh"]
    devices = ", ".join(f"{axis}={size}" for axis, size in mesh.items())
    console.print(
        f"{result['device']} {devices}, {result['model']} in bfloat16, {layers_shown(layers)}; "
        f"chunk {result['chunk']:,}, median of {result['runs']}, jax {result['jax']}"
    )
    received = rates["received"]
    console.print(
        f"rates: linear {_rate(rates['linear'])}, attention {_rate(rates['attention'])} (causal, "
        f"{rates['square']:,} tokens)"
        + (f"; from a neighbour {received / 1e9:,.1f} GB/s" if received else "")
    )
    if rates["merge"]:
        merge = rates["merge"]
        console.print(
            f"a decode step's merge in a layer: {merge['by_sum'] * 1e6:.1f} us by pmax and psum, "
            f"{merge['by_gather'] * 1e6:.1f} us by one all-gather; {merge['used']} is used"
        )


def _table(headers: tuple[str, ...], rows: list[list[str]]) -> rich.table.Table:
    table = rich.table.Table(box=None, header_style="bold", pad_edge=False)
    for header in headers:
        table.add_column(header, justify="left" if header == "method" else "right")
    for row in rows:
        table.add_row(*row)
    return table


def _times(result: dict[str, Any]) -> rich.table.Table:
    first = result["rows"][0]["method"]
    rows = []
    for row in result["rows"]:
        cells = [_name(row), f"{row['tokens']:,}"]
        if "failed" in row:
            rows.append([*cells, row["failed"]])
            continue
        rows.append(
            [
                *cells,
                _seconds(row["first_token"]),
                f"{row['speedup']:.2f}x",
                _seconds(row["step"]) if "step" in row else "-",
                f"{row['merge_share']:.1%}" if "merge_share" in row else "-",
            ]
        )
    return _table(("method", "tokens", "first token", f"{first} / this", "step", "merging"), rows)


def _work(result: dict[str, Any]) -> rich.table.Table:
    rows = [
        [
            _name(row),
            f"{row['tokens']:,}",
            f"{row['linear'] / 1e12:,.4g}",
            f"{row['attention'] / 1e12:,.4g}",
            f"{row['received'] / 1e9:,.3g} GB",
            _seconds(row["model_seconds"]),
            f"{row['of_model']:.2f}",
        ]
        for row in result["rows"]
        if "failed" not in row
    ]
    headers = ("linear TFLOP", "attention TFLOP", "received", "takes", "time / that")
    return _table(("method", "tokens", *headers), rows)


def _name(row: dict[str, Any]) -> str:
    return " ".join([row["method"], *(f"{key}={value}" for key, value in row["settings"].items())])


def _rate(flops: float) -> str:
    return f"{flops / 1e12:,.3g} TFLOP/s"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"
