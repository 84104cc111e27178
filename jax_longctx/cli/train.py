"""`jax-longctx train`: continued pretraining, and its effect on methods."""

import contextlib
import dataclasses
import os
from pathlib import Path
from typing import Any

import typer

from jax_longctx.cli import options, process
from jax_longctx.cli.options import option
from jax_longctx.cli.plan import read_model
from jax_longctx.cli.terminal import Terminal, check_checkpoint, check_file, save
from jax_longctx.errors import InputError
from jax_longctx.memory import shown_bytes
from jax_longctx.planning.targets import parse_target
from jax_longctx.run_spec import RunSpec

train_app = options.App(
    cls=options.Group,
    no_args_is_help=True,
    help="Continue the pretraining of a checkpoint on long texts.",
)


@train_app.callback(invoke_without_command=True)
@options.command
def train(
    config: Path | None = option(
        "The run as TOML: \\[run], \\[data], \\[optimizer], \\[pattern], \\[loop].",
        "--config",
        metavar="FILE",
        exists=True,
        dir_okay=False,
        show_default=False,
    ),
) -> None:
    """Continue the pretraining of a checkpoint on long texts.

    Run the command again to resume after a kill, Ctrl-C or SIGTERM, which saves the last step and
    ends with exit code 143.
    Needs the extra `train`. The run's folder gets metrics.jsonl, tensorboard/ and loss.png, and the
    result as model/, for [bold]ask -c[/bold] and [bold]convert --to-hf[/bold]; best/ is the model
    of the lowest dev loss, where that came before the last step.

    [bold]Examples[/bold]

        jax-longctx train --config run.toml

        jax-longctx train evaluate -c small -c runs/first/model --data data-8k -m full -m snapkv
    """
    if config is None:
        # A subcommand runs next; without one the help is shown.
        return
    terminal = Terminal()
    with terminal.starting(extra="train"):
        from train_cpt.run import BEST, MODEL, read_config, run_config
    settings = read_config(config)
    newest: dict[str, Any] = {}
    with terminal.progress("training", "steps") as update:

        def progress(step: int, steps: int, line: Any) -> None:
            newest.update(line)
            update(step, steps, _moment(newest))

        outcome = run_config(settings, note=terminal.note, progress=progress)
    output, best = settings.run.output, outcome.best
    loss = f", {_moment(newest)}" if newest else ""
    if outcome.ended != "done":
        terminal.note(f"ended after step {outcome.step}{loss}, saved; run again to go on")
        raise typer.Exit(process.TERMINATED)
    terminal.note(f"{outcome.step} steps done{loss}; the model is in {output / MODEL}")
    if (output / BEST).exists():
        terminal.note(
            f"step {best.step} had the lowest dev loss, {best.dev_loss:.4f}: {output / BEST}"
        )


@train_app.command()
@options.command
def plan(
    *,
    config: Path = option(
        "The run as TOML.", default=..., metavar="FILE", exists=True, dir_okay=False
    ),
    target: str = option("v5e:4x4, v5p:4x4x4 or v6e:8x8; or cpu.", default=...),
    model: str | None = option(
        "A published model's name or a Hugging Face config.json, in place of the run's checkpoint."
    ),
    as_json: bool = options.as_json(),
) -> None:
    """Compile the training step of a run for devices that need not exist, and show its memory.

    The mesh is that of the run. Neither weights nor texts are read.

    [bold]Example[/bold]

        jax-longctx train plan --config run.toml --target v5p:4x4x4 --model llama-3.2-1b
    """
    devices, terminal = parse_target(target), Terminal(as_json=as_json)
    os.environ["JAX_PLATFORMS"] = os.environ.get("JAX_PLATFORMS") or "cpu"
    with terminal.starting(extra="train"):
        from train_cpt.planning import plan_step
        from train_cpt.run import read_config
    run = read_config(config)
    shapes, _ = read_model(str(run.run.checkpoint) if model is None else model, terminal)
    with terminal.waiting("compiling"):
        made = plan_step(run, shapes, devices)
    terminal.result({**dataclasses.asdict(made), "target": target, "fits": made.fits}, _planned)


def _planned(record: dict[str, Any]) -> list[str]:
    state, temporaries, available, moved = (
        shown_bytes(record[name]) for name in ("state", "temporaries", "available", "moved")
    )
    return [
        f"{record['target']}, each device: state {state}, temporaries {temporaries}, of {available}"
        f": it {'fits' if record['fits'] else 'does not fit'}",
        f"{record['collectives']:,} collectives of {moved}; compiled in {record['seconds']:.0f} s",
    ]


def _moment(line: dict[str, Any]) -> str:
    """The newest line of metrics in words; empty before the first."""
    if not line:
        return ""
    return (
        f"loss {line['loss']:.4f}, {line['tokens_per_second']:,.0f} tokens/s, "
        f"MFU {line['mfu']:.1%}, peak {shown_bytes(line['peak_bytes'])}"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scoring:
    """Parameters of `train_cpt.evaluate.evaluate`."""

    split: str = option("train, dev or test.", default="test")
    tail: int = option("Last tokens of a text that are scored.", default=50, min=1)
    count: int = option("Texts, at even distances.", "--texts", default=200, min=1)
    batch: int = option("Texts of one batch.", default=8, min=1)
    run: RunSpec = options.run("chunk", "dtype", "mesh")


@train_app.command()
@options.command
def evaluate(
    *,
    checkpoints: list[Path] = option(
        "Converted or trained; repeat to compare.",
        "--checkpoint",
        "-c",
        default=...,
        metavar="DIR",
        callback=options.checked(lambda folders: list(map(check_checkpoint, folders))),
    ),
    data: Path = option("The prepared data set.", default=..., exists=True, show_default=False),
    scoring: Scoring,
    methods: list[str] | None = options.methods(),
    out: Path | None = option("Write every text's loss to this JSON.", "--out", "-o"),
) -> None:
    """Perplexity of texts' last tokens under inference methods, before and after training.

    A text is a prompt, except for its last tokens, which the method decodes one by one. Shows how
    much each method's loss fell from the first checkpoint to the last, and how much more than the
    first method's.

    [bold]Example[/bold]

        jax-longctx train evaluate -c small -c runs/first/model --data data-8k
        -m full -m refreshkv:schedule=fixed,stride=25 -m snapkv
    """
    check_file(out)
    terminal = Terminal()
    with terminal.starting(extra="train"):
        from train_cpt.data import SPLITS
        from train_cpt.evaluate import evaluate as run
        from train_cpt.evaluate import markdown
    if scoring.split not in SPLITS:
        raise InputError(f"--split must be one of {', '.join(SPLITS)}, got {scoring.split!r}")
    with contextlib.ExitStack() as bars:

        def watch(doing: str) -> Any:
            bars.close()
            return bars.enter_context(terminal.progress(doing, "tokens"))

        how = {each.name: getattr(scoring, each.name) for each in dataclasses.fields(scoring)}
        result = run(checkpoints, methods or ["full"], data, watch=watch, **how)
    save(result, out)
    terminal.write(markdown(result))
