"""Many processes that run the same programs: what they tell each other, and arrays they share.

With one process everything here is a no-op. Where there are several, all must call it, in the same
order: most of it is a collective.
"""

import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jax_longctx import errors

# Messages are padded to powers of two, from here on: a broadcast is compiled for its size.
SMALLEST = 1024


def is_leader() -> bool:
    """Whether this process prints and writes: the only one, or process 0 of several."""
    return jax.process_index() == 0


def share(value: Any) -> Any:
    """The leader's `value` on every process; JSON values."""
    if jax.process_count() == 1:
        return value
    text = json.dumps(value).encode() if is_leader() else b""
    # The size first: a broadcast has one shape on all processes.
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
    padded = np.zeros(max(SMALLEST, 1 << (size - 1).bit_length()), np.uint8)
    padded[: len(text)] = np.frombuffer(text, np.uint8)
    found = np.asarray(multihost_utils.broadcast_one_to_all(padded))
    return json.loads(bytes(found[:size].astype(np.uint8)))


def from_leader(make: Callable[[], Any]) -> Any:
    """Calls `make` on the leader alone; every process gets its result, or its error.

    Raises:
      LongctxError: `make` raised it.
    """
    if jax.process_count() == 1:
        return make()
    if is_leader():
        try:
            value = make()
        except errors.LongctxError as error:
            share({"error": [type(error).__name__, str(error)]})
            raise
        return share({"value": value})["value"]
    told = share(None)
    if "error" in told:
        name, message = told["error"]
        raise getattr(errors, name)(message)
    return told["value"]


def to_host(array: jax.Array) -> np.ndarray:
    """The whole array, also where other processes hold parts of it."""
    if array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))
