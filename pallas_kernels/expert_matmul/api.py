"""x[u] @ w[experts[u]]: blocks of rows, each times one of many matrices, which may be in 8 bits.

Only matrices that a block chooses are read. Implementations: `xla` on every platform, `gpu`
(Mosaic), `reference` for tests.
"""

from typing import Any

import jax
from jax import Array
from jaxtyping import Float, Int

from pallas_kernels import dispatch
from pallas_kernels.expert_matmul import gpu, reference, xla
from pallas_kernels.plane import Plane, is_plane
from pallas_kernels.quantised import coded

# Blocks of at most as many rows are bound by the bytes of the matrices.
MAX_ROWS = 16


def expert_matmul(
    x: Float[Array, "X R D"],
    w: Any,
    experts: Int[Array, " U"],
    count: Int[Array, ""],
    *,
    implementation: str | None = None,
) -> Float[Array, "U R N"]:
    """The products of the first `count` blocks, summed in float32, in x's dtype.

    What the result holds of the blocks after them is not defined.

    Args:
      x: the blocks; of one alone each matrix is multiplied with it.
      w: [E, D, N], an array or a `Plane`; or a `QuantisedMatrix` of either, which has a scale for
        each output of each matrix.
      experts: the matrix of each block.
      implementation: "xla", "gpu" or "reference"; None picks by platform and shape.

    Raises:
      ValueError: the shapes or dtypes do not fit.
    """
    if x.ndim != 3 or w.ndim != 3 or x.shape[2] != w.shape[1] or x.dtype != w.dtype:
        raise ValueError(f"expert_matmul: {x.dtype}{x.shape} does not fit {w.dtype}{w.shape}")
    if x.shape[0] not in (1, len(experts)):
        raise ValueError(f"expert_matmul: {x.shape[0]} blocks for {len(experts)} experts")
    run = dispatch.select(
        "expert_matmul",
        implementation,
        f"{x.dtype} blocks of {x.shape[1]} rows, {w.shape[0]} experts, {w.shape[1]} to "
        f"{w.shape[2]}" + ", weights in int8" * coded(w),
        xla=xla.expert_matmul,
        gpu=dispatch.Kernel(gpu.expert_matmul, lambda: gpu.unsupported(x, w)),
        reference=reference.expert_matmul,
    )
    # All layers' matrices beside one another: no slice of a layer is made.
    first = jax.tree.leaves(w, is_leaf=is_plane)[0]
    if isinstance(first, Plane):
        experts = experts + first.layer * first.shape[0]
        w = jax.tree.map(lambda x: x.whole.reshape(-1, *x.shape[1:]), w, is_leaf=is_plane)
    return run(x, w, experts, count)
