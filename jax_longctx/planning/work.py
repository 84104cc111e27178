"""Work of a run on each device of a mesh: FLOPs, bytes read and received, from shapes alone.

Weights take 2 FLOPs a matmul weight and token, of experts those that a token goes through; the
embedding is a look-up, the head is computed for a row's last token. A device multiplies with its
own part of the weights. Where a segment's tokens are spread over `seq`, it gathers the parts of all
shards of `seq` first, or the tokens: what is fewer bytes (`products.gathers_weights`).

Attention takes 4 N H FLOPs a pair of query and key in each layer. The pairs are

- those that a method states itself (`contract.Method.prefill_work`);
- for segments that are spread over the shards: the causal pairs of each shard's tokens as if they
  were one text (too many where a shard has several blocks);
- for a method that does not change prefill: all causal pairs, the keys divided over the shards, or
  the share of them that `--reading` names;
- for any other: for each token as many keys as a decode step reads at that length.

What a decode step's attention exchanges, the choice of what it reads included, is counted in its
trace.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxprs_in_params
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from jax_longctx.contract import Feed, PrefillWork, decode_segment
from jax_longctx.contract.merging import merge_cost
from jax_longctx.engine import capacity
from jax_longctx.engine.allocate import abstract_caches
from jax_longctx.engine.layers import LayerPass
from jax_longctx.engine.products import gathers_weights
from jax_longctx.engine.setup import Setup
from jax_longctx.models.config import ModelConfig
from jax_longctx.models.params import param_infos
from jax_longctx.sharding import (
    MESH_AXES,
    ParamInfo,
    Stacked,
    layers_in,
    leaf_axes,
    logical_sharding,
    tree_specs,
    undivided,
)

# Lengths at which the keys that a token attends to are counted.
SAMPLES = 8

QUESTION = 32

# Weights of a layer that are gathered for tokens that are spread over `seq`: those of q, k and v,
# of the output projection, of gate and up, and of down.
GATHERS = 4
# Primitives of JAX that exchange numbers.
EXCHANGES = ("all_gather", "psum", "pmax", "pmin", "ppermute", "all_to_all")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """Work of one device.

    Attributes:
      linear, attention: FLOPs.
      read: bytes read of weights and cache.
      received: bytes received over the interconnect.
      collectives: number of collectives that run one after the other.
      layers: how many begin and end one after the other, of a decode step.
      choices: how many of them choose first which keys they read.
    """

    linear: float
    attention: float
    read: float
    received: float
    collectives: int
    layers: int = 0
    choices: int = 0


@functools.lru_cache(maxsize=256)
def weight_bytes(setup: Setup) -> int:
    """Bytes of parameters on each device."""
    infos = param_infos(setup.config).values()
    shapes = [info.abstract(setup.mesh, setup.dtype, setup.weights) for info in infos]
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(shapes)
    )


def stored_bytes(setup: Setup) -> int:
    """Bytes of a number of the layers' matrices."""
    return setup.dtype.itemsize if setup.weights is None else 1


@functools.lru_cache(maxsize=256)
def matrices(setup: Setup) -> int:
    """Numbers of a device's parts of the matrices of a layer."""
    infos = param_infos(setup.config).items()
    layer = [info for path, info in infos if path.startswith("layers.0.")]
    return sum(_part(setup, info) for info in layer if info.in_8_bits)


def step_weight_bytes(setup: Setup, rows: int = 1) -> int:
    """Bytes of parameters that a decode step of so many rows reads on each device.

    A step reads one row of the embedding table, unless the table is the head too. Of experts it
    reads those that a row chose; rows choose independently here, and all experts alike.
    """
    _, head = own_matmuls(setup)
    tables = 0 if setup.config.tie_embeddings else head
    read = weight_bytes(setup) - tables * setup.dtype.itemsize
    if (experts := setup.config.experts) is not None:
        left = (1 - experts.chosen / experts.count) ** rows
        infos = [info for info in param_infos(setup.config).values() if info.inputs]
        numbers = sum(_part(setup, info) for info in infos if info.axes[0] == "experts")
        read -= round(left * numbers * stored_bytes(setup))
    return read


def weight_axes(config: ModelConfig) -> dict[str, int]:
    """Sizes of the axes of `sharding.OVER_SEQ`."""
    return {"head_dim": config.head_dim, "mlp": config.mlp_dim, "vocab": config.vocab_size}


