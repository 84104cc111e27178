"""`Plane`: one layer's part of an array that holds many layers.

A loop over layers carries every layer's cache in one array. A slice of it that is changed and put
back costs a copy of the layer's cache each way; a `Plane` is written where it lies instead. Read as
a slice it costs a copy on TPUs only: on GPUs XLA hands the slice's address to matmuls and to
Mosaic kernels (a test sees it in the compiled program), and TPU kernels take the layer's index.
"""

import dataclasses
import math
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
        return row_major(jax.lax.dynamic_index_in_dim(self.whole, self.layer, keepdims=False))

    def cut(self, start: Any, size: int) -> Array:
        """`size` slots of the layer's part, along its third axis, from `start` on."""
        _, batch, heads, _, *width = self.whole.shape
        place = (self.layer, 0, 0, start, *(0 for _ in width))
        found = jax.lax.dynamic_slice(self.whole, place, (1, batch, heads, size, *width))
        return row_major(found[0])

    def __getitem__(self, index: Any) -> Array:
        return self.read()[index]

    def rows(self) -> tuple[Array, Array]:
        """All layers' rows, [L * B, ...], and the first that is this layer's."""
        rows = self.whole.shape[1]
        return self.whole.reshape(-1, *self.whole.shape[2:]), self.layer * rows

    def with_rows(self, rows: Array) -> "Plane":
        """The plane after its rows, and no others, were changed."""
        return Plane(rows.reshape(self.whole.shape), self.layer)

    def write(self, part: Array) -> "Plane":
        """The plane with another part."""
        return Plane(
            jax.lax.dynamic_update_index_in_dim(self.whole, part, self.layer, 0), self.layer
        )


def part_of(tree: Any) -> Any:
    """What a plane holds; any other tree with arrays in place of its planes."""

    def read(leaf: Any) -> Any:
        return leaf.read() if isinstance(leaf, Plane) else leaf

    return jax.tree.map(read, tree, is_leaf=lambda x: isinstance(x, Plane))
