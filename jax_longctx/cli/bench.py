"""`jax-longctx bench`: measured times beside a baseline and a roofline, from one run."""

from pathlib import Path
from typing import Annotated, Any

import rich.console
import rich.table
import typer

from jax_longctx.cli import options
from jax_longctx.cli.bench_kernels import kernels
from jax_longctx.cli.results import check_file, hand_over
from jax_longctx.cli.start import starting
from jax_longctx.cli.terminal import Terminal

__all__ = ["bench_app"]

bench_app = typer.Typer(no_args_is_help=True, help="Measure on this device, as ratios in one run.")


@bench_app.callback()
def _bench() -> None:
    """Measure on this device, as ratios in one run."""


bench_app.command()(kernels)


@bench_app.command()
def e2e(
    model: options.Preset = "llama-3.1-8b",
    context: Annotated[
        list[int] | None, typer.Option(help="Context length in tokens; repeat for several.")
    ] = None,
    chunk: Annotated[int, typer.Option(help="Tokens a prefill pass takes.")] = 8192,
    runs: Annotated[int, typer.Option(help="Runs; the median counts.")] = 3,
    peer: Annotated[
        bool, typer.Option(help="Also run transformers (needs PyTorch with CUDA).")
    ] = True,
    compiled: Annotated[
        bool, typer.Option(help="Also transformers' compiled decode over a static cache.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Write everything to this JSON file.")] = None,
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
    hand_over(terminal, result, out, _show)


def _show(result: dict[str, Any]) -> None:
    table = rich.table.Table(box=None, header_style="bold", pad_edge=False)
    for header in ("what", "context", "time", "against", "its time", "ours / its"):
        table.add_column(header, justify="left" if header in ("what", "against") else "right")
    for row in result["rows"]:
        if row["baseline_seconds"] is None:
            table.add_row(row["what"], f"{row['context']:,}", _time(row["seconds"]), "-", "-", "-")
            continue
        table.add_row(
            row["what"],
            f"{row['context']:,}",
            _time(row["seconds"]),
            row["baseline"],
            _time(row["baseline_seconds"]),
            f"{row['ratio']:.2f}",
        )
    console = rich.console.Console()
    console.print(table)
    console.print(
        f"{result['device']}, {result['model']} in bfloat16, batch 1, chunk {result['chunk']:,}, "
        f"jax {result['jax']}; copy {result['copy_bandwidth'] / 1e12:.2f} TB/s",
        highlight=False,
    )


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{seconds * 1e3:.2f} ms"
