"""`Plane`: one layer's part of an array that holds many layers.

A loop over layers carries every layer's cache in one array. A slice of it that is changed and put
back costs a copy of the layer's cache each way; a `Plane` is written where it lies instead. Read as
a slice it costs a copy on TPUs only: on GPUs XLA hands the slice's address to matmuls and to
Mosaic kernels (a test sees it in the compiled program), and TPU kernels take the layer's index.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
from jax import Array
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Int


def row_major(x: Array) -> Array:
    """What is read from a plane, or written to one, in the layout that all planes have.

    Without it XLA for GPUs gives all layers' array the layout that a reader or writer of a part
    prefers, and copies the whole array before and after the loop.
    """
    return with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim))))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plane:
    """`whole[layer]`, which may stand for a cache's array in reads and writes of rows.

    Attributes:
      whole: [L, B, ...], every layer's part.
      layer: which of them this is.
    """

    whole: Array
    layer: Int[Array, ""]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.whole.shape[1:]

    @property
    def ndim(self) -> int:
        return self.whole.ndim - 1

    @property
    def dtype(self) -> Any:
        return self.whole.dtype

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.whole.dtype.itemsize

    def read(self) -> Array:
        """The layer's part."""
        return row_major(layer_of(self))

    def cut(self, start: Any, size: int) -> Array:
        """`size` slots of the layer's part, along its third axis, from `start` on."""
        _, batch, heads, _, *width = self.whole.shape
        place = (self.layer, 0, 0, start, *(0 for _ in width))
        found = jax.lax.dynamic_slice(self.whole, place, (1, batch, heads, size, *width))
        return row_major(found[0])

    def __getitem__(self, index: Any) -> Array:
        return self.read()[index]


# What follows takes arrays too. So its callers need not know which it is.


def is_plane(node: Any) -> bool:
    return isinstance(node, Plane)


def each_array(change: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """`change` of each array of a tree, its planes as they are, beside those of `others`.

    Of keys or values in few bits it changes numbers and scales alike.
    """
    return jax.tree.map(change, tree, *others, is_leaf=is_plane)


def part_of(tree: Any) -> Any:
    """A tree with each layer's part in place of its planes."""
    return each_array(lambda x: x.read() if isinstance(x, Plane) else x, tree)


def layer_of(x: Any) -> Array:
    """`part_of` an array, in any layout, and in the memory where it lies."""
    if not isinstance(x, Plane):
        return x
    return jax.lax.dynamic_index_in_dim(x.whole, x.layer, keepdims=False)


def rows_of(x: Any) -> tuple[Array, Any]:
    """An array's rows, of a plane all layers' [L * B, ...], and the first that is this layer's."""
    if not isinstance(x, Plane):
        return x, 0
    return x.whole.reshape(-1, *x.whole.shape[2:]), x.layer * x.shape[0]


def with_rows(x: Any, rows: Array, *, apart: bool = False) -> Any:
    """`x` after the rows of this layer, and no others, were changed.

    Args:
      apart: whether what writes a plane's rows must not be fused with what reads them.
    """
    if not isinstance(x, Plane):
        return rows
    whole = rows.reshape(x.whole.shape)
    # The layer's number stays what the loop counts.
    return Plane(jax.lax.optimization_barrier(whole) if apart else whole, x.layer)


def laid_as(x: Any, part: Array) -> Array:
    """A part that is read from `x`, or written to it: `row_major` for a plane."""
    return row_major(part) if isinstance(x, Plane) else part


def written(old: Any, new: Any) -> Any:
    """What stands for `old` after it became `new`: in place of an array, the plane that has it."""
    if isinstance(new, Plane) or not isinstance(old, Plane):
        return new
    return Plane(put(old.whole, old.layer, new), old.layer)


def put(stack: Array, layer: Any, part: Any) -> Array:
    """All layers' array with another part of a layer, which may be a plane of it."""
    if isinstance(part, Plane):
        return part.whole
    return jax.lax.dynamic_update_index_in_dim(stack, part, layer, 0)
