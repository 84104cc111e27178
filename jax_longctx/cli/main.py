"""`jax-longctx`: the subcommands, and how all of them report errors.

An error that the user can act on is one line `error: ...` on stderr; a fault of the library shows
its traceback. `process.CODES` lists the exit codes. A subcommand imports JAX after it has checked
names and files, so help and refusals are quick.
"""

import dataclasses
import errno
import math
import os
import platform
import re
import sys
import traceback
from importlib import metadata
from typing import Any

import typer
import typer.core

import jax_longctx
from jax_longctx.cli import options, process
from jax_longctx.cli.ask import ask
from jax_longctx.cli.batch import batch
from jax_longctx.cli.bench import bench_app
from jax_longctx.cli.calibrate import calibrate
from jax_longctx.cli.chat import chat
from jax_longctx.cli.convert import convert
from jax_longctx.cli.demo import demo
from jax_longctx.cli.eval import eval_app
from jax_longctx.cli.generate import generate
from jax_longctx.cli.lm_eval import lm_eval
from jax_longctx.cli.methods import methods
from jax_longctx.cli.options import option
from jax_longctx.cli.plan import plan
from jax_longctx.cli.serve import serve
from jax_longctx.cli.train import train_app
from jax_longctx.cli.warm import warm
from jax_longctx.errors import InputError, LongctxError
from jax_longctx.files import file_errors, reason
from jax_longctx.memory import check_memory_limit

# A full disk, a quota, a size limit and a link in the way are not faults of the program.
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ELOOP}
# What is said where the system gives no memory, to threads and libraries too.
NO_MEMORY = re.compile(r"MemoryError|Cannot allocate|start new thread|map segment|RESOURCE_EXH")


class CommandLine(typer.core.TyperGroup):
    """The command group; turns an error that the user can act on into one line and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            with process.unwinding():
                with file_errors(
                    "the working directory cannot be used", "change to one that exists"
                ):
                    # Where it was deleted, relative paths would name nothing.
                    os.getcwd()
                result = super().invoke(ctx)
                sys.stdout.flush()
                return result
        except LongctxError as error:
            raise _ended(f"error: {error}", process.REFUSED) from error
        except (typer.Exit, typer.Abort):
            raise
        except typer.TyperException as error:
            # An option or argument does not parse.
            where = getattr(error, "ctx", None) or ctx
            message = error.format_message().rstrip(".")
            if not message:
                # There were no arguments, and help was shown.
                raise typer.Exit(error.exit_code) from error
            shown = f"error: {message}; see '{where.command_path} --help'"
            raise _ended(shown, error.exit_code) from error
        except KeyboardInterrupt as error:
            raise _ended("interrupted", process.INTERRUPTED) from error
        except Exception as error:
            if isinstance(error, OSError) and error.errno in FULL:
                what = error.filename or "a file"
                advice = "; free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
                shown = f"error: {what} could not be written: {reason(error)}{advice}"
                raise _ended(shown, process.REFUSED) from error
            if NO_MEMORY.search(f"{error!r}"):
                try:
                    check_memory_limit(math.inf)
                except InputError as limit:
                    raise _ended(f"error: {limit}", process.REFUSED) from error
            # A fault in one process of a job must end the others too: see `process.leave_job`.
            if process.number() is None:
                if isinstance(error, EOFError):
                    # Typer would say that the user had aborted.
                    traceback.print_exc()
                    raise typer.Exit(process.FAULT) from error
                raise
            lost = process.lost_process(error)
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


app = options.App(
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
        python, jax = platform.python_version(), metadata.version("jax")
        typer.echo(f"jax-longctx {jax_longctx.__version__} (jax {jax}, Python {python})")
        raise typer.Exit


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """The job of many processes that this process belongs to; a launcher's variables set it too."""

    PANEL = "Many processes (before the command; each process is started with the same command)"

    coordinator: str | None = option(
        "Where process 0 can be reached.", metavar="HOST:PORT", envvar="JAX_COORDINATOR_ADDRESS"
    )
    processes: str | None = option(
        "Number of processes. Slurm, Open MPI and GKE are detected; auto lets JAX detect it, also "
        "on TPU VMs; 1 is this process alone.",
        metavar="N",
        envvar="JAX_NUM_PROCESSES",
    )
    process: int | None = option(
        "Number of this process, from 0. Process 0 prints and writes.",
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


for _command in (
    *(ask, chat, generate, batch, serve),
    *(plan, warm, convert, methods, calibrate, demo),
):
    app.command()(_command)
# The harness parses all arguments itself, --help too.
app.command(
    "lm-eval",
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True},
)(lm_eval)
app.add_typer(bench_app, name="bench")
app.add_typer(eval_app, name="eval")
app.add_typer(train_app, name="train")


def main() -> None:
    """Runs the command line and ends the process."""
    process.install()
    process.run(app)
