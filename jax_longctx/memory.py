"""Memory in use, for progress bars and reports: the accelerator's, or this process's on a CPU."""

import os
import resource
import sys
from pathlib import Path

from jax_longctx.errors import InputError

_STATM = Path("/proc/self/statm")
# What bounds the host's memory that XLA pins for GPUs, in GiB; read when JAX starts.
POOL = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
# Address space that JAX takes before there is a model.
LEAST_ADDRESSES = 2 << 30
# Share of the host's memory that may be pinned.
PINNED = 0.9


def allow_pinned() -> None:
    """Lets XLA pin most of the host's memory for GPUs, unless a user has set how much.

    Without effect once JAX has started its devices.
    """
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    os.environ.setdefault(POOL, str(max(int(PINNED * size) >> 30, 1)))


def check_memory_limit(least: float = LEAST_ADDRESSES) -> None:
    """Raises InputError where `ulimit -v` allows fewer bytes: JAX's threads may end the process."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and limit < least:
        raise InputError(
            f"ulimit -v allows {shown_bytes(limit)} of address space; JAX takes "
            f"{shown_bytes(LEAST_ADDRESSES)} to start, and the model more: raise it"
        )


def memory_used() -> int:
    """Bytes in use now: of the fullest accelerator, else this process's resident memory."""
    device = _device_bytes("bytes_in_use")
    if device is not None:
        return device
    if _STATM.exists():
        return int(_STATM.read_text(encoding="ascii").split()[1]) * resource.getpagesize()
    return peak_memory()


def peak_memory() -> int:
    """The most bytes that were in use at once, measured as `memory_used` does."""
    device = _device_bytes("peak_bytes_in_use")
    if device is not None:
        return device
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def shown_bytes(count: int) -> str:
    """`1536` -> `1.5 KiB`."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def _device_bytes(key: str) -> int | None:
    # Reading the memory in use must not import JAX.
    jax = sys.modules.get("jax")
    if jax is None:
        return None
    try:
        devices = [device for device in jax.local_devices() if device.platform != "cpu"]
        stats = [device.memory_stats() for device in devices]
    except (NotImplementedError, jax.errors.JaxRuntimeError):
        # Some plugins have no memory statistics.
        return None
    known = [entry[key] for entry in stats if entry and key in entry]
    return max(known, default=None)
