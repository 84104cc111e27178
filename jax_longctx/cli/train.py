"""`jax-longctx train`: continued pretraining, and plots of it."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from jax_longctx.cli.terminal import Terminal
from jax_longctx.errors import InputError
from jax_longctx.memory import shown_bytes

__all__ = ["train_app"]

train_app = typer.Typer(
    no_args_is_help=True, help="Continue the pretraining of a checkpoint on long texts."
)


@contextlib.contextmanager
def _needs_extra() -> Iterator[None]:
    """Says which extra is missing, where a package is."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise InputError(
            f"training needs the package {error.name}; install it: pip install 'jax-longctx[train]'"
        ) from error


@train_app.callback(invoke_without_command=True)
def train(
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="FILE",
            help="The run as TOML: \\[run], \\[data], \\[optimizer], \\[pattern], \\[loop].",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Continue the pretraining of a checkpoint on long texts.

    Run again to go on where it stopped: killed, interrupted, or ended by SIGTERM, which saves.
    Needs the extra `train`. The run's folder gets metrics.jsonl, tensorboard/ and loss.png, and the
    result as model/, which [bold]ask -c[/bold] and [bold]convert --to-hf[/bold] take; best/ is that
    of the lowest dev loss, where it came before the last step.

    [bold]Examples[/bold]

        jax-longctx train --config run.toml

        jax-longctx train plot runs/first runs/second --out both.png
    """
    if config is None:
        # A subcommand follows; without one there is help.
        return
    with _needs_extra():
        from train_cpt.config import read_config
        from train_cpt.run import BEST, MODEL, run_config
    settings = read_config(config)
    terminal = Terminal()
    newest: dict[str, Any] = {}
    with terminal.progress("training", "steps", lambda: _moment(newest)) as update:

        def progress(step: int, steps: int, line: Any) -> None:
            newest.update(line)
            update(step, steps)

        outcome = run_config(settings, note=terminal.note, progress=progress)
    loss = f", {_moment(newest)}" if newest else ""
    output, best = settings.run.output, outcome.best
    if outcome.ended != "done":
        terminal.note(f"ended after step {outcome.step}{loss}, saved; run again to go on")
        return
    terminal.note(f"{outcome.step} steps done{loss}; the model is in {output / MODEL}")
    if (output / BEST).exists():
        terminal.note(
            f"step {best.step} had the lowest dev loss, {best.dev_loss:.4f}: {output / BEST}"
        )


def _moment(line: dict[str, Any]) -> str:
    """The newest line of metrics in words; nothing before the first."""
    if not line:
        return ""
    return (
        f"loss {line['loss']:.4f}, {line['tokens_per_second']:,.0f} tokens/s, "
        f"MFU {line['mfu']:.1%}, peak {shown_bytes(line['peak_bytes'])}"
    )


@train_app.command()
def plot(
    runs: Annotated[list[Path], typer.Argument(help="Folders of training runs.")],
    out: Annotated[Path, typer.Option(help="The PNG to write.")] = Path("loss.png"),
) -> None:
    """Plot the losses of one or several runs, also while they are running."""
    with _needs_extra():
        from train_cpt.metrics import plot_losses
    plot_losses(runs, out)
    Terminal().note(f"{out} written")
