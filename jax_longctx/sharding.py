"""The mesh, and the table that maps logical axes to mesh axes.

Every array of the library is described by *logical* axes (`"batch"`, `"kv_heads"`, `"mlp"` ...).
`RULES` maps them to the three mesh axes `data`, `seq` and `tensor`. The mesh axes have a fixed
meaning: the engine pads rows to `data`, `LayerContext` reduces over `tensor` and merges over `seq`.

Cache dataclasses describe their own fields with `axes_field("batch", "kv_heads", "slots", None)`;
`tree_specs` reads that back, so a method's cache is sharded without the engine knowing its type.
Where an axis differs from one cache of a type to another, it is an `OwnAxis`.

An engine's weights are sharded over `tensor` by the same table, and over `seq` besides
(`weight_sharding`): each device of a row holds and reads its own part. Training shards them over
`tensor` alone.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jax_longctx.errors import ConfigError
from jax_longctx.settings import MESH_AXES, StoredForm
from pallas_kernels.plane import each_array
from pallas_kernels.quantised_matrix import QuantisedMatrix

# A plan uses a mesh without devices.
AnyMesh = Mesh | AbstractMesh

RULES: dict[str, str | tuple[str, ...] | None] = {
    "batch": "data",
    # One slot a token; they grow where question and answer need more than was reserved.
    "slots": "seq",
    # Runs of equally many slots; they grow in proportion to the slots.
    "pages": "seq",
    # Slots of a small cache that is replicated over the shards. `room` grows by the tokens after
    # the context; `share` is a part of the slots and grows in proportion, in whole tiles; `budget`
    # does not grow: tokens are evicted from it.
    "room": None,
    "share": None,
    "budget": None,
    # None of these grows: columns of a segment that is spread over the shards, numbers with one
    # value for each shard, and slots of small caches that differ from shard to shard.
    "tokens": "seq",
    "shards": "seq",
    "own_slots": "seq",
    # Pages that say whose they are, in any order. They do not grow.
    "pool": ("seq", "tensor"),
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "vocab": "tensor",
    "embed": None,
    "experts": None,
    "head_dim": None,
    "layers": None,
}

# The memory kind of arrays that lie in the host's memory, where devices can reach them.
HOST = "pinned_host"

# Axes of a weight that `seq` divides too: one of each weight's. A projection's heads must be whole
# in attention, so it is their width that is divided.
OVER_SEQ = ("head_dim", "mlp", "vocab")


def logical_spec(axes: Sequence[str | None]) -> PartitionSpec:
    """Mesh axes of an array with these logical axes; raises ConfigError where two collide."""
    physical = []
    for name in axes:
        if name is not None and name not in RULES:
            raise ConfigError(f"unknown logical axis {name!r}; known: {', '.join(sorted(RULES))}")
        physical.append(RULES[name] if name is not None else None)
    used = [axis for name in axes for axis in _mesh_axes(name)]
    if len(used) != len(set(used)):
        raise ConfigError(f"logical axes {tuple(axes)} collide on the mesh: {tuple(physical)}")
    return PartitionSpec(*physical)


def _mesh_axes(name: str | None) -> tuple[str, ...]:
    """The mesh axes of a logical one."""
    axes = RULES[name] if name is not None else None
    return (axes,) if isinstance(axes, str) else axes or ()


def shards_along(mesh: AnyMesh, name: str | None) -> int:
    """How many shards the mesh divides that logical axis into."""
    return math.prod(mesh.shape[axis] for axis in _mesh_axes(name))


def logical_sharding(
    mesh: AnyMesh, axes: Sequence[str | None], *, host: bool = False
) -> NamedSharding:
    """The `NamedSharding` of an array with these logical axes on `mesh`, or in the host's memory.

    On one device all specs are equal. JAX gives a result the spec of any argument, and
    the next program's key in the persistent cache depends on it: so there is one spec there.
    """
    spec = logical_spec(axes)
    kind = HOST if host else None
    return NamedSharding(mesh, spec if mesh.size > 1 else PartitionSpec(), memory_kind=kind)


def weight_sharding(
    mesh: AnyMesh, axes: Sequence[str | None], shape: Sequence[int]
) -> NamedSharding:
    """The sharding of an engine's weight of that shape, or of an activation that meets it.

    As `logical_sharding`, and over `seq` along its axis of `OVER_SEQ`. Where that axis does not
    divide, the weight stays whole on each shard of `seq` (see `undivided`).
    """
    spec = weight_spec(mesh, axes, shape)
    return NamedSharding(mesh, spec if mesh.size > 1 else PartitionSpec())


def weight_spec(mesh: AnyMesh, axes: Sequence[str | None], shape: Sequence[int]) -> PartitionSpec:
    """The mesh axes of each axis of `weight_sharding`, on one device too."""
    spec = [*logical_spec(axes)]
    for index, (name, size) in enumerate(zip(axes, shape, strict=True)):
        if name in OVER_SEQ and not undivided(mesh, **{name: size}):
            spec[index] = "seq" if spec[index] is None else (spec[index], "seq")
    return PartitionSpec(*spec)


def mesh_axes(mesh: AnyMesh, spec: Sequence[Any]) -> tuple[str, ...]:
    """The axes of several shards that divide an array's axes of this spec."""
    parts = [part if isinstance(part, tuple) else (part,) for part in spec]
    return tuple(name for part in parts for name in part if name and mesh.shape[name] > 1)


