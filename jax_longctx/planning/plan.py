"""A plan: bytes on each device against its memory, and the times that a roofline predicts.

Everything here is arithmetic over shapes, on a mesh of devices that need not be there.
`planning.compiled` asks the compiler instead.
"""

import dataclasses
import functools
import itertools
import math
from typing import Any

import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType

from jax_longctx.contract import Method
from jax_longctx.engine import programs
from jax_longctx.engine.capacity import USABLE, Footprint, bucket, footprint
from jax_longctx.errors import ConfigError, InputError
from jax_longctx.models.config import ModelConfig
from jax_longctx.models.llama import check_mesh
from jax_longctx.planning.targets import Chip, Target
from jax_longctx.planning.work import (
    Work,
    decode_work,
    first_segment,
    prefill_work,
    weight_bytes,
)
from jax_longctx.sharding import MESH_AXES

__all__ = ["Plan", "PlanRequest", "make_plan", "propose_mesh"]

# An answer's tokens that a proposed mesh is chosen for, beside its first.
ANSWER = 256
# The largest context that fits is told in multiples of this.
STEP = 1024
PROBE = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What is planned.

    Attributes:
      context: tokens of each of `batch` rows.
      reserve: tokens of question and answer.
      chunk: tokens that a prefill pass takes.
    """

    config: ModelConfig
    method: Method
    target: Target
    context: int
    batch: int = 1
    reserve: int = 256
    chunk: int = 512
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        for name in ("context", "batch", "reserve", "chunk"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, got {getattr(self, name)}")

    def rows(self, sizes: dict[str, int]) -> int:
        """Rows with those that fill the mesh's data axis."""
        return -(-self.batch // sizes["data"]) * sizes["data"]

    def setup(self, mesh: Any) -> programs.Setup:
        """What the programs are made for. Raises ConfigError where it does not go together."""
        self.method.validate(self.config)
        check_mesh(self.config, mesh)
        return programs.Setup(self.config, self.method, mesh, jnp.dtype(self.dtype), self.chunk)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Bytes and work of one device; seconds of all together.

    Attributes:
      mesh: sizes of the axes.
      weights, cache, temporaries: bytes; of the caches the most at any time, of the temporaries an
        estimate of a prefill pass's activations, or what was compiled.
      memory: bytes that the device has.
      fits: whether they do, with the tenth of what is left that the engine keeps free.
      largest: the longest context that fits, in tokens; None where it does not depend on it.
      first_token, step: seconds to the first token, and of each further token of every row.
    """

    mesh: dict[str, int]
    weights: int
    cache: int
    temporaries: int
    memory: int
    fits: bool
    largest: int | None
    prefill: Work
    decode: Work
    first_token: float
    step: float

    @property
    def need(self) -> int:
        """Bytes of all three."""
        return self.weights + self.cache + self.temporaries


def make_plan(
    request: PlanRequest,
    sizes: dict[str, int],
    *,
    largest: bool = True,
    temporaries: int | None = None,
) -> Plan:
    """The plan on a mesh of `sizes`.

    Args:
      temporaries: what the compiled programs were found to take (`compiled.most_temporaries`), in
        place of the estimate, which is scaled to it at other lengths.

    Raises:
      ConfigError: method, model and mesh do not go together, or the target has fewer devices.
    """
    sizes = {axis: sizes.get(axis, 1) for axis in MESH_AXES}
    used = math.prod(sizes.values())
    if used > request.target.count:
        raise ConfigError(
            f"mesh {shown_mesh(sizes)} needs {used} devices, {request.target.name} has "
            f"{request.target.count}; lower a size"
        )
    shape = tuple(sizes.values())
    mesh = AbstractMesh(shape, MESH_AXES, axis_types=(AxisType.Auto,) * 3)
    setup, rows, chip = request.setup(mesh), request.rows(sizes), request.target.chip
    scale = 1.0
    if temporaries is not None:
        scale = temporaries / _temporaries(setup, request, rows, request.context)
    held = _memory(setup, request, rows, request.context, scale)
    read = _caches(setup, request, rows, request.context).read
    prefill = prefill_work(setup, batch=rows, context=request.context, reserve=request.reserve)
    decode = decode_work(setup, batch=rows, context=request.context, read=read)
    step = _decode_seconds(decode, chip)
    return Plan(
        mesh=sizes,
        weights=held[0],
        cache=held[1],
        temporaries=held[2],
        memory=chip.memory,
        fits=_fits(held, chip),
        largest=_largest(setup, request, rows, scale) if largest else None,
        prefill=prefill,
        decode=decode,
        first_token=_prefill_seconds(prefill, chip) + step,
        step=step,
    )


def propose_mesh(request: PlanRequest) -> dict[str, int]:
    """The mesh over the target's devices whose answer comes first, of those that fit.

    Where none fits, the one that comes nearest. All devices are used where any mesh of them can.

    Raises:
      ConfigError: the model divides over no mesh, or the method refuses it.
    """
    request.method.validate(request.config)
    for count in range(request.target.count, 0, -1):
        plans = list(filter(None, (_tried(request, sizes) for sizes in _meshes(count))))
        if plans:
            return min(plans, key=_rank).mesh
    raise ConfigError(f"the model divides over no mesh of {request.target.name}")


def _meshes(count: int) -> list[dict[str, int]]:
    divisors = [size for size in range(1, count + 1) if count % size == 0]
    return [
        {"data": data, "seq": seq, "tensor": count // (data * seq)}
        for data, seq in itertools.product(divisors, divisors)
        if count % (data * seq) == 0
    ]


def _tried(request: PlanRequest, sizes: dict[str, int]) -> Plan | None:
    config, tensor = request.config, sizes["tensor"]
    split = (config.num_heads, config.num_kv_heads, config.mlp_dim, config.vocab_size)
    if sizes["data"] > request.batch or any(size % tensor for size in split):
        return None
    return make_plan(request, sizes, largest=False)


def _rank(plan: Plan) -> tuple[Any, ...]:
    late = plan.first_token + ANSWER * plan.step
    return (not plan.fits, late if plan.fits else plan.need)


def shown_mesh(sizes: dict[str, int]) -> str:
    """`data=1,seq=2,tensor=4`, as --mesh takes it."""
    return ",".join(f"{axis}={size}" for axis, size in sizes.items())


@functools.lru_cache(maxsize=64)
def _caches(setup: programs.Setup, request: PlanRequest, rows: int, context: int) -> Footprint:
    return footprint(setup, batch=rows, context=context, reserve=request.reserve, per_device=True)


def _memory(
    setup: programs.Setup, request: PlanRequest, rows: int, context: int, scale: float
) -> tuple[int, int, int]:
    """Bytes on a device: weights, caches at their most, temporaries (the estimate, scaled)."""
    cache = _caches(setup, request, rows, context).peak
    temporaries = round(scale * _temporaries(setup, request, rows, context))
    return weight_bytes(setup), cache, temporaries


def _temporaries(setup: programs.Setup, request: PlanRequest, rows: int, context: int) -> int:
    """Activations of one layer and one segment, as many as live at once, and the logits."""
    config, shape, item = setup.config, setup.mesh.shape, setup.dtype.itemsize
    tensor, shards = shape["tensor"], shape["seq"]
    # Where a segment holds the whole text, it is made for a short one and scaled.
    probe = min(context, PROBE * shards)
    segment = first_segment(setup, 1, probe, bucket(probe + request.reserve + 1, shards))
    assert segment is not None
    columns = segment.tokens.shape[1]
    if segment.spread:
        columns = columns // shards * context // probe
    heads = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    token = (3 * config.model_dim + (2 * config.mlp_dim + heads) // tensor) * item
    if shards > 1 and not segment.spread:
        # Partial results in float32, before and after they are merged.
        token += 2 * config.num_heads // tensor * (config.head_dim + 1) * 4
    local = rows // shape["data"]
    return local * (columns * token + config.vocab_size * 4)


def _fits(held: tuple[int, int, int], chip: Chip) -> bool:
    weights, cache, temporaries = held
    return cache <= USABLE * (chip.memory - weights - temporaries)


def _largest(setup: programs.Setup, request: PlanRequest, rows: int, scale: float) -> int | None:
    """The longest context that fits, 0 where none does; None where memory does not bound it."""
    chip = request.target.chip

    def held(context: int) -> tuple[int, int, int]:
        return _memory(setup, request, rows, context, scale)

    def need(context: int) -> float:
        weights, cache, temporaries = held(context)
        return weights + temporaries + cache / USABLE

    if not _fits(held(STEP), chip):
        return 0
    # Far apart, so that rounding of capacities is small beside what is between them.
    near, far = 16 * STEP, 256 * STEP
    slope = (need(far) - need(near)) / (far - near)
    if slope < 1:
        return None
    guess = int(near + (chip.memory - need(near)) / slope) // STEP * STEP
    while guess > STEP and not _fits(held(guess), chip):
        guess = int(guess * 0.98) // STEP * STEP
    return max(guess, STEP)


def _prefill_seconds(work: Work, chip: Chip) -> float:
    compute = work.linear / (chip.flops * chip.linear_share)
    read = work.read / (chip.bandwidth * chip.bandwidth_share)
    attention = work.attention / (chip.flops * chip.attention_share)
    return max(compute, read) + attention + _waiting(work, chip)


def _decode_seconds(work: Work, chip: Chip) -> float:
    compute = (work.linear + work.attention) / (chip.flops * chip.linear_share)
    read = work.read / (chip.bandwidth * chip.bandwidth_share)
    return max(compute, read) + _waiting(work, chip)


def _waiting(work: Work, chip: Chip) -> float:
    """Seconds that a device waits for others; nothing of it is counted as overlapped."""
    return work.received / chip.link + work.collectives * chip.latency
