"""Keys and values in int8 for the streaming attention of the Mosaic GPU kernels.

wgmma reads its second operand from shared memory, in 16 bits. So blocks of int8 come into rings of
their own, two blocks deep, and their scales into small ones. A third warpgroup turns a block into
the dtype of the queries, exactly, in the rings that `hopper.attend_blocks` reads, two blocks deep.
The warpgroup that computes multiplies products and weights by the scales. Not measured.

Shared memory for blocks of 128: 192 KiB of rings, as for three blocks in 16 bits, and 2 of scales.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hopper
from pallas_kernels.quantised import SCALES

# Blocks that are copied ahead, of numbers and of scales, and that are converted ahead.
_BITS, _SCALES, CONVERTED = 2, 4, 2
# Registers of a thread: the warpgroup that computes, the one that copies, the one that converts.
REGISTERS = (208, 56, 160)


def scratch(block: int, head_dim: int, dtype: Any, copies: int = 1) -> dict[str, Any]:
    """`hopper.rings_scratch` for converted blocks, and the rings of int8 and of scales.

    Args:
      copies: those that fill a block of numbers; a block of scales is one.
    """
    bits = hopper.tiled(_BITS, block, head_dim, dtype=jnp.int8)
    scales = plgpu.SMEM((_SCALES, block), SCALES)
    found: dict[str, Any] = hopper.rings_scratch(CONVERTED, block, head_dim, dtype)
    found |= {"bits": (bits, bits), "scales": (scales, scales)}
    for name, stages, arrivals in (("bits", _BITS, copies), ("scales", _SCALES, 1)):
        ready = plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages)
        free = plgpu.Barrier(num_barriers=stages)
        found |= {f"{name}_ready": (ready, ready), f"{name}_free": (free, free)}
    return found


def fill(scratch: dict, name: str, refs: Sequence, step: Array, copy: Callable[..., None]) -> None:
    """Call copy(ref, place, ready) for keys and for values of the rings "bits" or "scales"."""
    rings = {"rings": scratch[name]}
    rings |= {state: scratch[f"{name}_{state}"] for state in ("ready", "free")}
    slot = lax.rem(step, scratch[name][0].shape[0])

    def into(ref: Any, ring: Any, ready: Any) -> None:
        copy(ref, ring.at[slot], ready)

    hopper.fill_rings(rings, refs, step, slot, into)


def drain(scratch: dict, steps: Array) -> None:
    """Wait until the last of `steps` copied blocks have been used."""
    for name, stages in (("bits", _BITS), ("scales", _SCALES)):
        for free in scratch[f"{name}_free"]:
            hopper.drain(free, steps, stages)


def convert(scratch: dict, step: Array, dtype: Any) -> None:
    """Turn a step's block of keys and of values into `dtype`, once there is room."""
    source, target = lax.rem(step, _BITS), lax.rem(step, CONVERTED)
    for which in range(2):
        plgpu.barrier_wait(scratch["bits_ready"][which].at[source])
        bits = plgpu.load(scratch["bits"][which].at[source], layout=plgpu.Layout.WGMMA_UPCAST_2X)
        free = scratch["free"][which].at[target]
        pl.when(step >= CONVERTED)(functools.partial(plgpu.barrier_wait, free))
        scratch["rings"][which].at[target][...] = bits.astype(dtype)
        plgpu.commit_smem()
        plgpu.barrier_arrive(scratch["bits_free"][which].at[source])
        plgpu.barrier_arrive(scratch["ready"][which].at[target])


def drain_converted(scratch: dict, steps: Array) -> None:
    """Wait until the last of `steps` converted blocks have been used."""
    for free in scratch["free"]:
        hopper.drain(free, steps, CONVERTED)


def scaled(scratch: dict, which: int, x: Array, step: Array) -> Array:
    """Products with keys (0), or weights of values (1), times the scales of a step's block."""
    slot = lax.rem(step, _SCALES)
    plgpu.barrier_wait(scratch["scales_ready"][which].at[slot])
    ring = scratch["scales"][which]
    scales = plgpu.load(ring.at[slot], layout=plgpu.Layout.WGMMA.reduce(0))
    scales = lax.broadcast_in_dim(scales.astype(jnp.float32), x.shape, [1])
    plgpu.barrier_arrive(scratch["scales_free"][which].at[slot])
    return x * scales
