"""FLOPs and bytes of prefill and of a decode step on one device, by arithmetic.

Weights: 2 FLOPs a matmul weight and token; the embedding is a look-up, the head is computed for a
row's last token. Attention: 4 N H FLOPs a pair of query and key in each layer. Which pairs:

- a method that says so itself (`contract.work.Planned`), as it says;
- segments that are spread over the shards: every shard's tokens among themselves, causally, as if
  they were one text (more than is attended where a shard reads several blocks);
- a method that leaves prefill alone: all pairs, the keys divided over the shards of the slots;
- any other: as many keys for each token as a decode step reads at that length.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jax_longctx.contract import Prompt, Segment, merging
from jax_longctx.contract.work import Planned, PrefillWork
from jax_longctx.engine import programs
from jax_longctx.engine.capacity import bucket, read_bytes
from jax_longctx.models.llama import param_infos
from jax_longctx.sharding import logical_sharding

__all__ = [
    "Work",
    "abstract_tree",
    "context_segments",
    "decode_work",
    "first_segment",
    "prefill_work",
    "weight_bytes",
]

# Lengths at which the keys that a token attends to are asked for.
SAMPLES = 8
QUESTION = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """Of one device.

    Attributes:
      linear, attention: FLOPs.
      read: bytes of weights and cache that are read.
      received: bytes over the interconnect.
      collectives: how many wait for each other.
    """

    linear: float
    attention: float
    read: float
    received: float
    collectives: int


@functools.lru_cache(maxsize=8)
def _sizes(config: Any) -> tuple[int, int]:
    """Weights that every token is multiplied with, and those of the head."""
    table = config.vocab_size * config.model_dim
    every = sum(
        math.prod(info.shape) for info in param_infos(config).values() if len(info.shape) > 1
    )
    return every - (table if config.tie_embeddings else 2 * table), table


def weight_bytes(setup: programs.Setup) -> int:
    """Bytes of parameters on each device."""
    return sum(
        math.prod(logical_sharding(setup.mesh, info.axes).shard_shape(info.shape))
        * setup.dtype.itemsize
        for info in param_infos(setup.config).values()
    )


def first_segment(setup: programs.Setup, batch: int, context: int, slots: int) -> Segment | None:
    """The first piece of the context as the method feeds it; None of an empty one."""
    return next(context_segments(setup, batch, context, slots), None)


def _prompt(
    setup: programs.Setup, batch: int, context: int, slots: int, question: int = QUESTION
) -> Prompt:
    return Prompt(
        "context",
        setup.chunk,
        context=[range(context)] * batch,
        question=[range(question)] * batch if setup.method.info.needs_question else None,
        slots=slots,
        shards=setup.mesh.shape["seq"],
        vocab_size=context,
    )


def context_segments(
    setup: programs.Setup, batch: int, context: int, slots: int, question: int = QUESTION
) -> Iterator[Segment]:
    """The pieces of the context as the method feeds them, where it is told the question's size."""
    return iter(setup.method.segments(_prompt(setup, batch, context, slots, question)))


def prefill_work(setup: programs.Setup, *, batch: int, context: int, reserve: int) -> Work:
    """Reading `batch` rows of `context` tokens."""
    config, shape = setup.config, setup.mesh.shape
    tensor, shards = shape["tensor"], shape["seq"]
    rows = batch // shape["data"]
    body, head = _sizes(config)
    work, segments, spread = _row_work(setup, context, reserve)
    linear = rows * 2 * (body * work.tokens + head) / tensor
    attention = rows * 4 * config.num_heads * config.head_dim * _layers(setup, work, context)
    item, layers = setup.dtype.itemsize, config.num_layers
    received = 0.0
    collectives = 0
    if tensor > 1:
        # Two all-reduces a layer, of attention's output and the MLP's.
        received += 2 * layers * _all_reduce(rows * work.tokens * config.model_dim * item, tensor)
        collectives += 2 * layers * segments
    if shards > 1 and spread:
        kv = 2 * config.num_kv_heads // tensor * config.head_dim * item
        received += layers * rows * work.received * kv
        collectives += layers * work.collectives
    elif shards > 1:
        # Partial results of every shard's own keys.
        size = int(rows * work.tokens / segments * config.num_heads) // tensor
        sent, times = merging.cost(size, config.head_dim, item, shards)
        received += layers * segments * sent
        collectives += layers * segments * times
    passes = segments * weight_bytes(setup)
    return Work(
        linear=linear,
        attention=attention / tensor,
        read=passes,
        received=received,
        collectives=collectives,
    )