@functools.lru_cache(maxsize=8)
def matmul_weights(config: ModelConfig) -> tuple[int, int]:
    """Numbers of matmul weights that a token meets: of all layers, and of the head."""
    return _matmuls(config, lambda info: math.prod(info.shape) * _share(config, info))


@functools.lru_cache(maxsize=256)
def own_matmuls(setup: Setup, gathered: bool = False, a_token: bool = False) -> tuple[int, int]:
    """Numbers of matmul weights on a device: of all layers, and of the head.

    Args:
      gathered: over `seq`, as tokens that are spread over it need them.
      a_token: only those that a token meets.
    """

    def numbers(info: ParamInfo) -> float:
        return _part(setup, info, gathered) * (_share(setup.config, info) if a_token else 1)

    return _matmuls(setup.config, numbers)


def _part(setup: Setup, info: ParamInfo, gathered: bool = False) -> int:
    """Numbers of a device's part of a parameter."""
    mesh = setup.mesh
    sharding = logical_sharding(mesh, info.axes) if gathered else info.sharding(mesh)
    return math.prod(sharding.shard_shape(info.shape))


def _share(config: ModelConfig, info: ParamInfo) -> float:
    """The share of a parameter that a token meets."""
    experts = config.experts if info.axes[0] == "experts" else None
    return 1 if experts is None else experts.chosen / experts.count


def _matmuls(config: ModelConfig, numbers: Callable[[ParamInfo], float]) -> tuple[int, int]:
    sizes = {
        path: round(numbers(info)) for path, info in param_infos(config).items() if info.inputs
    }
    tables = [sizes.pop("embed.table"), sizes.pop("head.table", None)]
    return sum(sizes.values()), tables[0]


def context_feed(setup: Setup, context: int, reserve: int, question: int = QUESTION) -> Feed:
    """One row of `context` tokens, as the engine passes it to the method."""
    slots = capacity.slots_for(context, reserve, setup.mesh.shape["seq"])
    asked = [range(question)] if setup.method.info.needs_question else None
    return setup.feed("context", slots, context=[range(context)], question=asked)


def prefill_work(
    setup: Setup, *, batch: int, context: int, reserve: int, question: int = QUESTION
) -> Work:
    """The work of prefilling `batch` rows of `context` tokens.

    Args:
      question: tokens of each row's question, for methods that read it beside each chunk.
    """
    config, tensor, item = setup.config, setup.mesh.shape["tensor"], setup.dtype.itemsize
    rows, layers = batch // setup.mesh.shape["data"], config.num_layers
    work, segments, spread = row_work(setup, context, reserve, question)
    shards = setup.mesh.shape["seq"]
    spreads = spread and shards > 1
    # Of spread tokens a shard multiplies its own with all weights, or all with its own weights.
    body, _ = own_matmuls(setup, gathered=spreads)
    met, _ = own_matmuls(setup, gathered=spreads, a_token=True)
    _, head = own_matmuls(setup)
    received, collectives = _traffic(setup, rows * work.tokens, segments, spread)
    read = segments * weight_bytes(setup)
    if spreads:
        kv = 2 * config.num_kv_heads // tensor * config.head_dim * item
        received += layers * rows * work.received * kv
        collectives += layers * work.collectives
        if _gathers_weights(setup, rows * work.tokens, segments):
            # They are read where they lie, and again as they are used.
            read += segments * body * stored_bytes(setup)
    elif shards > 1 and segments:
        # Partial results over each shard's own keys.
        size = int(rows * work.tokens / segments * config.num_heads) // tensor
        sent, times = merge_cost(size, config.head_dim, item, shards)
        received += layers * segments * sent
        collectives += layers * segments * times
    # A sliding window bounds the keys of each token.
    bounds = (math.inf if window is None else context * window for window in config.windows)
    pairs = rows * sum(min(work.pairs, bound) for bound in bounds)
    return Work(
        linear=rows * 2 * (met * work.tokens + head),
        attention=4 * config.num_heads * config.head_dim * pairs / tensor,
        read=read,
        received=received,
        collectives=collectives,
    )


