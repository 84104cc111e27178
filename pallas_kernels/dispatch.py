"""The choice of the implementation that runs, by platform and shapes; the log states it once.

The platform is the mesh's that the program is traced for (inside `shard_map`). So a program
compiled on a CPU host for a TPU gets the TPU's kernel. Without a mesh it is the default backend's.
`xla` runs everywhere. A platform's own kernel is preferred where it supports the arguments; where
it does not, the log says why.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from pallas_kernels.common import Capped
from pallas_kernels.plane import Plane, part_of
from pallas_kernels.quantised import Coded, coded, dequantised

_logger = logging.getLogger("pallas_kernels")

# Why a kernel that bounds no scores does not run.
CAPS = "the scores have a soft cap"


class Kernel(NamedTuple):
    """An implementation that runs only on the platform of its name.

    Attributes:
      unsupported: gives the reason why it cannot run these arguments, or None where it can. None
        in its place: it runs all of them, everywhere.
      planes: whether it reads a `Plane` where it lies; others are given the layer's part.
      caps: whether it bounds scores, where the scale says so (`common.Capped`).
    """

    run: Callable[..., Any]
    unsupported: Callable[[], str | None] | None
    planes: bool = False
    caps: bool = False

    def refusal(self, scale: Any) -> str | None:
        """Why it cannot run these arguments, the scale among them; None where it can."""
        if self.unsupported is None:
            return None
        return CAPS if isinstance(scale, Capped) and not self.caps else self.unsupported()


class UnknownImplementation(ValueError):
    """There is no implementation of that name.

    Attributes:
      offered: the known names.
    """

    def __init__(self, operation: str, asked: str, offered: tuple[str, ...]) -> None:
        self.offered = offered
        super().__init__(
            f"{operation}: no implementation {asked!r}; there are {', '.join(offered)}"
        )


def platform() -> str:
    """The platform traced for: "cpu", "gpu" or "tpu"."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def read_as_written(cache: Any) -> Any:
    """A cache that the caller may just have written to, for operations of XLA's that read it.

    XLA on CPU would write once more inside fusions that read, and keep the old cache for it: the
    barrier holds them apart. A GPU's programs have none: they would copy one layer's part of a
    stack for it, where cuBLAS takes its address.

    Of a plane it is the layer's part. What lies in 8 bits stays in its planes on a GPU: blocks of
    it are read in loops, before which XLA would copy the part.
    """
    if platform() != "gpu":
        return jax.lax.optimization_barrier(part_of(cache))

    def read(x: Any) -> Any:
        return x if isinstance(x, Coded) else part_of(x)

    return jax.tree.map(read, cache, is_leaf=lambda x: isinstance(x, Coded | Plane))


def select(
    operation: str,
    asked: str | None,
    shapes: str,
    scale: Any = None,
    **implementations: Callable[..., Any] | Kernel,
) -> Callable[..., Any]:
    """The implementation to run.

    Args:
      asked: the name that the caller gave, or None to choose one.
      shapes: what the log shows of the arguments; one line is logged for each.
      scale: of an attention's scores.
      implementations: functions that run anywhere, `xla` among them, and the platforms' `Kernel`s.

    Raises:
      NotImplementedError: the named implementation cannot run these arguments.
      UnknownImplementation: there is none of that name.
    """
    on = platform()
    if asked is not None:
        if asked not in implementations:
            raise UnknownImplementation(operation, asked, tuple(implementations))
        chosen, why, found = asked, "asked for", implementations[asked]
        if isinstance(found, Kernel) and found.unsupported is not None:
            needs = f"it needs platform {asked}, this program is for {on}"
            reason = found.refusal(scale) if asked == on else needs
            if reason is not None:
                raise NotImplementedError(f"{operation}: {asked!r} cannot run {shapes}: {reason}")
    else:
        chosen, why, found = "xla", "no kernel for this platform", implementations.get(on)
        if isinstance(found, Kernel):
            reason = found.refusal(scale)
            chosen, why = (on, "preferred") if reason is None else ("xla", f"not {on}: {reason}")
    _log_once(operation, on, shapes, chosen, why)
    found = implementations[chosen]
    run = found.run if isinstance(found, Kernel) else found
    if isinstance(found, Kernel) and found.planes:
        return run

    def run_on_parts(*args: Any, **options: Any) -> Any:
        arrays = (part_of(x) if isinstance(x, Plane | Coded) else x for x in args)
        if chosen == "reference":
            arrays = map(dequantised, arrays)
        return run(*arrays, **options)

    return run_on_parts


def offered(call: Callable[[str], Any]) -> tuple[str, ...]:
    """The names that an operation takes as `implementation`.

    Args:
      call: calls the operation with valid arguments and that `implementation`.
    """
    try:
        call("")
    except UnknownImplementation as error:
        return error.offered
    raise TypeError("offered: the call returned; expected it to hand `implementation` on")


@functools.cache
def _log_once(operation: str, on: str, shapes: str, chosen: str, why: str) -> None:
    _logger.info("%s on %s, %s: %s (%s)", operation, on, shapes, chosen, why)


def shape_class(q: jax.Array, *stored: Any, kv_axis: int = 1, window: int | None = None) -> str:
    """What the log and errors show of an attention's arguments: queries, and keys and values."""
    heads, head_dim = q.shape[-2:]
    more = "" if window is None else f", window {window}"
    more += ", keys or values in int8" * coded(*stored)
    return f"{q.dtype} {heads} heads of {head_dim} over {stored[0].shape[kv_axis]} kv heads{more}"
