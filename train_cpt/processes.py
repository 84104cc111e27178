"""One run in several processes: who reads which texts, and agreeing on when to stop.

All processes run the same program over one mesh. The leader alone writes what is not an array; each
reads the texts of its own devices.
"""

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from jax_longctx.errors import ConfigError

__all__ = ["any_process", "own_part", "own_rows", "part_of", "place_texts", "text_sharding"]


def any_process(asked: bool) -> bool:
    """Whether it is true in any process; all must call this."""
    if jax.process_count() == 1:
        return asked
    return bool(np.any(multihost_utils.process_allgather(np.array(asked))))


def own_part(mesh: Mesh) -> tuple[int, int]:
    """(part, parts): which part of a batch's texts this process's devices hold, of how many.

    Processes whose devices share texts (those of one `tensor` group) have the same part.

    Raises:
      ConfigError: processes do not hold equal runs of the `data` axis.
    """
    owners = np.vectorize(lambda device: device.process_index)(mesh.devices)
    return part_of(jax.process_index(), owners)


def part_of(process: int, owners: Int[np.ndarray, "data seq tensor"]) -> tuple[int, int]:
    """`own_part` of a process, from which process owns each device of the mesh."""
    own = np.flatnonzero(np.any(owners == process, axis=(1, 2)))
    shards, width = len(owners), len(own)
    if not width or shards % width or own[0] % width or own[-1] - own[0] + 1 != width:
        raise ConfigError(
            f"process {process} holds shards {own.tolist()} of mesh axis data={shards}; "
            f"give each process the same number of them, next to each other"
        )
    return int(own[0]) // width, shards // width


def own_rows(mesh: Mesh, rows: int) -> slice:
    """Which of a batch's `rows` texts this process's devices hold."""
    part, parts = own_part(mesh)
    share = rows // parts
    return slice(part * share, (part + 1) * share)


def text_sharding(mesh: Mesh) -> NamedSharding:
    """Of `[A, B, T]` tokens: the texts divided over `data`."""
    return NamedSharding(mesh, PartitionSpec(None, "data"))


def place_texts(mesh: Mesh, own: Int[np.ndarray, "A b T"]) -> Int[Array, "A B T"]:
    """The texts of all processes on the devices, of which each gives its own."""
    return jax.make_array_from_process_local_data(text_sharding(mesh), own)
