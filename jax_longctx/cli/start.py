"""What precedes JAX: a sign that the command works, and no search for TPUs that are not there."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jax_longctx.cli.terminal import Terminal

__all__ = ["hide_absent_tpu", "starting"]

# What the drivers of TPUs make, up to v4 and from v5e on.
TPU_NODES = ("accel*", "vfio/[0-9]*")
# Set by whoever wants a TPU, or chooses in JAX's place.
CHOSEN = ("JAX_PLATFORMS", "JAX_FORCE_TPU_INIT")


@contextlib.contextmanager
def starting(terminal: "Terminal", doing: str = "starting") -> Iterator[None]:
    """Shows `doing` while JAX is imported, inside; a line where stderr is no terminal."""
    if "jax" not in sys.modules:
        hide_absent_tpu()
        terminal.line(doing)
    with terminal.waiting(doing):
        yield


def hide_absent_tpu(devices: Path = Path("/dev")) -> None:
    """Makes JAX take libtpu as not installed where there is no TPU and nobody asks for one.

    JAX loads libtpu wherever it is installed, and without a TPU libtpu logs errors at length.
    `JAX_PLATFORMS=cpu` would hide GPUs too.
    """
    if any(map(os.environ.get, CHOSEN)):
        return
    if not any(node for pattern in TPU_NODES for node in devices.glob(pattern)):
        # Importing libtpu sets it, also for the processes that one starts.
        os.environ.pop("TPU_LIBRARY_PATH", None)
        sys.modules.setdefault("libtpu", None)  # pyright: ignore[reportArgumentType]
