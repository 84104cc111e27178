"""`jax-longctx bench decode`: a decode step by method, beside full attention in the same run."""

from pathlib import Path
from typing import Annotated, Any

import rich.console
import rich.table
import typer

from jax_longctx.cli import options
from jax_longctx.cli.eval import parse_method
from jax_longctx.cli.results import check_file, hand_over
from jax_longctx.cli.start import starting
from jax_longctx.cli.terminal import Terminal
from jax_longctx.errors import InputError
from jax_longctx.memory import shown_bytes

__all__ = ["decode", "layers_shown"]


def decode(
    methods: Annotated[
        list[str],
        typer.Option(
            "--method",
            "-m",
            metavar="NAME[:KEY=VALUE,...]",
            callback=options.checked_methods,
            autocompletion=options.method_names,
            help="A method and its settings; repeat for several.",
        ),
    ],
    model: options.Preset = "llama-3.1-8b",
    cases: Annotated[
        list[str] | None,
        typer.Option("--case", metavar="BATCHxCONTEXT", help="E.g. 3x131072; repeat for several."),
    ] = None,
    blocks: Annotated[int, typer.Option(min=1, help="Blocks of 32 steps that are timed.")] = 5,
    layers: Annotated[
        int | None,
        typer.Option(help="Time so many layers, and one, and scale; all of the shape's if not."),
    ] = None,
    random_cache: Annotated[
        bool,
        typer.Option(
            help="Draw the cache at random instead of reading a context (append-only methods)."
        ),
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Write everything to this JSON file.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Time a decode step of methods beside full attention's, random bfloat16 weights.

    The prediction is the ratio of bytes read a step, weights included.

    [bold]Example[/bold]

        jax-longctx bench decode -m refreshkv:schedule=fixed,stride=10 --case 3x131072
    """
    check_file(out)
    chosen = [parse_method(spec) for spec in methods]
    sizes = [parse_case(text) for text in cases or ["1x32768"]]
    terminal = Terminal(as_json=as_json)
    with starting(terminal):
        from jax_longctx.bench.decode import run

    result = run(
        model=model,
        methods=[(name, options.parse_settings(pairs)) for name, pairs in chosen],
        cases=sizes,
        blocks=blocks,
        random_cache=random_cache,
        layers=layers,
        say=terminal.note,
    )
    hand_over(terminal, result, out, _show)


def parse_case(text: str) -> tuple[int, int]:
    """`"3x131072"` -> `(3, 131072)`."""
    batch, _, context = text.partition("x")
    if not (batch.isdigit() and context.isdigit() and int(batch) and int(context)):
        raise InputError(f"--case {text!r} is not understood; expected BATCHxCONTEXT, as 3x131072")
    return int(batch), int(context)


def layers_shown(layers: dict[str, int]) -> str:
    """What a table's last line says of them; `layers` has `timed` and `of`."""
    if layers["timed"] == layers["of"]:
        return f"all {layers['of']} layers"
    return (
        f"{layers['timed']} layers and 1 timed, scaled to {layers['of']}: a layer's time is "
        f"their difference, the rest fixed"
    )


def _show(result: dict[str, Any]) -> None:
    table = rich.table.Table(box=None, header_style="bold", pad_edge=False)
    for header in (
        "method",
        "batch x context",
        "step",
        "of roofline",
        "faster",
        "predicted",
        "peak",
    ):
        table.add_column(header, justify="left" if header == "method" else "right")
    for row in result["rows"]:
        name = " ".join([row["method"], *(f"{k}={v}" for k, v in row["settings"].items())])
        case = f"{row['batch']} x {row['context']:,}"
        if "failed" in row:
            table.add_row(name, case, row["failed"])
            continue
        table.add_row(
            name,
            case,
            f"{row['seconds'] * 1e3:.2f} ms",
            f"{row['seconds'] / row['roofline_seconds']:.2f}x",
            f"{row['speedup']:.2f}x",
            f"{row['predicted_speedup']:.2f}x",
            shown_bytes(row["peak"]),
        )
    console = rich.console.Console(highlight=False)
    console.print(table)
    console.print(
        f"{result['device']}, {result['model']} in bfloat16, {layers_shown(result['layers'])}; "
        f"jax {result['jax']}; copy {result['copy_bandwidth'] / 1e12:.2f} TB/s"
    )