def undivided(mesh: AnyMesh, **sizes: int) -> list[str]:
    """The axes of weights that do not divide over `seq`, beside `tensor`: `(mesh, mlp=1024)`."""
    return [
        name
        for name, size in sizes.items()
        if size % (mesh.shape["seq"] * (mesh.shape["tensor"] if RULES[name] else 1))
    ]


def on_devices(mesh: Any, body: Any, in_specs: Any, out_specs: Any) -> Any:
    """`body` as one program a device, manual over every mesh axis."""
    # Values that are equal on all shards of an axis (a psum's result) carry no proof of it through
    # kernels, so the replication check stays off.
    how = {"in_specs": in_specs, "out_specs": out_specs, "check_vma": False}
    return jax.shard_map(body, mesh=mesh, **how)


def make_mesh(
    data: int = 1, seq: int = 1, tensor: int = 1, devices: Sequence[Any] | None = None
) -> Mesh:
    """A `data x seq x tensor` mesh over the first devices of all processes, `tensor` innermost.

    Raises:
      ConfigError: a size below one, more devices than there are, or a process without a device.
    """
    sizes = {"data": data, "seq": seq, "tensor": tensor}
    bad = {name: size for name, size in sizes.items() if size < 1}
    if bad:
        raise ConfigError(f"mesh sizes must be at least 1, got {bad}")
    found = list(jax.devices() if devices is None else devices)
    need = data * seq * tensor
    if need > len(found):
        raise ConfigError(
            f"mesh data={data},seq={seq},tensor={tensor} needs {need} devices, "
            f"{len(found)} found; lower a size"
        )
    used = {device.process_index for device in found[:need]}
    left_out = {device.process_index for device in found} - used
    if devices is None and left_out:
        raise ConfigError(
            f"mesh data={data},seq={seq},tensor={tensor} leaves process {min(left_out)} without a "
            f"device: every process needs one; there are {len(found)} devices (--mesh)"
        )
    grid = np.array(found[:need]).reshape(data, seq, tensor)
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * 3)


def check_divisible(mesh: AnyMesh, **sizes: int) -> None:
    """ConfigError unless each logical axis divides over its mesh axis: `(mesh, heads=8)`."""
    for name, size in sizes.items():
        axis, parts = RULES[name], shards_along(mesh, name)
        if size % parts:
            raise ConfigError(
                f"{name}={size} does not divide over mesh axis {axis}={parts}; "
                f"choose {axis} from the divisors of {size} ({math.gcd(size, parts)} works)"
            )


@dataclasses.dataclass(frozen=True)
class OwnAxis:
    """A logical axis whose name each instance gives in its static field `field`."""

    field: str


def axes_field(*axes: str | OwnAxis | None, in_place: bool = False, host: bool = False) -> Any:
    """A dataclass field holding an array with these logical axes, or keys or values in few bits.

    Their scales, of fewer axes, have the first of these.

    Args:
      in_place: whether the array is only read and written by functions that take a `Plane`, so
        that a loop over layers need not slice it.
      host: whether the array lies in the host's memory. Devices reach slices of it alone, by
        `jax.device_put` (see `caches.offloaded`).
    """
    return dataclasses.field(metadata={"axes": axes, "in_place": in_place, "host": host})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stacked:
    """The caches of layers that are alike, as one.

    Attributes:
      cache: one layer's cache, every array with one more axis in front: the layers.
      count: how many layers.
      step: from one of them to the next. Where kinds of layers take turns it is their number, and
        as many caches stand side by side, one of each kind.
    """

    cache: Any
    count: int = dataclasses.field(metadata={"static": True})
    step: int = dataclasses.field(default=1, metadata={"static": True})

    def over(self, cache: Any) -> "Stacked":
        """Another cache of the same layers."""
        return Stacked(cache, self.count, self.step)


def layers_in(cache: Any) -> int:
    """How many layers' cache it is."""
    return cache.count if isinstance(cache, Stacked) else 1


def numbers_of_layers(caches: Sequence[Any]) -> list[range]:
    """Which of the model's layers each of its caches is of."""
    found, first, turn = [], 0, 0
    for cache in caches:
        step = cache.step if isinstance(cache, Stacked) else 1
        stop = first + step * layers_in(cache)
        found.append(range(first + turn, stop, step))
        turn += 1
        if turn == step:
            first, turn = stop, 0
    return found


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A field's metadata: logical axes, `in_place` and `host` (`axes_field`)."""

    axes: tuple[str | None, ...]
    in_place: bool = False
    host: bool = False


