"""A plan: bytes on each device against its memory, and the times that a roofline predicts.

All of it is arithmetic over shapes, on a mesh of devices that need not exist. `planning.compiled`
compiles the programs instead.

`planning.work` gives the work of each device.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType

from jax_longctx.choosing import Case, Choice, choose
from jax_longctx.engine import capacity
from jax_longctx.engine.products import gathers_weights
from jax_longctx.engine.setup import Setup
from jax_longctx.errors import ConfigError, InputError, LongctxError
from jax_longctx.memory import allow_pinned
from jax_longctx.methods import make_method
from jax_longctx.models.config import ModelConfig
from jax_longctx.planning.targets import Chip, Target, target_at_hand
from jax_longctx.planning.work import (
    Work,
    context_feed,
    decode_work,
    matrices,
    own_matmuls,
    prefill_work,
    row_work,
    stored_bytes,
    sum_parts,
    weight_axes,
    weight_bytes,
)
from jax_longctx.run_spec import ON_DEVICES, RunSpec
from jax_longctx.settings import AUTO, at_least
from jax_longctx.sharding import MESH_AXES, make_mesh, undivided

# Meshes that a choice is shown with; the one of one device.
SHOWN, ONE = 4, "one device"
# The largest context that fits is a multiple of this.
STEP = 1024
PROBE = 4096
# Bytes a second between a device and its host's memory, measured on an H200.
HOST_LINK = 48e9


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What is planned.

    Attributes:
      context: tokens of each of `batch` rows.
      reserve: tokens of question and answer.
      spec: how it runs, in bfloat16 unless it names a dtype; its mesh is not read.
    """

    config: ModelConfig
    spec: RunSpec
    target: Target
    context: int
    batch: int = 1
    reserve: int = 256

    def __post_init__(self) -> None:
        at_least(1, self, "context", "batch", "reserve", error=InputError)

    def rows(self, sizes: dict[str, int]) -> int:
        """Rows, padded to the mesh's data axis."""
        return -(-self.batch // sizes["data"]) * sizes["data"]

    def setup(self, mesh: Any) -> Setup:
        """The programs' setup. ConfigError where method, model and mesh do not fit together."""
        return capacity.setup_of(self.config, dataclasses.replace(self.spec, mesh=mesh))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Bytes and work of one device; seconds of all devices together.

    Attributes:
      mesh: sizes of the axes.
      host: bytes of the caches in the host's memory, for each device.
      weights, cache, temporaries: bytes: the caches at their peak; the temporaries as an estimate
        of a prefill pass's activations, or as compiled.
      memory: bytes of the device's memory.
      fits: whether all fit, beside the tenth of the remaining memory that the engine keeps free.
      largest: the longest context that fits, in tokens; None where memory does not bound it.
      undivided: axes of weights that do not divide over `seq`, so that each of its shards holds and
        reads those weights whole.
      first_token, step: seconds to the first token, and of each further token of every row. A step
        leaves out what it fetches from the host's memory, which depends on the text.
      moved: seconds of the first that take the transfers to the host's memory and from it.
    """

    mesh: dict[str, int]
    weights: int
    cache: int
    host: int
    temporaries: int
    memory: int
    fits: bool
    largest: int | None
    undivided: tuple[str, ...]
    prefill: Work
    decode: Work
    first_token: float
    step: float
    moved: float = 0.0

    @property
    def axes(self) -> str:
        """The mesh as `--mesh` takes it, without axes of one device."""
        return ",".join(f"{axis}={size}" for axis, size in self.mesh.items() if size > 1)

    @property
    def used(self) -> int:
        """Bytes of the device's memory that are used."""
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
      temporaries: of the compiled programs (`compiled.most_temporaries`), in place of the
        estimate; at other lengths the estimate is scaled in proportion.

    Raises:
      ConfigError: method, model and mesh do not fit together, or the target has too few devices.
    """
    case = _case(request, sizes)
    if temporaries is not None:
        case = dataclasses.replace(case, scale=temporaries / case.temporaries(request.context))
    chip, context, rows = request.target.chip, request.context, case.rows
    prefill = prefill_work(case.setup, batch=rows, context=context, reserve=request.reserve)
    caches = case.caches(context)
    decode = decode_work(case.setup, batch=rows, context=context, read=caches.read)
    read = _seconds(prefill, prefill.linear, chip)
    read += prefill.attention / (chip.flops * chip.attention_share)
    step = _seconds(decode, decode.linear + decode.attention, chip)
    step += decode.layers * chip.ramp + decode.choices * chip.choice
    moved = _host_seconds(case.setup, context, request.reserve, caches.host)
    return Plan(
        mesh=dict(case.setup.mesh.shape),
        weights=weight_bytes(case.setup),
        cache=caches.peak,
        host=caches.host,
        temporaries=case.temporaries(context),
        memory=chip.memory,
        fits=case.fits(context),
        largest=case.largest() if largest else None,
        undivided=tuple(undivided(case.setup.mesh, **weight_axes(request.config))),
        prefill=prefill,
        decode=decode,
        first_token=read + step + moved,
        step=step,
        moved=moved,
    )


def candidates(
    request: PlanRequest, divide: Mapping[str, int] = MappingProxyType({})
) -> list[Plan]:
    """Plans on the meshes that the model divides over, the best first.

    A mesh has all devices, or so few that they divide into such meshes. Those that fit come first:
    by the time of a step, then by the time to the first token. Where none fits, the mesh that needs
    the least memory is first.

    Args:
      divide: numbers by axis that the axis's size must divide; 1 for an axis of one device.

    Raises:
      ConfigError: the method refuses the model, or one device and so each mesh.
    """
    request.spec.method.check_model(request.config)
    plans = []
    for sizes in _meshes(request.target.count):
        if sizes["data"] > request.batch or any(n % sizes[axis] for axis, n in divide.items()):
            continue
        try:
            plans.append(make_plan(request, sizes, largest=False))
        except ConfigError:
            # What one device refuses is no fault of the mesh.
            if math.prod(sizes.values()) == 1:
                raise
    return sorted(plans, key=_rank)


def on_best_mesh(
    spec: RunSpec,
    config: ModelConfig,
    *,
    divide: Mapping[str, int] = MappingProxyType({}),
    say: Callable[[str], object] = lambda text: None,
    **rows: int,
) -> RunSpec:
    """The spec with its mesh, which is "auto", chosen of the devices at hand.

    Args:
      spec: for the model's weights (`RunSpec.over`). Without a method it stands for one that is
        chosen later, or for several: full attention is planned, and nothing is offloaded.
      divide: as of `candidates`.
      say: is told the choice and the predicted steps, in one line.
      rows: `context`, `reserve` and `batch` of `PlanRequest`; else one row of the trained length.

    Raises:
      ConfigError: as `candidates`, or the rates of these devices are not known.
    """
    if spec.mesh != AUTO:
        return spec
    if spec.offload is not None:
        # Before the devices start.
        allow_pinned()
        divide = {**divide, "seq": 1}
    count = jax.device_count()
    if count == 1:
        return spec
    planned = dataclasses.replace(spec, **ON_DEVICES) if spec.method is None else spec
    memory = capacity.expected_bytes(make_mesh(data=count), ())
    request = PlanRequest(
        config=config,
        spec=dataclasses.replace(planned, method=spec.chosen()),
        target=dataclasses.replace(target_at_hand(), memory=memory),
        **{"context": config.trained_length, **rows},
    )
    plans = candidates(request, divide)
    if jax.process_count() > 1:
        # Every process needs a device.
        plans = [plan for plan in plans if math.prod(plan.mesh.values()) == count]
    if not plans:
        raise ConfigError(f"the model divides over no mesh of all {count} devices; name a mesh")
    told = shown_steps((plan.fits, plan.axes, plan.step) for plan in plans)
    about = f"{request.batch} x {request.context:,} tokens"
    say(f"mesh {plans[0].axes or ONE}: a step over {about} takes, by arithmetic, {told}")
    return dataclasses.replace(spec, mesh=plans[0].axes)


def shown_steps(steps: Iterable[tuple[bool, str, float]]) -> str:
    """The first meshes that fit, or of all where none does, with the seconds that a step takes.

    Args:
      steps: of each mesh whether it fits, its axes and these seconds; the best first.
    """
    told = [*steps]
    told = [each for each in told if each[0]] or told
    return ", ".join(f"{axes or ONE} {step * 1e3:.3g} ms" for _, axes, step in told[:SHOWN])


def alternatives(request: PlanRequest, mesh: dict[str, int]) -> dict[str, Plan]:
    """What fits on a mesh where the request does not: options of the command line, and plans.

    Of 8-bit weights, 8-bit keys and values, contexts in the host's memory and a method with a
    budget, as few together as needed; empty where all together do not fit.
    """
    changes: dict[str, dict[str, Any]] = {
        "--weights int8": {"weights": "int8"},
        "--kv int8": {"kv": "int8"},
        "--offload host": {"offload": "host"},
        "-m snapkv": {"method": make_method("snapkv")},
    }
    for count in range(1, len(changes) + 1):
        found = {}
        for names in itertools.combinations(changes, count):
            with contextlib.suppress(LongctxError):
                changed = {key: value for name in names for key, value in changes[name].items()}
                spec = dataclasses.replace(request.spec, **changed)
                other = dataclasses.replace(request, spec=spec)
                if other != request and _case(other, mesh).fits(other.context):
                    found[" ".join(names)] = make_plan(other, mesh, largest=False)
        if found:
            return found
    return {}


def choose_method(request: PlanRequest, mesh: dict[str, int], questions: int = 1) -> Choice:
    """The method for one text of the request on a mesh, as `--method auto` chooses it."""

    def under(method: Any) -> _Case:
        spec = dataclasses.replace(request.spec, method=method)
        return _case(dataclasses.replace(request, spec=spec), mesh)

    full = make_method("full")
    exact = under(full)
    beside = weight_bytes(exact.setup) + exact.temporaries(request.context)
    case = Case(
        config=request.config,
        tokens=request.context + request.reserve,
        full=full,
        free=max(request.target.chip.memory - beside, 0),
        cache=lambda method: under(method).caches(request.context).peak,
    )
    return choose(case, questions=questions)


def _meshes(count: int) -> list[dict[str, int]]:
    """The meshes of that many devices, or of a number that divides it."""
    divisors = [size for size in range(1, count + 1) if count % size == 0]
    sizes = itertools.product(divisors, repeat=len(MESH_AXES))
    return [dict(zip(MESH_AXES, n, strict=True)) for n in sizes if count % math.prod(n) == 0]


def _rank(plan: Plan) -> tuple[Any, ...]:
    if plan.fits:
        # Steps whose first two digits are the same are as good as equal.
        return False, float(f"{plan.step:.2g}"), plan.first_token
    return True, plan.used, plan.step


@dataclasses.dataclass(frozen=True)
class _Case:
    """A request on one mesh, at any context length; `scale` multiplies estimated temporaries."""

    request: PlanRequest
    setup: Setup
    rows: int
    scale: float = 1.0

    def caches(self, context: int) -> capacity.Footprint:
        sizes = {"batch": self.rows, "context": context, "reserve": self.request.reserve}
        return _footprint(self.setup, per_device=True, **sizes)

    def need(self, context: int) -> float:
        """Bytes on a device, with the memory that the engine keeps free beside caches."""
        caches = self.caches(context).peak / capacity.USABLE
        return weight_bytes(self.setup) + self.temporaries(context) + caches

    def fits(self, context: int) -> bool:
        return self.need(context) <= self.request.target.chip.memory

    def temporaries(self, context: int) -> int:
        """Bytes of the activations of one layer and segment that live at once, and the logits."""
        setup, config = self.setup, self.setup.config
        shape, item = setup.mesh.shape, setup.dtype.itemsize
        tensor, shards = shape["tensor"], shape["seq"]
        # A segment that holds the whole text is made for a short text and scaled.
        probe = min(context, PROBE * shards)
        feed = context_feed(setup, probe, self.request.reserve)
        segment = next(iter(setup.method.segments(feed)))
        columns = segment.tokens.shape[1]
        if segment.spread:
            columns = columns // shards * context // probe
        heads = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        mlp_parts = tensor if segment.spread else sum_parts(setup, "mlp")
        inner = 2 * config.mlp_dim // mlp_parts
        if config.experts is not None:
            # Each token's row is copied for each of its experts, and has as many results.
            inner = config.experts.chosen * (inner + 2 * config.model_dim)
        own = inner + heads // tensor
        token = (3 * config.model_dim + own) * item
        if shards > 1 and not segment.spread:
            # Partial results in float32, before and after they are merged.
            token += 2 * config.num_heads // tensor * (config.head_dim + 1) * 4
        estimate = self.rows // shape["data"] * (columns * token + config.vocab_size * 4)
        if segment.spread and shards > 1:
            tokens = self.rows // shape["data"] * columns
            body, table = own_matmuls(setup, gathered=True)
            if gathers_weights(config, setup.mesh, tokens):
                # A layer's weights, or the table of the embedding.
                estimate += max(body // config.num_layers * stored_bytes(setup), table * item)
            else:
                estimate += 2 * shards * tokens * config.model_dim * item
        if setup.weights is not None and self.request.target.topology is None:
            # A layer's matrices as numbers of the model's dtype, which XLA makes before products of
            # many rows, some of them ahead. A TPU's products convert as they read.
            estimate += matrices(setup) * item
        return round(self.scale * estimate)

    def largest(self) -> int | None:
        """The longest context that fits, 0 where none does; None where memory does not bound it."""
        if not self.fits(STEP):
            return 0
        # Far apart, so that the rounding of capacities changes the slope little.
        near, far = 16 * STEP, 256 * STEP
        need = self.need(near)
        slope = (self.need(far) - need) / (far - near)
        if slope < 1:
            return None
        guess = int(near + (self.request.target.chip.memory - need) / slope) // STEP * STEP
        while guess > STEP and not self.fits(guess):
            guess = int(guess * 0.98) // STEP * STEP
        return max(guess, STEP)


def _case(request: PlanRequest, sizes: dict[str, int]) -> _Case:
    """Raises ConfigError where the target has fewer devices than the mesh, or as `setup` does."""
    sizes = {axis: sizes.get(axis, 1) for axis in MESH_AXES}
    used = math.prod(sizes.values())
    if used > request.target.count:
        shown = ",".join(f"{axis}={size}" for axis, size in sizes.items())
        raise ConfigError(
            f"mesh {shown} needs {used} devices, {request.target.name} has "
            f"{request.target.count}; lower a size"
        )
    mesh = AbstractMesh(tuple(sizes.values()), MESH_AXES, axis_types=(AxisType.Auto,) * 3)
    return _Case(request, request.setup(mesh), request.rows(sizes))


_footprint = functools.lru_cache(maxsize=64)(capacity.footprint)


def _seconds(work: Work, flops: float, chip: Chip) -> float:
    """Seconds of products and what they read, and of communication without overlap."""
    compute = flops / (chip.flops * chip.linear_share)
    read = work.read / (chip.bandwidth * chip.bandwidth_share)
    return max(compute, read) + work.received / chip.link + work.collectives * chip.latency


def _host_seconds(setup: Setup, context: int, reserve: int, host: int) -> float:
    """Seconds of transfers between a device and the host's memory during prefill.

    All of it is written once. Full attention at prefill fetches it for each chunk.
    """
    times = 1
    if setup.method.info.phase in ("none", "decode"):
        times += row_work(setup, context, reserve)[1]
    return times * host / HOST_LINK
