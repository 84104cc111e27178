"""A plan: bytes on each device against its memory, and the times that a roofline predicts.

All of it is arithmetic over shapes, on a mesh of devices that need not exist. `planning.compiled`
compiles the programs instead.

Weights take 2 FLOPs a matmul weight and token; the embedding is a look-up, the head is computed for
a row's last token. A device multiplies with its own part of the weights. Where a segment's tokens
are spread over `seq`, it gathers the parts of all shards of `seq` first, or the tokens: what is
fewer bytes (`products.gathers_weights`).

Attention takes 4 N H FLOPs a pair of query and key in each layer. The pairs are

- those that a method states itself (`contract.Planned`);
- for segments that are spread over the shards: the causal pairs of each shard's tokens as if they
  were one text (too many where a shard has several blocks);
- for a method that does not change prefill: all causal pairs, the keys divided over the shards;
- for any other: for each token as many keys as a decode step reads at that length.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType

from jax_longctx.contract import Method, Planned, PrefillWork, Prompt, Segment
from jax_longctx.contract.merging import merge_cost
from jax_longctx.engine import capacity
from jax_longctx.engine.allocate import abstract_caches
from jax_longctx.engine.products import gathers_weights
from jax_longctx.engine.setup import Setup
from jax_longctx.errors import ConfigError, InputError, LongctxError
from jax_longctx.methods import make_method
from jax_longctx.models.config import ModelConfig
from jax_longctx.models.llama import ParamInfo, check_mesh, param_infos
from jax_longctx.planning.targets import Chip, Target
from jax_longctx.settings import at_least, kv_form, offload_of, weights_form
from jax_longctx.sharding import MESH_AXES, logical_sharding, undivided

# Tokens of the answer, after the first, for which a mesh is proposed.
ANSWER = 256
# The largest context that fits is a multiple of this.
STEP = 1024
PROBE = 4096
# Number of lengths at which the keys that a token attends to are computed.
SAMPLES = 8
QUESTION = 32
# Bytes a second between a device and its host's memory, measured on an H200.
HOST_LINK = 48e9
# Weights of a layer that are gathered for tokens that are spread over `seq`: those of q, k and v,
# of the output projection, of gate and up, and of down.
GATHERS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What is planned.

    Attributes:
      context: tokens of each of `batch` rows.
      reserve: tokens of question and answer.
      chunk: tokens that a prefill pass takes.
      kv: the form of keys and values in caches, as for `Engine`.
      weights: the form of the layers' matrices, as for `api.load`.
      offload, working_set: where contexts lie, as for `Engine`.
    """

    config: ModelConfig
    method: Method
    target: Target
    context: int
    batch: int = 1
    reserve: int = 256
    chunk: int = 512
    dtype: str = "bfloat16"
    kv: str | None = None
    weights: str | None = None
    offload: str | None = None
    working_set: int | None = None

    def __post_init__(self) -> None:
        at_least(1, self, "context", "batch", "reserve", "chunk", error=InputError)

    def rows(self, sizes: dict[str, int]) -> int:
        """Rows, padded to the mesh's data axis."""
        return -(-self.batch // sizes["data"]) * sizes["data"]

    def setup(self, mesh: Any) -> Setup:
        """The programs' setup. ConfigError where method, model and mesh do not fit together."""
        self.method.validate(self.config)
        check_mesh(self.config, mesh)
        kv, weights = kv_form(self.kv, self.dtype), weights_form(self.weights, self.dtype)
        setup = Setup(
            self.config,
            self.method,
            mesh,
            jnp.dtype(self.dtype),
            self.chunk,
            kv=kv,
            weights=weights,
            offload=offload_of(self.offload, self.working_set),
        )
        capacity.check_offload(setup)
        return setup


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """Work of one device.

    Attributes:
      linear, attention: FLOPs.
      read: bytes read of weights and cache.
      received: bytes received over the interconnect.
      collectives: number of collectives that run one after the other.
    """

    linear: float
    attention: float
    read: float
    received: float
    collectives: int


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
    sizes = {axis: sizes.get(axis, 1) for axis in MESH_AXES}
    used = math.prod(sizes.values())
    if used > request.target.count:
        shown = ",".join(f"{axis}={size}" for axis, size in sizes.items())
        raise ConfigError(
            f"mesh {shown} needs {used} devices, {request.target.name} has "
            f"{request.target.count}; lower a size"
        )
    mesh = AbstractMesh(tuple(sizes.values()), MESH_AXES, axis_types=(AxisType.Auto,) * 3)
    case = _Case(request, request.setup(mesh), request.rows(sizes))
    if temporaries is not None:
        case = dataclasses.replace(case, scale=temporaries / case.temporaries(request.context))
    chip, context, rows = request.target.chip, request.context, case.rows
    prefill = prefill_work(case.setup, batch=rows, context=context, reserve=request.reserve)
    decode = decode_work(case.setup, batch=rows, read=case.caches(context).read)
    step, caches = _decode_seconds(decode, chip), case.caches(context)
    moved = _host_seconds(case.setup, context, request.reserve, caches.host)
    return Plan(
        mesh=sizes,
        weights=weight_bytes(case.setup),
        cache=caches.peak,
        host=caches.host,
        temporaries=case.temporaries(context),
        memory=chip.memory,
        fits=case.fits(context),
        largest=case.largest() if largest else None,
        undivided=tuple(undivided(mesh, **weight_axes(request.config))),
        prefill=prefill,
        decode=decode,
        first_token=_prefill_seconds(prefill, chip) + step + moved,
        step=step,
        moved=moved,
    )


def propose_mesh(request: PlanRequest) -> dict[str, int]:
    """The mesh over the target's devices with the shortest time to an answer, of those that fit.

    Where none fits, the mesh that needs the least memory. It has all devices, where the model
    divides over any mesh of all.

    Raises:
      ConfigError: the model divides over no mesh, or the method refuses it.
    """
    request.method.validate(request.config)
    for count in range(request.target.count, 0, -1):
        plans = list(filter(None, (_tried(request, sizes) for sizes in _meshes(count))))
        if plans:
            return min(plans, key=_rank).mesh
    raise ConfigError(f"the model divides over no mesh of {request.target.name}")


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
                other = dataclasses.replace(request, **changed)
                made = make_plan(other, mesh, largest=False)
                if made.fits and other != request:
                    found[" ".join(names)] = made
        if found:
            return found
    return {}


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
    if request.offload is not None and sizes["seq"] > 1:
        return None
    return make_plan(request, sizes, largest=False)


def _rank(plan: Plan) -> tuple[Any, ...]:
    if plan.fits:
        return False, plan.first_token + ANSWER * plan.step
    return True, plan.weights + plan.cache + plan.temporaries


@dataclasses.dataclass(frozen=True)
class _Case:
    """A request on one mesh, at any context length; `scale` multiplies estimated temporaries."""

    request: PlanRequest
    setup: Setup
    rows: int
    scale: float = 1.0

    def caches(self, context: int) -> capacity.Footprint:
        return _footprint(self.setup, self.rows, context, self.request.reserve)

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
        segment = next(context_segments(setup, probe, self.request.reserve))
        columns = segment.tokens.shape[1]
        if segment.spread:
            columns = columns // shards * context // probe
        heads = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        mlp_parts = tensor if segment.spread else _sum_parts(setup, "mlp")
        own = 2 * config.mlp_dim // mlp_parts + heads // tensor
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
                estimate += max(body // config.num_layers * _stored_bytes(setup), table * item)
            else:
                estimate += 2 * shards * tokens * config.model_dim * item
        if setup.weights is not None and self.request.target.topology is None:
            # A layer's matrices as numbers of the model's dtype, which XLA makes before products of
            # many rows, some of them ahead. A TPU's products convert as they read.
            estimate += _matrices(setup) * item
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


@functools.lru_cache(maxsize=64)
def _footprint(setup: Setup, rows: int, context: int, reserve: int) -> capacity.Footprint:
    return capacity.footprint(setup, batch=rows, context=context, reserve=reserve, per_device=True)


def _prefill_seconds(work: Work, chip: Chip) -> float:
    compute = work.linear / (chip.flops * chip.linear_share)
    read = work.read / (chip.bandwidth * chip.bandwidth_share)
    attention = work.attention / (chip.flops * chip.attention_share)
    return max(compute, read) + attention + _waiting(work, chip)


def _decode_seconds(work: Work, chip: Chip) -> float:
    compute = (work.linear + work.attention) / (chip.flops * chip.linear_share)
    read = work.read / (chip.bandwidth * chip.bandwidth_share)
    return max(compute, read) + _waiting(work, chip)


def _host_seconds(setup: Setup, context: int, reserve: int, host: int) -> float:
    """Seconds of transfers between a device and the host's memory while a context is read.

    All of it is written once. A method that reads by full attention has it brought for each chunk.
    """
    times = 1
    if setup.method.info.phase in ("none", "decode"):
        times += _row_work(setup, context, reserve)[1]
    return times * host / HOST_LINK


def _waiting(work: Work, chip: Chip) -> float:
    """Seconds of communication, as if none of it overlapped with computation."""
    return work.received / chip.link + work.collectives * chip.latency


def weight_bytes(setup: Setup) -> int:
    """Bytes of parameters on each device."""
    infos = param_infos(setup.config).values()
    shapes = [info.abstract(setup.mesh, setup.dtype, setup.weights) for info in infos]
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(shapes)
    )


def _stored_bytes(setup: Setup) -> int:
    """Bytes of a number of the layers' matrices."""
    return setup.dtype.itemsize if setup.weights is None else 1


def _matrices(setup: Setup) -> int:
    """Numbers of a device's parts of the matrices of a layer."""
    return sum(
        math.prod(info.sharding(setup.mesh).shard_shape(info.shape))
        for path, info in param_infos(setup.config).items()
        if path.startswith("layers.0.") and info.in_8_bits
    )


def step_weight_bytes(setup: Setup) -> int:
    """Bytes of parameters that a decode step reads on each device.

    A step reads one row of the embedding table, unless the table is the head too.
    """
    _, head = own_matmuls(setup)
    tables = 0 if setup.config.tie_embeddings else head
    return weight_bytes(setup) - tables * setup.dtype.itemsize


def weight_axes(config: ModelConfig) -> dict[str, int]:
    """Sizes of the axes of `sharding.OVER_SEQ`."""
    return {"head_dim": config.head_dim, "mlp": config.mlp_dim, "vocab": config.vocab_size}


@functools.lru_cache(maxsize=8)
def matmul_weights(config: ModelConfig) -> tuple[int, int]:
    """Numbers of matmul weights: those of all layers, and those of the head."""
    return _matmuls(config, lambda info: info.shape)


@functools.lru_cache(maxsize=256)
def own_matmuls(setup: Setup, gathered: bool = False) -> tuple[int, int]:
    """Numbers of matmul weights on a device: those of all layers, and those of the head.

    Args:
      gathered: over `seq`, as tokens that are spread over it need them.
    """
    mesh = setup.mesh

    def part(info: ParamInfo) -> tuple[int, ...]:
        sharding = logical_sharding(mesh, info.axes) if gathered else info.sharding(mesh)
        return sharding.shard_shape(info.shape)

    return _matmuls(setup.config, part)


def _matmuls(config: ModelConfig, part: Callable[[ParamInfo], tuple[int, ...]]) -> tuple[int, int]:
    sizes = {
        path: math.prod(part(info))
        for path, info in param_infos(config).items()
        if len(info.shape) > 1 and not path.endswith("bias")
    }
    tables = [sizes.pop("embed.table"), sizes.pop("head.table", None)]
    return sum(sizes.values()), tables[0]


def _context_prompt(setup: Setup, context: int, reserve: int, question: int = QUESTION) -> Prompt:
    """One row of `context` tokens, as the engine passes it to the method."""
    shards = setup.mesh.shape["seq"]
    return Prompt(
        "context",
        setup.chunk,
        context=[range(context)],
        question=[range(question)] if setup.method.info.needs_question else None,
        slots=capacity.slots_for(context, reserve, shards),
        shards=shards,
        vocab_size=context,
    )


def context_segments(
    setup: Setup, context: int, reserve: int, question: int = QUESTION
) -> Iterator[Segment]:
    """The segments of one row, for a question of that many tokens."""
    return iter(setup.method.segments(_context_prompt(setup, context, reserve, question)))


def prefill_work(
    setup: Setup, *, batch: int, context: int, reserve: int, question: int = QUESTION
) -> Work:
    """The work of prefilling `batch` rows of `context` tokens.

    Args:
      question: tokens of each row's question, for methods that read it beside each chunk.
    """
    config, tensor, item = setup.config, setup.mesh.shape["tensor"], setup.dtype.itemsize
    rows, layers = batch // setup.mesh.shape["data"], config.num_layers
    work, segments, spread = _row_work(setup, context, reserve, question)
    spreads = spread and setup.mesh.shape["seq"] > 1
    # Of spread tokens a shard multiplies its own with all weights, or all with its own weights.
    body, _ = own_matmuls(setup, gathered=spreads)
    _, head = own_matmuls(setup)
    received, collectives = _traffic(setup, rows * work.tokens, segments, spread)
    read = segments * weight_bytes(setup)
    if spreads:
        kv = 2 * config.num_kv_heads // tensor * config.head_dim * item
        received += layers * rows * work.received * kv
        collectives += layers * work.collectives
        if _gathers_weights(setup, rows * work.tokens, segments):
            # They are read where they lie, and again as they are used.
            read += segments * body * _stored_bytes(setup)
    pairs = rows * _layers(setup, work, context)
    return Work(
        linear=rows * 2 * (body * work.tokens + head),
        attention=4 * config.num_heads * config.head_dim * pairs / tensor,
        read=read,
        received=received,
        collectives=collectives,
    )


def decode_work(setup: Setup, *, batch: int, read: int) -> Work:
    """The work of one decode step; `read` is the bytes that it reads of all caches."""
    config, shape = setup.config, setup.mesh.shape
    tensor, rows = shape["tensor"], batch // shape["data"]
    body, head = own_matmuls(setup)
    received, collectives = _traffic(setup, rows, 1, spread=False)
    # Small caches are replicated over the axis `seq`; the larger ones are divided.
    divided = shape["data"] * tensor * (shape["seq"] if setup.method.info.keeps_all else 1)
    pairs = read / setup.token_bytes
    return Work(
        linear=rows * 2 * (body + head),
        attention=4 * config.num_heads * config.head_dim * pairs / divided,
        read=step_weight_bytes(setup) + read / divided,
        received=received,
        collectives=collectives,
    )


def _sum_parts(setup: Setup, axis: str) -> int:
    """The number of devices that a product with weights along that axis is summed over."""
    whole = undivided(setup.mesh, **{axis: weight_axes(setup.config)[axis]})
    return setup.mesh.shape["tensor"] * (1 if whole else setup.mesh.shape["seq"])


def _traffic(setup: Setup, tokens: float, segments: int, spread: bool) -> tuple[float, int]:
    """Bytes that a device receives for `tokens` in all `segments`, and number of collectives."""
    config, item = setup.config, setup.dtype.itemsize
    tensor, shards = setup.mesh.shape["tensor"], setup.mesh.shape["seq"]
    received, collectives = 0.0, 0
    for axis in ("head_dim", "mlp"):
        parts = tensor if spread else _sum_parts(setup, axis)
        if parts > 1:
            # An all-reduce a layer of attention's output, and one of the MLP's: each is a
            # reduce-scatter and an all-gather.
            received += 2 * tokens * config.model_dim * item * (parts - 1) / parts
            collectives += segments
    if shards > 1 and not spread:
        # Partial results over each shard's own keys.
        size = int(tokens / segments * config.num_heads) // tensor
        sent, times = merge_cost(size, config.head_dim, item, shards)
        received += segments * sent
        collectives += segments * times
        if _sum_parts(setup, "head_dim") > tensor:
            # Queries, keys and values, of whose width each shard computes a part.
            heads = (config.num_heads + 2 * config.num_kv_heads) // tensor
            received += tokens * heads * config.head_dim * item * (shards - 1) / shards
            collectives += segments
    received, collectives = config.num_layers * received, config.num_layers * collectives
    if shards > 1 and spread and _gathers_weights(setup, tokens, segments):
        own, whole = own_matmuls(setup), own_matmuls(setup, gathered=True)
        each = _stored_bytes(setup), item
        more = (size * (b - a) for size, a, b in zip(each, own, whole, strict=True))
        received += segments * sum(more)
        gathers = [whole[0] > own[0], whole[1] > own[1]]
        collectives += segments * (gathers[0] * GATHERS * config.num_layers + gathers[1])
    elif shards > 1 and spread:
        # The tokens are gathered twice, and their results added up twice; heads change places
        # before attention and after it.
        heads = 2 * (config.num_heads + config.num_kv_heads) // tensor * config.head_dim
        moved = 4 * (shards - 1) * config.model_dim + heads * (shards - 1) / shards
        received += config.num_layers * tokens * moved * item
        # The embedding: all tokens' hidden states, added up over the vocabulary's shards.
        received += 2 * tokens * (shards - 1) * config.model_dim * item
        collectives += segments * (6 * config.num_layers + 1)
    return received, collectives


def _gathers_weights(setup: Setup, tokens: float, segments: int) -> bool:
    """Whether passes over so many spread tokens on a shard gather weights, not the tokens."""
    return gathers_weights(setup.config, setup.mesh, int(tokens / max(segments, 1)))


def _row_work(
    setup: Setup, context: int, reserve: int, question: int = QUESTION
) -> tuple[PrefillWork, int, bool]:
    """One row's work, its number of segments, and whether they are spread over the shards."""
    method, shards = setup.method, setup.mesh.shape["seq"]
    prompt = _context_prompt(setup, context, reserve, question)
    segment = next(iter(method.segments(prompt)), None)
    if segment is None:
        return PrefillWork(0, 0), 0, False
    columns = segment.tokens.shape[1] // (shards if segment.spread else 1)
    held = max(1, int(segment.chunk_lengths[0]))
    count = 1 if segment.spread else -(-context // held)
    if isinstance(method, Planned):
        work = method.prefill_work(prompt)
        return work, work.passes, segment.spread
    if segment.spread:
        most = [int(np.max(each.valid)) for each in method.segments(prompt)]
        tokens = sum(most)
        return PrefillWork(tokens, tokens * (tokens + 1) / 2), len(most), True
    # Columns beside the text's own (an instruction) are computed in every segment.
    tokens = context * columns / held if columns > setup.chunk else float(context)
    if method.info.phase in ("none", "decode"):
        return PrefillWork(tokens, context * (context + 1) / 2 / shards), count, False
    caches = abstract_caches(
        setup, setup.mesh.shape["data"], prompt.slots, capacity.reserved(reserve)
    )
    per_layer = setup.token_bytes * setup.config.num_layers * setup.mesh.shape["data"]
    middles = [(i + 0.5) / SAMPLES for i in range(SAMPLES)]
    keys = [
        min(context * at, capacity.read_bytes(setup, caches, max(1, int(context * at))) / per_layer)
        for at in middles
    ]
    divided = shards if method.info.keeps_all else 1
    return PrefillWork(tokens, tokens * float(np.mean(keys)) / divided), count, False


def _layers(setup: Setup, work: PrefillWork, context: int) -> float:
    """Pairs of all layers; a sliding window bounds the keys of each token."""
    return sum(
        work.pairs if window is None else min(work.pairs, context * window)
        for window in setup.config.windows
    )
