"""The Ray cluster that replicas run on: one that exists, or this machine for as long as a command.

Ray is imported here alone, when a command needs it: it is in the extra `ray`.
"""

import contextlib
import importlib
import importlib.util
import logging
import math
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jax_longctx.errors import InputError
from jax_longctx.locks import lock
from jax_longctx.settings import parse_mesh

# Seconds in which a cluster must accept a connection.
REACHED = 5.0
# Of Ray's folders in /tmp: paths of sockets are short, and TMPDIR may be long.
FOLDERS = "longctx-ray-"
# Read by Ray: it reports no use, and only this project's lines are printed.
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_BACKEND_LOG_LEVEL": "fatal",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


@contextlib.contextmanager
def cluster(address: str | None, replicas: int) -> Iterator[Any]:
    """Ray, connected to the cluster at `address`; without one, to this machine for the block.

    This machine's Ray has room for `replicas`, keeps its files in a temporary folder, and ends with
    the block or with this process. The folder of a process that was killed goes at the next start.

    Args:
      address: HOST:PORT of a cluster that this machine is a node of, or "auto" for the one here.

    Raises:
      InputError: Ray is not installed, there are no replicas, or no cluster answers.
    """
    if replicas < 1:
        raise InputError(f"--replicas must be at least 1, got {replicas}")
    if importlib.util.find_spec("ray") is None:
        raise InputError("replicas need the package ray: pip install 'jax-longctx[ray]'")
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    ray: Any = importlib.import_module("ray")
    how: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    with contextlib.ExitStack() as held:
        if address is None:
            room = max(replicas, os.cpu_count() or 1)
            how["_temp_dir"] = held.enter_context(_folder())
            how |= {"address": "local", "num_cpus": room, "include_dashboard": False}
        else:
            _check_reached(address)
            how["address"] = address
        try:
            with _unheard():
                ray.init(**how)
        except Exception as error:  # Ray has no class for it.
            said = str(error).strip().splitlines()[0]
            raise InputError(
                f"no Ray cluster to use at {address or 'this machine'}: {said}; try again, or "
                f"start one with `ray start` and give its --address"
            ) from error
        held.callback(ray.shutdown)
        if threading.current_thread() is threading.main_thread():
            # Ray's own handler unwinds too, with another code.
            signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        yield ray


def devices_of(ray: Any, mesh: str | None) -> dict[str, Any]:
    """What Ray keeps for one replica, as options of an actor: the accelerators of its mesh.

    A replica takes a CPU where the cluster has no accelerators.
    """
    count, has = math.prod(dict(parse_mesh(mesh or "")).values()), ray.cluster_resources()
    if "TPU" in has:
        return {"num_cpus": 1, "resources": {"TPU": count}}
    return {"num_cpus": 1, "num_gpus": count} if "GPU" in has else {"num_cpus": 1}


@contextlib.contextmanager
def _folder() -> Iterator[str]:
    """A folder for the block, locked; those of processes that were killed are removed."""
    for old in Path("/tmp").glob(f"{FOLDERS}*"):
        # Another user's is left.
        with contextlib.suppress(OSError):
            held = os.open(old, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            if lock(held):
                shutil.rmtree(old, ignore_errors=True)
            os.close(held)
    prefix = f"{FOLDERS}{os.getpid()}-"
    with tempfile.TemporaryDirectory(None, prefix, "/tmp", ignore_cleanup_errors=True) as folder:
        held = os.open(folder, os.O_RDONLY)
        try:
            lock(held)
            yield folder
        finally:
            os.close(held)


@contextlib.contextmanager
def _unheard() -> Iterator[None]:
    """Drops what is written to stderr, as by Ray's C++ on its own level of logging."""
    heard = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(heard, 2)
        os.close(heard)


def _check_reached(address: str) -> None:
    """Raises InputError where nothing listens there; Ray itself tries for two minutes."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    expected = (
        "expected HOST:PORT of a cluster's head node, or auto for the cluster of this machine"
    )
    if not host or "/" in host or not port.isdecimal():
        raise InputError(f"--address is {address!r}; {expected}")
    try:
        socket.create_connection((host, int(port)), REACHED).close()
    except (OSError, OverflowError) as error:
        raise InputError(f"no Ray cluster answers at {address}: {error}; {expected}") from error