def decode_work(setup: programs.Setup, *, batch: int, context: int, read: int) -> Work:
    """One token of each row; `read` are the bytes of all caches that a step reads."""
    config, shape = setup.config, setup.mesh.shape
    tensor, shards = shape["tensor"], shape["seq"]
    rows, layers = batch // shape["data"], config.num_layers
    body, head = _sizes(config)
    weights = weight_bytes(setup)
    if not config.tie_embeddings:
        # Of the embedding table a step reads a row.
        weights -= head * setup.dtype.itemsize // tensor
    received, collectives = 0.0, 0
    if tensor > 1:
        hidden = rows * config.model_dim * setup.dtype.itemsize
        received += 2 * layers * _all_reduce(hidden, tensor)
        collectives += 2 * layers
    if shards > 1:
        size = rows * config.num_heads // tensor
        sent, times = merging.cost(size, config.head_dim, setup.dtype.itemsize, shards)
        received += layers * sent
        collectives += layers * times
    # Small caches lie whole on every shard of the slots; the larger ones are divided.
    divided = shape["data"] * tensor * (shards if setup.method.info.keeps_all else 1)
    pairs = read / (2 * config.num_kv_heads * config.head_dim * setup.dtype.itemsize)
    return Work(
        linear=rows * 2 * (body + head) / tensor,
        attention=4 * config.num_heads * config.head_dim * pairs / divided,
        read=weights + read / divided,
        received=received,
        collectives=collectives,
    )


def _all_reduce(size: float, parts: int) -> float:
    """Bytes a device receives: a reduce-scatter and an all-gather."""
    return 2 * size * (parts - 1) / parts


def _row_work(setup: programs.Setup, context: int, reserve: int) -> tuple[PrefillWork, int, bool]:
    """One row's work, its number of segments, and whether they are spread over the shards."""
    method, shards = setup.method, setup.mesh.shape["seq"]
    slots = bucket(context + reserve + 1, shards)
    segment = first_segment(setup, 1, context, slots)
    if segment is None:
        return PrefillWork(0, 0), 0, False
    columns = segment.tokens.shape[1] // (shards if segment.spread else 1)
    held = max(1, int(segment.chunk_lengths[0]))
    count = 1 if segment.spread else -(-context // held)
    if isinstance(method, Planned):
        work = method.prefill_work(_prompt(setup, 1, context, slots))
        return work, work.passes, segment.spread
    if segment.spread:
        most = [int(np.max(each.valid)) for each in context_segments(setup, 1, context, slots)]
        tokens = sum(most)
        return PrefillWork(tokens, tokens * (tokens + 1) / 2), len(most), True
    # Columns beside the text's own (an instruction) are computed with every segment.
    tokens = context * columns / held if columns > setup.chunk else float(context)
    if method.info.phase in ("none", "decode"):
        return PrefillWork(tokens, context * (context + 1) / 2 / shards), count, False
    caches = programs.abstract_caches(setup, setup.mesh.shape["data"], slots, reserve)
    key = 2 * setup.config.num_kv_heads * setup.config.head_dim * setup.dtype.itemsize
    per_layer = key * setup.config.num_layers * setup.mesh.shape["data"]
    middles = [(i + 0.5) / SAMPLES for i in range(SAMPLES)]
    keys = [
        min(context * at, read_bytes(setup, caches, max(1, int(context * at))) / per_layer)
        for at in middles
    ]
    divided = shards if method.info.keeps_all else 1
    return PrefillWork(tokens, tokens * float(np.mean(keys)) / divided), count, False


def _layers(setup: programs.Setup, work: PrefillWork, context: int) -> float:
    """Pairs of all layers; a sliding window leaves each token at most that many keys."""
    return sum(
        work.pairs if window is None else min(work.pairs, context * window)
        for window in setup.config.windows
    )


def abstract_tree(setup: programs.Setup) -> Any:
    """The parameters as shapes on the mesh, in a nested dict."""
    tree: dict[str, Any] = {}
    for path, info in param_infos(setup.config).items():
        *parents, name = path.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        sharding = logical_sharding(setup.mesh, info.axes)
        node[name] = jax.ShapeDtypeStruct(info.shape, setup.dtype, sharding=sharding)
    return tree
