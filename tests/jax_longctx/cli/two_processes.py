"""The command line in processes of this machine, over CPU collectives where they are several."""

import os
import socket
import subprocess
import sys
from pathlib import Path

from tests.patience import patience

ROOT = Path(__file__).parents[3]
COMMAND = "from jax_longctx.__main__ import main; main()"


def environment(cache=None):
    """That of a process with one device, which keeps its programs in the folder."""
    told = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    told |= {"JAX_DISABLE_MOST_OPTIMIZATIONS": "true", "PYTHONPATH": str(ROOT)}
    if cache is not None:
        told["JAX_COMPILATION_CACHE_DIR"] = str(cache)
        told["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    return told


def jobs(count):
    """The options that join so many processes, of each."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    job = ("--coordinator", f"localhost:{port}", "--processes", count, "--process")
    return [(*job, number) for number in range(count)]


def start(arguments, *, count, cache, began):
    """`jax-longctx` with these arguments in `count` processes, which are put into `began`."""
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    how["env"] = environment(cache)
    started = [
        subprocess.Popen([sys.executable, "-c", COMMAND, *map(str, (*job, *arguments))], **how)
        for job in jobs(count)
    ]
    began += started
    return started


def ended(started, seconds=240):
    found = []
    for child in started:
        out, err = child.communicate(timeout=patience(seconds))
        found.append((child.returncode, out, err))
    return found
