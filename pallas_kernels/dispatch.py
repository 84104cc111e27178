"""Which implementation of an operation runs: by platform and shape, said once in the log.

The platform is that of the mesh being traced for (inside `shard_map`), so that a program compiled
ahead of time for a TPU on a CPU host gets the TPU's kernel; without a mesh it is the default
backend's. `xla` runs everywhere; a platform's own kernel is preferred where it supports the case,
and the log says why where it does not.
"""

import functools
import logging
from collections.abc import Callable, Mapping

import jax

_logger = logging.getLogger("pallas_kernels")

# Implementations by the platform whose devices alone can run them.
KERNELS = ("gpu", "tpu")


def platform() -> str:
    """The platform traced for: "cpu", "gpu" or "tpu"."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def device_kind() -> str:
    """The kind of device traced for, as JAX names it."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.devices()[0].device_kind if device is None else device.device_kind


def select(
    operation: str,
    asked: str | None,
    unsupported: Mapping[str, Callable[[], str | None]],
    shape_class: str,
    held_back: Mapping[str, str | None] | None = None,
) -> str:
    """The name of the implementation to run.

    Args:
      asked: what the caller insists on, or None.
      unsupported: for every implementation a function giving the reason why it cannot run these
        arguments, or None where it can.
      shape_class: what the log shows of the arguments; one line is logged for each.
      held_back: why an implementation runs only where it is asked for, or None where it need not.

    Raises:
      NotImplementedError: the asked-for implementation cannot run this.
      ValueError: there is no implementation of that name.
    """
    on = platform()
    if asked is not None:
        if asked not in unsupported:
            raise ValueError(
                f"{operation}: no implementation {asked!r}; there are {', '.join(unsupported)}"
            )
        reason = _reason(asked, on, unsupported)
        if reason is not None:
            raise NotImplementedError(f"{operation}: {asked!r} cannot run {shape_class}: {reason}")
        chosen, why = asked, "asked for"
    else:
        chosen, why = "xla", "no kernel for this platform"
        if on in unsupported:
            reason = (held_back or {}).get(on) or _reason(on, on, unsupported)
            chosen, why = (on, "preferred") if reason is None else ("xla", f"not {on}: {reason}")
    _log_once(operation, on, shape_class, chosen, why)
    return chosen


def _reason(name: str, on: str, unsupported: Mapping[str, Callable[[], str | None]]) -> str | None:
    if name in KERNELS and name != on:
        return f"it needs platform {name}, this program is for {on}"
    return unsupported[name]()


@functools.cache
def _log_once(operation: str, on: str, shape_class: str, chosen: str, why: str) -> None:
    _logger.info("%s on %s, %s: %s (%s)", operation, on, shape_class, chosen, why)


def shape_class(q: jax.Array, kv_heads: int, window: int | None) -> str:
    """What the log and errors show of an attention's arguments."""
    _, _, heads, head_dim = q.shape
    local = "" if window is None else f", window {window}"
    return f"{q.dtype} {heads} heads of {head_dim} over {kv_heads} kv heads{local}"
