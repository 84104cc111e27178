"""`jax-longctx`: the subcommands, and what every one of them does with errors.

What a person can act on is one line `error: ...` on stderr; a fault of the library shows its
traceback. `process.CODES` are the exit codes. JAX is imported by the subcommand that needs it, once
names and files are checked: help and refusals come at once.
"""

import dataclasses
import errno
import platform
import sys
import traceback
from importlib import metadata
from typing import Any

import typer
import typer.core

from jax_longctx.cli import options, process
from jax_longctx.cli.ask import ask
from jax_longctx.cli.batch import batch
from jax_longctx.cli.bench import bench_app
from jax_longctx.cli.convert import convert
from jax_longctx.cli.demo import demo
from jax_longctx.cli.eval import eval_app
from jax_longctx.cli.generate import generate
from jax_longctx.cli.lm_eval import lm_eval
from jax_longctx.cli.methods import methods
from jax_longctx.cli.options import option
from jax_longctx.cli.plan import plan
from jax_longctx.cli.train import train_app
from jax_longctx.errors import LongctxError

# A full disk, and a quota or a limit that is reached, are no faults of the program.
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class CommandLine(typer.core.TyperGroup):
    """The command group; turns what a person can act on into one line and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            with process.unwinding():
                result = super().invoke(ctx)
                sys.stdout.flush()
                return result
        except LongctxError as error:
            raise _ended(f"error: {error}", process.REFUSED) from error
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
            raise _ended("interrupted", process.INTERRUPTED) from error
        except Exception as error:
            if isinstance(error, OSError) and error.errno in FULL:
                what = error.filename or "a file"
                shown = f"error: {what} could not be written: {error.strerror}; free some space"
                raise _ended(shown, process.REFUSED) from error
            # Of a job's process any fault must end the others too: see `process.leave_job`.
            if process.number() is None:
                raise
            lost = _lost_process(error)
            if lost is None:
                traceback.print_exc()
                process.leave_job(process.FAULT)
            raise _ended(f"error: {lost}", process.FAULT) from error


def _ended(message: str, code: int) -> typer.Exit:
    number = process.number()
    who = f"process {number}: " if number else ""
    typer.echo(who + " ".join(message.split()), err=True)
    if number is not None:
        process.leave_job(code)
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
    + "; ".join(f"{code} {what}" for code, what in process.CODES.items())
    + ".",
    rich_markup_mode="rich",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool | None) -> None:
    if wanted:
        releases = {name: metadata.version(name) for name in ("jax-longctx", "jax")}
        python = platform.python_version()
        typer.echo(
            f"jax-longctx {releases['jax-longctx']} (jax {releases['jax']}, Python {python})"
        )
        raise typer.Exit


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """The job that the process is one of; a launcher's variables say it too."""

    PANEL = "Many processes (before the command; each process is started with the same command)"

    coordinator: str | None = option(
        "Where process 0 can be reached.", metavar="HOST:PORT", envvar="JAX_COORDINATOR_ADDRESS"
    )
    processes: str | None = option(
        "Processes of the job. Found out under Slurm, Open MPI and GKE; auto asks JAX to find out, "
        "also on TPU VMs; 1 is this one alone.",
        metavar="N",
        envvar="JAX_NUM_PROCESSES",
    )
    process: int | None = option(
        "The number of this process, from 0, which prints and writes.",
        metavar="I",
        envvar="JAX_PROCESS_ID",
    )


@app.callback()
@options.command
def _job(
    job: Job,
    version: bool | None = option(
        "Show the version.", "--version", callback=_version, is_eager=True
    ),
) -> None:
    process.join(job.coordinator, job.processes, job.process)


for _command in (ask, generate, batch, plan, convert, methods, demo):
    app.command()(_command)
# What follows is the harness's own to parse, its options and its --help too.
app.command(
    "lm-eval",
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True},
)(lm_eval)
app.add_typer(bench_app, name="bench")
app.add_typer(eval_app, name="eval")
app.add_typer(train_app, name="train")


def main() -> None:
    """The command line in a process of its own."""
    process.install()
    process.run(app)
