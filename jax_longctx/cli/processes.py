"""One job of many processes: how a process joins it, who speaks, and how one that fails leaves.

Started once a host (or a device) by Slurm, Open MPI, GKE or by hand; every process runs the same
command. JAX is imported only where there are several.
"""

import os
import sys
from collections.abc import Mapping
from typing import NoReturn

from jax_longctx.cli import ending
from jax_longctx.cli.start import hide_absent_tpu
from jax_longctx.errors import InputError

__all__ = ["AUTO", "announced", "is_leader", "join", "leave", "process"]

# Seconds without a sign of life after which a process counts as dead, which ends the others.
HEARTBEAT = 20
# Seconds that processes wait for each other at the start.
START = 300
AUTO = "auto"


def announced(environment: Mapping[str, str]) -> bool:
    """Whether a launcher's variables say that this is one of several processes.

    Slurm (a step, as srun starts them), Open MPI, and TPU workers on GKE.
    """

    def count(name: str) -> int:
        value = environment.get(name, "")
        return int(value) if value.isdigit() else 0

    step = "SLURM_STEP_NODELIST" in environment and "SLURM_PROCID" in environment
    workers = environment.get("TPU_PROCESS_ADDRESSES") or environment.get("TPU_WORKER_HOSTNAMES")
    return (
        (step and count("SLURM_NTASKS") > 1)
        or count("OMPI_COMM_WORLD_SIZE") > 1
        or count("MEGASCALE_NUM_SLICES") > 1
        or len((workers or "").split(",")) > 1
    )


def join(coordinator: str | None, processes: str | None, process: int | None) -> None:
    """Joins the job that the options, or a launcher's variables, speak of; one process otherwise.

    Raises:
      InputError: the options do not go together, or the others were not found.
    """
    given = (coordinator, processes, process)
    if processes == "1" or (given == (None, None, None) and not announced(os.environ)):
        return
    count = None
    if processes is not None and processes != AUTO:
        if not processes.isdigit() or int(processes) < 1:
            raise InputError(f"--processes is {processes!r}; expected a number, or {AUTO}")
        count = int(processes)
        if coordinator is None or process is None:
            raise InputError("--processes N goes with --coordinator HOST:PORT and --process I")
        if not 0 <= process < count:
            raise InputError(f"--process must be from 0 to {count - 1}, got {process}")
    elif processes is None and given != (None, None, None):
        raise InputError("--coordinator and --process go with --processes N")
    if coordinator is not None and not coordinator.rpartition(":")[2].isdigit():
        raise InputError(f"--coordinator is {coordinator!r}; expected HOST:PORT")
    hide_absent_tpu()
    if not process:
        # The first, or one that does not know its number yet.
        print("waiting for the job's processes", file=sys.stderr, flush=True)
    import jax

    try:
        # What is None JAX finds out from the launcher.
        jax.distributed.initialize(
            coordinator,
            count,
            process,
            initialization_timeout=START,
            heartbeat_timeout_seconds=HEARTBEAT,
        )
    except (ValueError, RuntimeError) as error:
        # jaxlib's errors are RuntimeErrors; the first line says what happened.
        first = str(error).strip().splitlines()[0]
        raise InputError(f"the processes of the job did not find each other: {first}") from error
    if jax.process_count() > 1:
        ending.name_process(jax.process_index())
        _keep_stdout()


def _keep_stdout() -> None:
    """Leaves stdout to answers: what Gloo and NCCL print there goes to stderr."""
    sys.stdout.flush()
    answers = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = ending.guarded(os.fdopen(answers, "w", encoding="utf-8", errors="replace"))


def process() -> int | None:
    """The number of this process where there are several, else None."""
    jax = sys.modules.get("jax")
    # Before `join`, and without it, nothing may start a backend.
    if jax is None or not jax.distributed.is_initialized() or jax.process_count() == 1:
        return None
    return jax.process_index()


def is_leader() -> bool:
    """Whether this process prints and writes."""
    return not process()


def leave(code: int) -> NoReturn:
    """Ends one of several processes at once, which ends the others.

    The orderly way waits for all of them, and they may be waiting for this one.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
