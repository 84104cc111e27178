"""The devices that can be planned for, and the constants of their roofline.

Memory, dense bfloat16 FLOP/s and bandwidth are from the makers' data sheets, except for `cpu`,
where they are assumed. Link bandwidth, latency of a collective and the shares of the peaks that
programs reach are assumptions, chosen from published kernel timings and, for H100 and H200, from
this library's own on an H200. Its kernels are for Hopper; other GPUs run XLA's programs, for which
lower shares are assumed. Every plan prints all of them.
"""

import dataclasses
import math
import re

from jax_longctx.errors import InputError

GIB = 1024**3


@dataclasses.dataclass(frozen=True)
class Chip:
    """One device.

    Attributes:
      memory: bytes.
      flops: dense bfloat16 FLOP/s at peak.
      bandwidth: bytes/s of its memory.
      link: bytes/s that a device receives in a collective along one mesh axis.
      latency: seconds of the smallest collective.
      linear_share, attention_share: of `flops` that projections and prefill attention reach.
      bandwidth_share: of `bandwidth` that a decode step reaches.
      data_sheet: whether memory, flops and bandwidth are from a data sheet, or assumed.
    """

    memory: int
    flops: float
    bandwidth: float
    link: float
    latency: float
    linear_share: float
    attention_share: float
    bandwidth_share: float
    data_sheet: bool = True


# Memory, FLOP/s and bandwidth; link and latency; shares of linear layers, attention and bandwidth.
# A TPU's link is both directions of one torus axis.
CHIPS = {
    "v5e": Chip(16 * GIB, 197e12, 0.82e12, 90e9, 3e-6, 0.6, 0.5, 0.8),
    "v5p": Chip(95 * GIB, 459e12, 2.77e12, 180e9, 3e-6, 0.65, 0.7, 0.8),
    "v6e": Chip(32 * GIB, 918e12, 1.64e12, 180e9, 3e-6, 0.5, 0.3, 0.8),
    "h100": Chip(80 * 10**9, 989e12, 3.35e12, 370e9, 12e-6, 0.7, 0.55, 0.72),
    "h200": Chip(141 * 10**9, 989e12, 4.8e12, 370e9, 12e-6, 0.7, 0.55, 0.72),
    "a100": Chip(80 * 10**9, 312e12, 2.04e12, 250e9, 12e-6, 0.65, 0.25, 0.6),
    "l40s": Chip(48 * 10**9, 362e12, 0.864e12, 25e9, 15e-6, 0.65, 0.25, 0.6),
    "rtx4090": Chip(24 * 10**9, 165e12, 1.01e12, 25e9, 15e-6, 0.65, 0.25, 0.6),
    "rtx5090": Chip(32 * 10**9, 210e12, 1.79e12, 50e9, 15e-6, 0.65, 0.25, 0.6),
    "b200": Chip(180 * 10**9, 2250e12, 8e12, 750e9, 12e-6, 0.6, 0.25, 0.6),
    "mi300x": Chip(192 * 10**9, 1307e12, 5.3e12, 370e9, 15e-6, 0.5, 0.25, 0.6),
    "cpu": Chip(16 * GIB, 0.3e12, 20e9, 10e9, 50e-6, 0.3, 0.1, 0.6, data_sheet=False),
}


@dataclasses.dataclass(frozen=True)
class Target:
    """A number of equal devices.

    Attributes:
      name: as given.
      kind: of the devices, a key of CHIPS.
      count: number of devices.
      topology: libtpu's name of a TPU slice, or None.
    """

    name: str
    kind: str
    count: int
    topology: str | None

    @property
    def chip(self) -> Chip:
        return CHIPS[self.kind]


def parse_target(name: str) -> Target:
    """`v5e:4x4`, `v5p:4x4x4`, `v6e:8x8`, `h100x8` and other GPUs, `cpu`; else InputError."""
    tpu = re.fullmatch(r"(v5e|v5p|v6e):(\d+(?:x\d+){1,2})", name)
    if tpu is not None:
        kind, sizes = tpu[1], [int(size) for size in tpu[2].split("x")]
        if len(sizes) == (3 if kind == "v5p" else 2) and min(sizes) > 0:
            return Target(name, kind, math.prod(sizes), name)
    others = "|".join(kind for kind in CHIPS if not kind.startswith("v"))
    gpus = re.fullmatch(rf"({others})(?:x(\d+))?", name)
    if gpus is not None and int(gpus[2] or 1) > 0:
        return Target(name, gpus[1], int(gpus[2] or 1), None)
    raise InputError(
        f"--target {name!r} is not understood; expected v5e:4x4, v5p:4x4x4, v6e:8x8, or with a "
        f"number as h100x8: {others.replace('|', ', ')}"
    )