def described(node: Any, describe: Any = lambda leaf: leaf) -> Any:
    """A pytree of dataclasses with `describe(Leaf)` in place of each array (see `axes_field`).

    A field without an array is None, here as in any pytree.
    """
    if isinstance(node, tuple | list):
        return type(node)(described(child, describe) for child in node)
    if isinstance(node, dict):
        return {key: described(child, describe) for key, child in node.items()}
    if isinstance(node, Stacked):

        def of_all(leaf: Leaf) -> Any:
            return describe(dataclasses.replace(leaf, axes=("layers", *leaf.axes)))

        return node.over(described(node.cache, of_all))
    if not dataclasses.is_dataclass(node) or isinstance(node, type):
        raise TypeError(f"{type(node).__name__} has no logical axes; declare it with axes_field")
    fields = {}
    for field in dataclasses.fields(node):
        value, axes = getattr(node, field.name), field.metadata.get("axes")
        if value is None or field.metadata.get("static"):
            fields[field.name] = value
        elif axes is not None:
            axes = tuple(getattr(node, a.field) if isinstance(a, OwnAxis) else a for a in axes)
            leaf = Leaf(axes, field.metadata["in_place"], field.metadata["host"])

            def part(x: Any, leaf: Leaf = leaf, of: Any = value) -> Any:
                axes = leaf.axes[: len(leaf.axes) - of.ndim + x.ndim]
                return describe(dataclasses.replace(leaf, axes=axes))

            fields[field.name] = each_array(part, value)
        else:
            fields[field.name] = described(value, describe)
    return type(node)(**fields)


def leaf_fields(tree: Any) -> list[Leaf]:
    """What the fields say of every array, in the order of `jax.tree.leaves`."""
    return jax.tree.leaves(described(tree))


def leaf_axes(tree: Any) -> list[tuple[str | None, ...]]:
    """The logical axes of every array, in the order of `jax.tree.leaves`."""
    return [leaf.axes for leaf in leaf_fields(tree)]


def tree_specs(tree: Any) -> Any:
    """The tree with a `PartitionSpec` in place of every array (see `axes_field`)."""
    return described(tree, lambda leaf: logical_spec(leaf.axes))


def tree_shardings(mesh: AnyMesh, tree: Any) -> Any:
    """The tree with a `NamedSharding` in place of every array (see `axes_field`).

    It says the memory too: the devices' or the host's.
    """
    return described(tree, lambda leaf: logical_sharding(mesh, leaf.axes, host=leaf.host))


@dataclasses.dataclass(frozen=True)
class ParamInfo:
    """Shape and logical axes (see `RULES`) of one parameter."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]

    def sharding(self, mesh: AnyMesh) -> NamedSharding:
        """How an engine on `mesh` holds it."""
        return weight_sharding(mesh, self.axes, self.shape)

    @property
    def inputs(self) -> tuple[int, ...]:
        """The axes that a matrix contracts; none of a bias or a scale."""
        first, count = self.axes[0], len(self.axes)
        if first == "vocab":
            return (1,)
        if first == "heads" and count == 3:
            return (0, 1)
        if first == "experts":
            return (count - 2,) if count > 2 else ()
        return (0,) if first in ("embed", "mlp") and count > 1 else ()

    @property
    def in_8_bits(self) -> bool:
        """Whether 8-bit weights are so here: of the layers' matrices.

        The table of an embedding and of the head is read as it is: a step reads one row of the one,
        and the other's errors go straight into the logits. A router is small, and its errors would
        change which experts are chosen.
        """
        return bool(self.inputs) and self.axes[0] != "vocab" and self.axes[-1] != "experts"

    @property
    def of_scales(self) -> "ParamInfo":
        """Of the scales of this matrix in 8 bits."""
        shape, axes = [*self.shape], [*self.axes]
        for axis in self.inputs:
            shape[axis], axes[axis] = 1, None
        return ParamInfo(tuple(shape), tuple(axes))

    def abstract(self, mesh: AnyMesh, dtype: Any, weights: StoredForm | None = None) -> Any:
        """Shapes of it on `mesh`, in the 8-bit form where there is one and it has one."""
        sharding = self.sharding(mesh)
        if weights is None or not self.in_8_bits:
            return jax.ShapeDtypeStruct(self.shape, dtype, sharding=sharding)
        scales = self.of_scales
        return QuantisedMatrix(
            jax.ShapeDtypeStruct(self.shape, jnp.int8, sharding=sharding),
            jax.ShapeDtypeStruct(scales.shape, jnp.float32, sharding=scales.sharding(mesh)),
            jnp.dtype(dtype),
        )


def info_of(leaf: Any) -> ParamInfo:
    """Of a leaf of `abstract_model`'s state."""
    return ParamInfo(tuple(leaf.shape), leaf.get_metadata("axes"))


def param(shape: tuple[int, ...], axes: tuple[str | None, ...]) -> nnx.Param:
    """Only its shape counts: `init_params` makes random values, the loader reads stored ones."""
    return nnx.Param(jnp.zeros(shape, jnp.float32), axes=axes)
