"""`jax-longctx`: the subcommands, and what every one of them does with errors.

What a person can act on is one line `error: ...` on stderr; a fault of the library shows its
traceback. `ending.CODES` are the exit codes. JAX is imported by the subcommand that needs it, once
names and files are checked: help and refusals come at once.
"""

import errno
import platform
import sys
import traceback
from importlib import metadata
from typing import Annotated, Any

import typer
import typer.core

from jax_longctx.cli import ending, processes
from jax_longctx.cli.ask import ask
from jax_longctx.cli.batch import batch
from jax_longctx.cli.bench import bench_app
from jax_longctx.cli.convert import convert
from jax_longctx.cli.demo import demo
from jax_longctx.cli.eval import eval_app
from jax_longctx.cli.eval_agreement import agreement
from jax_longctx.cli.eval_papers import citrus_overlap, resa_spectrum
from jax_longctx.cli.eval_perplexity import perplexity
from jax_longctx.cli.eval_resa import resa_errors
from jax_longctx.cli.generate import generate
from jax_longctx.cli.lm_eval import lm_eval
from jax_longctx.cli.methods import methods
from jax_longctx.cli.plan import plan
from jax_longctx.cli.train import train_app
from jax_longctx.errors import LongctxError

__all__ = ["app", "main"]

# A full disk, and a quota or a limit that is reached, are no faults of the program.
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class CommandLine(typer.core.TyperGroup):
    """The command group; turns what a person can act on into one line and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            with ending.unwinding():
                result = super().invoke(ctx)
                sys.stdout.flush()
                return result
        except LongctxError as error:
            raise _ended(f"error: {error}", ending.REFUSED) from error
        except (typer.Exit, typer.Abort):
            raise
        except typer.TyperException as error:
            # Options and arguments that do not parse.
            where = getattr(error, "ctx", None) or ctx
            message = error.format_message().rstrip(".")
            if not message:
                # Nothing was asked for, and help was shown.
                raise typer.Exit(error.exit_code) from error
            shown = f"error: {message}; see '{where.command_path} --help'"
            raise _ended(shown, error.exit_code) from error
        except KeyboardInterrupt as error:
            raise _ended("interrupted", ending.INTERRUPTED) from error
        except Exception as error:
            if isinstance(error, OSError) and error.errno in FULL:
                what = error.filename or "a file"
                shown = f"error: {what} could not be written: {error.strerror}; free some space"
                raise _ended(shown, ending.REFUSED) from error
            # Of a job's process any fault must end the others too: see `processes.leave`.
            if processes.process() is None:
                raise
            lost = _lost_process(error)
            if lost is None:
                traceback.print_exc()
                processes.leave(ending.FAULT)
            raise _ended(f"error: {lost}", ending.FAULT) from error


def _ended(message: str, code: int) -> typer.Exit:
    number = processes.process()
    who = f"process {number}: " if number else ""
    typer.echo(who + " ".join(message.split()), err=True)
    if number is not None:
        processes.leave(code)
    return typer.Exit(code)


def _lost_process(error: Exception) -> str | None:
    """What to say where another process of the job has ended; None for any other error."""
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    signs = ("Gloo", "closed by peer", "heartbeat", "UNAVAILABLE", "coordination")
    if not any(sign in first for sign in signs):
        return None
    return f"another process of the job has ended, see its messages; here: {first:.200}"


app = typer.Typer(
    cls=CommandLine,
    name="jax-longctx",
    help="Ask questions about texts longer than the model, the memory or the budget allows.\n\n"
    "Convert a Llama-family checkpoint once ([bold]convert[/bold]), choose a long-context method "
    "([bold]methods[/bold]), and ask ([bold]ask[/bold]). Each command's --help has examples.",
    epilog="Exit codes: "
    + "; ".join(f"{code} {what}" for code, what in ending.CODES.items())
    + ".",
    rich_markup_mode="rich",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


_JOB = "Many processes (before the command; each process is started with the same command)"


def _version(wanted: bool | None) -> None:
    if wanted:
        releases = {name: metadata.version(name) for name in ("jax-longctx", "jax")}
        python = platform.python_version()
        typer.echo(
            f"jax-longctx {releases['jax-longctx']} (jax {releases['jax']}, Python {python})"
        )
        raise typer.Exit


@app.callback()
def _job(
    coordinator: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            envvar="JAX_COORDINATOR_ADDRESS",
            help="Where process 0 can be reached.",
            rich_help_panel=_JOB,
        ),
    ] = None,
    count: Annotated[
        str | None,
        typer.Option(
            "--processes",
            metavar="N",
            envvar="JAX_NUM_PROCESSES",
            help="Processes of the job. Found out under Slurm, Open MPI and GKE; auto asks JAX to "
            "find out, also on TPU VMs; 1 is this one alone.",
            rich_help_panel=_JOB,
        ),
    ] = None,
    process: Annotated[
        int | None,
        typer.Option(
            metavar="I",
            envvar="JAX_PROCESS_ID",
            help="The number of this process, from 0, which prints and writes.",
            rich_help_panel=_JOB,
        ),
    ] = None,
    version: Annotated[
        bool | None,
        typer.Option("--version", callback=_version, is_eager=True, help="Show the version."),
    ] = None,
) -> None:
    processes.join(coordinator, count, process)


for _command in (ask, generate, batch, plan, convert, methods, demo):
    app.command()(_command)
# What follows is the harness's own to parse, its options and its --help too.
app.command(
    "lm-eval",
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True},
)(lm_eval)
app.add_typer(bench_app, name="bench")
eval_app.command()(perplexity)
eval_app.command()(agreement)
eval_app.command("resa-errors")(resa_errors)
eval_app.command("citrus-overlap")(citrus_overlap)
eval_app.command("resa-spectrum")(resa_spectrum)
app.add_typer(eval_app, name="eval")
app.add_typer(train_app, name="train")


def main() -> None:
    """The command line in a process of its own."""
    ending.install()
    ending.run(app)
