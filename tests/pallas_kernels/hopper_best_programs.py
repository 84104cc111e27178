"""Compiles kernels of `hopper_best` for an H200 that need not be there.

`python -m tests.pallas_kernels.hopper_best_programs` in a process that finds JAX's CUDA plugin,
with `MOSAIC_GPU_DUMP_TO` and `MOSAIC_GPU_DUMP_PTX`: one file of PTX for each name of `KERNELS`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hopper_best
from tests.jax_longctx.engine.gpu_programs import H200

# Name: tiles of a row of scores, places of its list, and the gap in the row.
KERNELS: dict[str, tuple[int, int, tuple[int, int] | None]] = {
    "best_one": (1, 64, None),
    "best_two": (2, 128, None),
    "best_gap": (2, 64, (1000, 1408)),
    # More than registers hold.
    "best_many": (5, 512, None),
}


def kernel(name: str) -> Any:
    """Of first, last and k [3] and scores [T,64,64] the list."""
    tiles, places, gap = KERNELS[name]

    def body(bounds_ref, scores_ref, list_ref, **scratch) -> None:
        bounds = bounds_ref[0], bounds_ref[1], bounds_ref[2]
        scores = lambda i: hopper_best.load(scores_ref.at[i])  # noqa: E731
        edges = None if gap is None else tuple(map(jnp.int32, gap))
        hopper_best.best(tiles, scores, bounds, list_ref, scratch, False, gap=edges)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((places,), jnp.int32),
        scratch_types=hopper_best.scratch(tiles),
        kernel_name=name,
    )


def main() -> None:
    jax.config.update("jax_enable_compilation_cache", False)
    # The plugin is registered with the first backend.
    jax.devices("cpu")
    h200 = topologies.get_topology_desc(platform="cuda", target_config=H200, topology="1x1x1")
    mesh = jax.sharding.Mesh(h200.devices[:1], ("x",))
    there = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    on = functools.partial(jax.ShapeDtypeStruct, sharding=there)
    for name, (tiles, _, _) in KERNELS.items():
        given = on((3,), jnp.int32), on((tiles, 64, 64), jnp.float32)
        jax.jit(kernel(name)).trace(*given).lower(lowering_platforms=("cuda",)).compile()


if __name__ == "__main__":
    main()
