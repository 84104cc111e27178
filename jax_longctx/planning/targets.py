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

from jax_longctx.errors import ConfigError, InputError

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
      bandwidth_share: of `bandwidth` that a decode step reaches while it reads.
      ramp: seconds of each layer of a step in which its kernels begin and end and read nothing.
      choice: seconds of a layer more where a step chooses which keys it reads.
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
    ramp: float = 0.0
    choice: float = 0.0
    data_sheet: bool = True


# Ramp and choice of the kernels for Hopper, some 15 and 7 launches a layer; they are of steps over
# 32,768 and 131,072 tokens on one H200 (`docs/results/decode-steps.json`). The lower shares of
# bandwidth that are assumed for other chips stand for theirs.
_HOPPER = (32e-6, 30e-6)

# Memory, FLOP/s and bandwidth; link and latency; shares of linear layers, attention and bandwidth.
# A TPU's link is both directions of one torus axis.
CHIPS = {
    "v5e": Chip(16 * GIB, 197e12, 0.82e12, 90e9, 3e-6, 0.6, 0.5, 0.8),
    "v5p": Chip(95 * GIB, 459e12, 2.77e12, 180e9, 3e-6, 0.65, 0.7, 0.8),
    "v6e": Chip(32 * GIB, 918e12, 1.64e12, 180e9, 3e-6, 0.5, 0.3, 0.8),
    "h100": Chip(80 * 10**9, 989e12, 3.35e12, 370e9, 9e-6, 0.7, 0.55, 0.91, *_HOPPER),
    "h200": Chip(141 * 10**9, 989e12, 4.8e12, 370e9, 9e-6, 0.7, 0.55, 0.91, *_HOPPER),
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
      memory: bytes of each device; None for those of CHIPS.
    """

    name: str
    kind: str
    count: int
    topology: str | None
    memory: int | None = None

    @property
    def chip(self) -> Chip:
        chip = CHIPS[self.kind]
        return dataclasses.replace(chip, memory=self.memory or chip.memory)


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


def target_at_hand() -> Target:
    """The devices of all processes; ConfigError where their rates are not known."""
    import jax

    device, count = jax.devices()[0], jax.device_count()
    name = "".join(device.device_kind.lower().split()).replace("lite", "e")
    # JAX calls a v5p so.
    name = "tpuv5p" if name == "tpuv5" else name
    kind = next((kind for kind in CHIPS if kind in name), None)
    if kind is None:
        raise ConfigError(
            f"mesh auto does not know the rates of {device.device_kind}; name the axes, as tensor="
            f"{count}"
        )
    return Target(f"{kind}x{count}", kind, count, name if device.platform == "tpu" else None)
