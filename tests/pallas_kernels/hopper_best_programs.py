"""Compiles kernels of `hopper_best` and of `gpu_ties` for an H200 that need not be there.

`python -m tests.pallas_kernels.hopper_best_programs` in a process that finds JAX's CUDA plugin,
with `MOSAIC_GPU_DUMP_TO` and `MOSAIC_GPU_DUMP_PTX`: one file of PTX for each name of `KERNELS` and
`TIES`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hopper_best
from pallas_kernels.topk_scores import gpu_ties
from tests.gpu_plugin import compiler
from tests.jax_longctx.engine.gpu_programs import H200

# Name: tiles of a row of scores, places of its list, and the gap in the row.
KERNELS: dict[str, tuple[int, int, tuple[int, int] | None]] = {
    "best_one": (1, 64, None),
    "best_few": (2, 20, None),
    "best_gap": (2, 64, (1000, 1408)),
    # More than registers hold.
    "best_many": (5, 512, None),
}
# Name: what runs, and the shapes and dtypes of its arguments.
TIES: dict[str, tuple[Any, list[tuple[tuple[int, ...], Any]]]] = {
    "tied_best": (
        lambda tolerance, scores, **how: gpu_ties.tied_best(scores, 4, tolerance, **how),
        [((2,), jnp.float32), ((2, 1536), jnp.float32)],
    ),
    "ranked_lists": (
        lambda tolerance, values, slots, **how: gpu_ties.ranked_lists(
            *(values, slots, 60, 4, tolerance), **how
        ),
        [((2, 4), jnp.float32), ((2, 64, 8), jnp.float32), ((2, 64, 8), jnp.int32)],
    ),
}


def kernel(name: str) -> Any:
    """Of first, last and k [3] and scores [T,64,64] the list, which is the second of two."""
    tiles, places, gap = KERNELS[name]

    def body(bounds_ref, scores_ref, list_ref, **scratch) -> None:
        bounds = bounds_ref[0], bounds_ref[1], bounds_ref[2]

        def scores(i: Any) -> Any:
            return hopper_best.load(scores_ref.at[i])

        edges = None if gap is None else tuple(map(jnp.int32, gap))
        hopper_best.best(tiles, scores, bounds, list_ref.at[1], scratch, False, gap=edges)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((2, places), jnp.int32),
        scratch_types=hopper_best.scratch(tiles),
        kernel_name=name,
    )


def main() -> None:
    compiled = compiler(H200)
    for name, (tiles, _, _) in KERNELS.items():
        compiled(kernel(name), ((3,), jnp.int32), ((tiles, 64, 64), jnp.float32))
    for run, shapes in TIES.values():
        compiled(run, *shapes)


if __name__ == "__main__":
    main()
