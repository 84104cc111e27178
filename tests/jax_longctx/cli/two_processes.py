"""The command line in several processes of this machine, over CPU collectives."""

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def start(arguments, *, count, cache, began):
    """`jax-longctx` with these arguments in `count` processes, of one device each, in `began`."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "1",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "true",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PYTHONPATH": str(ROOT),
    }
    started = []
    for number in range(count):
        job = ["--coordinator", f"localhost:{port}", "--processes", count, "--process", number]
        command = [
            *(sys.executable, "-c", "from jax_longctx.cli.main import main; main()"),
            *map(str, job if count > 1 else []),
            *map(str, arguments),
        ]
        started.append(
            subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment,
            )
        )
        began.append(started[-1])
    return started


def ended(started, seconds=240):
    """(return code, stdout, stderr) of each process."""
    found = []
    for child in started:
        out, err = child.communicate(timeout=seconds)
        found.append((child.returncode, out, err))
    return found
