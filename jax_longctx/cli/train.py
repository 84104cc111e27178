"""`jax-longctx train`: continued pretraining."""

from pathlib import Path
from typing import Annotated, Any

import typer

from jax_longctx.cli.terminal import Terminal
from jax_longctx.errors import InputError

__all__ = ["train"]


def train(
    config: Annotated[
        Path,
        typer.Option(
            "--config",
            metavar="FILE",
            help="The run as TOML: \\[run], \\[data], \\[optimizer], \\[pattern], \\[loop].",
            show_default=False,
        ),
    ],
) -> None:
    """Continue the pretraining of a checkpoint on long texts.

    Run again to go on where it stopped: killed, interrupted, or ended by SIGTERM, which saves.
    Needs the extra `train`. Losses go to metrics.jsonl in the run's folder, the result to model/,
    which [bold]ask -c[/bold] and [bold]convert --to-hf[/bold] take.

    [bold]Example[/bold]

        jax-longctx train --config run.toml
    """
    try:
        from train_cpt.config import read_config
        from train_cpt.run import MODEL, run_config
    except ModuleNotFoundError as error:
        raise InputError(
            f"training needs the package {error.name}; install it: pip install 'jax-longctx[train]'"
        ) from error
    settings = read_config(config)
    terminal = Terminal()
    newest: dict[str, Any] = {}
    with terminal.progress("training", "steps") as update:

        def progress(step: int, steps: int, line: Any) -> None:
            newest.update(line)
            update(step, steps)

        outcome = run_config(settings, note=terminal.note, progress=progress)
    loss = f", loss {newest['loss']:.4f}" if newest else ""
    output = settings.run.output
    if outcome.ended == "done":
        terminal.note(f"{outcome.step} steps done{loss}; the model is in {output / MODEL}")
    else:
        terminal.note(f"ended after step {outcome.step}{loss}, saved; run again to go on")