def decode_work(setup: Setup, *, batch: int, context: int, read: int) -> Work:
    """The work of one decode step; `read` is the bytes that it reads of all caches."""
    config, shape = setup.config, setup.mesh.shape
    tensor, rows = shape["tensor"], batch // shape["data"]
    body, head = own_matmuls(setup, a_token=True)
    received, collectives = _traffic(setup, rows, 1, spread=False)
    divides, attended, exchanges = _answering(setup, rows, context)
    chooses = setup.method.info.keeps_all and setup.method.info.phase in ("decode", "both")
    divided = shape["data"] * tensor * (shape["seq"] if divides else 1)
    pairs = read / setup.token_bytes
    return Work(
        linear=rows * 2 * (body + head),
        attention=4 * config.num_heads * config.head_dim * pairs / divided,
        read=step_weight_bytes(setup, rows) + read / divided,
        received=received + attended,
        collectives=collectives + exchanges,
        layers=config.num_layers,
        choices=chooses * sum(window is None for window in config.windows),
    )


def _answering(setup: Setup, rows: int, context: int) -> tuple[bool, float, int]:
    """Whether `seq` divides the caches of an answer; small ones are whole on every shard.

    And bytes that a device receives in the attention of a decode step, and its collectives.
    """
    sizes, received, count = setup.mesh.shape, 0.0, 0
    # More shards of an axis exchange alike: the smallest number is traced. Every platform exchanges
    # the same.
    traced = {
        axis: next((n for n in range(2, size + 1) if axis != "data" and size % n == 0), 1)
        for axis, size in sizes.items()
    }
    if math.prod(traced.values()) == 1:
        return False, 0.0, 0
    on: dict[str, Any] = {"abstract_device": AbstractDevice("cpu", None, "cpu")}
    mesh = AbstractMesh(tuple(traced.values()), MESH_AXES, axis_types=(AxisType.Auto,) * 3, **on)
    axes_of, exchanges = _traced(dataclasses.replace(setup, mesh=mesh), rows, context)
    for axes, gathers, size in exchanges:
        shards = math.prod(sizes[axis] for axis in axes)
        size *= traced["tensor"] / sizes["tensor"]
        received += size * ((shards - 1) if gathers else 2 * (shards - 1) / shards)
        count += shards > 1
    divides = any(not {"slots", "pages"}.isdisjoint(axes) for axes in axes_of)
    return sizes["seq"] > 1 and divides, received, count


@functools.lru_cache(maxsize=256)
def _traced(
    setup: Setup, rows: int, context: int
) -> tuple[list[tuple[str | None, ...]], list[tuple[tuple[str, ...], bool, int]]]:
    """The logical axes of an answer's caches, and of each collective in its steps' attention.

    Of a collective these are its axes, whether it gathers, and its bytes.
    """
    found, answering = [], capacity.staged_caches(setup, rows, context, 1)[-1]
    config, one = setup.config, jax.ShapeDtypeStruct((rows, 1), jnp.int32)
    done = jax.ShapeDtypeStruct((rows,), jnp.bool)
    segment = decode_segment(one, one, done, setup.method.step_variant(1))
    heads = config.num_heads, config.num_kv_heads, config.num_kv_heads
    new = [jax.ShapeDtypeStruct((rows, 1, n, config.head_dim), setup.dtype) for n in heads]
    for _, layer, cache in setup.with_layers(answering):
        own = cache
        if isinstance(cache, Stacked):
            own = jax.eval_shape(lambda run: jax.tree.map(lambda x: x[0], run), cache.cache)

        def attend(segment: Any, total: Any, own: Any, new: Any, layer: Any = layer) -> Any:
            (q, k, v), given = new, (tree_specs(own), None)
            return LayerPass(setup, layer, segment, total).attend(given, q, k, v, own)

        traced = jax.make_jaxpr(attend)(segment, done.update(dtype=jnp.int32), own, new)
        found += layers_in(cache) * [*_collectives(traced.jaxpr)]
    return leaf_axes(answering), found


def _collectives(jaxpr: Any) -> Iterator[tuple[tuple[str, ...], bool, int]]:
    """The collectives of a program, as of `_traced`; of branches those of the one with the most."""
    for each in jaxpr.eqns:
        inner = [[*_collectives(one)] for one in jaxprs_in_params(each.params)]
        if each.primitive.name == "cond":
            inner = [max(inner, key=len)]
        for found in inner:
            yield from found
        if each.primitive.name in EXCHANGES:
            axes = each.params.get("axes", each.params.get("axis_name"))
            axes = (axes,) if isinstance(axes, str) else axes
            size = sum(x.aval.size * x.aval.dtype.itemsize for x in each.invars)
            yield axes, each.primitive.name == "all_gather", size


