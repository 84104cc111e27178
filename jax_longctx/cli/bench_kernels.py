"""`jax-longctx bench kernels`: every operation beside its XLA form, a library and the roofline."""

from pathlib import Path
from typing import Annotated

import typer

from jax_longctx.cli import options, process
from jax_longctx.cli.terminal import Terminal, check_folder, check_matplotlib, save
from jax_longctx.errors import InputError

__all__ = ["kernels"]


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
    tune: Annotated[
        bool,
        typer.Option(
            "--tune",
            help="Try the kernels' configurations first and write the quickest to this device's "
            "table, in the folder that JAX_LONGCTX_TUNING names or else in the package's.",
        ),
    ] = False,
    as_json: bool = options.as_json(),
) -> None:
    """Time every kernel on this device, random bfloat16 inputs.

    The roofline is what a large copy and a large matmul reach in the same run.

    [bold]Example[/bold]

        jax-longctx bench kernels --only decode_attention --out results

        JAX_LONGCTX_TUNING=tables jax-longctx bench kernels --tune --only topk_scores
    """
    check_folder(out)
    if out is not None:
        check_matplotlib("--out")
    terminal = Terminal(as_json=as_json)
    with terminal.starting():
        from jax_longctx.bench.kernels import run
        from jax_longctx.bench.kernels_report import markdown, plot

    if tune:
        _tune(terminal, only=only, shrink=shrink, repeats=repeats)
    result = run(only=only, shrink=shrink, repeats=repeats, say=terminal.note)
    record = None
    if out is not None and process.is_leader():
        (out / "kernels.md").write_text(markdown(result), encoding="utf-8")
        plot(result, out / "kernels.png")
        record = out / "kernels.json"
    save(result, record)
    if as_json:
        terminal.record(result)
    else:
        terminal.write(markdown(result))


def _tune(terminal: Terminal, *, only: str, shrink: int, repeats: int) -> None:
    """Measure, and keep of the table what was not measured now."""
    from jax_longctx.bench.kernels_tune import tune
    from pallas_kernels import dispatch, tuning

    kind = dispatch.device_kind()
    path = tuning.path_of(kind)
    try:
        table = {operation: dict(entries) for operation, entries in tuning.read(path).items()}
    except tuning.TuningError as error:
        raise InputError(str(error)) from error
    found = tune(only=only, shrink=shrink, repeats=repeats, say=terminal.note)
    if not found:
        raise InputError(
            f"--tune: none of the kernels with configurations runs on {kind}; expected a Hopper GPU"
            + (f" or a case whose name holds {only!r}" if only else "")
        )
    for operation, entries in found.items():
        table.setdefault(operation, {}).update(entries)
    if process.is_leader():
        tuning.write(path, kind, table)
    count = sum(len(entries) for entries in found.values())
    terminal.note(f"{count} configurations written to {path}")