def sum_parts(setup: Setup, axis: str) -> int:
    """The number of devices that a product with weights along that axis is summed over."""
    whole = undivided(setup.mesh, **{axis: weight_axes(setup.config)[axis]})
    return setup.mesh.shape["tensor"] * (1 if whole else setup.mesh.shape["seq"])


def _traffic(setup: Setup, tokens: float, segments: int, spread: bool) -> tuple[float, int]:
    """Bytes that a device receives for `tokens` in all `segments`, and number of collectives.

    Those of attention over caches that `seq` divides are left out.
    """
    config, item = setup.config, setup.dtype.itemsize
    tensor, shards = setup.mesh.shape["tensor"], setup.mesh.shape["seq"]
    received, collectives = 0.0, 0
    for axis in ("head_dim", "mlp"):
        parts = tensor if spread else sum_parts(setup, axis)
        if parts > 1:
            # An all-reduce a layer of attention's output, and one of the MLP's: each is a
            # reduce-scatter and an all-gather.
            received += 2 * tokens * config.model_dim * item * (parts - 1) / parts
            collectives += segments
    if not spread and sum_parts(setup, "head_dim") > tensor:
        # Queries, keys and values, of whose width each shard computes a part.
        heads = (config.num_heads + 2 * config.num_kv_heads) // tensor
        received += tokens * heads * config.head_dim * item * (shards - 1) / shards
        collectives += segments
    received, collectives = config.num_layers * received, config.num_layers * collectives
    if shards > 1 and spread and _gathers_weights(setup, tokens, segments):
        own, whole = own_matmuls(setup), own_matmuls(setup, gathered=True)
        each = stored_bytes(setup), item
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
    """Whether passes over `tokens` spread tokens on a shard gather weights, not tokens."""
    return gathers_weights(setup.config, setup.mesh, int(tokens / max(segments, 1)))


def row_work(
    setup: Setup, context: int, reserve: int, question: int = QUESTION
) -> tuple[PrefillWork, int, bool]:
    """One row's work, its number of segments, and whether they are spread over the shards."""
    method, shards = setup.method, setup.mesh.shape["seq"]
    feed = context_feed(setup, context, reserve, question)
    segment = next(iter(method.segments(feed)), None)
    if segment is None:
        return PrefillWork(0, 0), 0, False
    columns = segment.tokens.shape[1] // (shards if segment.spread else 1)
    held = max(1, int(segment.chunk_lengths[0]))
    count = 1 if segment.spread else -(-context // held)
    work = method.prefill_work(feed)
    if work is not None:
        return work, work.passes, segment.spread
    if segment.spread:
        most = [int(np.max(each.valid)) for each in method.segments(feed)]
        tokens = sum(most)
        return PrefillWork(tokens, tokens * (tokens + 1) / 2), len(most), True
    # Columns beside the text's own (an instruction) are computed in every segment.
    tokens = context * columns / held if columns > setup.chunk else float(context)
    if method.info.phase in ("none", "decode"):
        return PrefillWork(tokens, _pairs(setup, context, held) / shards), count, False
    caches = abstract_caches(
        setup, setup.mesh.shape["data"], feed.slots, capacity.reserved(reserve)
    )
    per_layer = setup.token_bytes * setup.config.num_layers * setup.mesh.shape["data"]
    middles = [(i + 0.5) / SAMPLES for i in range(SAMPLES)]
    keys = [
        min(context * at, capacity.read_bytes(setup, caches, max(1, int(context * at))) / per_layer)
        for at in middles
    ]
    divided = shards if method.info.keeps_all else 1
    return PrefillWork(tokens, tokens * float(np.mean(keys)) / divided), count, False


def _pairs(setup: Setup, context: int, chunk: int) -> float:
    """Pairs of a text that is read exactly, or by a given share of its earlier blocks.

    Where a share follows from the text's attention all pairs are counted.
    """
    every, how = context * (context + 1) / 2, setup.reading
    if how is None or how.density is None:
        return every
    own = context * (min(chunk, context) + 1) / 2
    return own + (every - own) * min(how.density + 0.5 / how.stride, 1)
