"""The engine's programs compiled from shapes alone: what they hold in memory, on any mesh."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np

from jax_longctx.contract import CHUNK_ROWS, Feed, RowGroup, Segment
from jax_longctx.engine import Sampling
from jax_longctx.engine.allocate import abstract_caches
from jax_longctx.engine.capacity import bytes_per_device
from jax_longctx.engine.decode import Steps, decode_block, first_state
from jax_longctx.engine.layers import _through_layer
from jax_longctx.engine.prefill import whole_segment
from jax_longctx.engine.sampling import sampling_static, sampling_values
from jax_longctx.models.params import layer_params
from jax_longctx.planning.compiled import abstract_params as abstract_params
from jax_longctx.planning.compiled import no_persistent_cache as no_persistent_cache
from jax_longctx.sharding import tree_shardings

COLUMNS = 32


def placed(mesh, caches):
    """Shapes with their shardings."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        caches,
        tree_shardings(mesh, caches),
    )


def abstract_state(rows):
    return jax.eval_shape(lambda: first_state(np.ones(rows, bool), None))


def abstract_values(rows):
    return jax.eval_shape(lambda: sampling_values(Sampling(seed=(0,)), rows))


def sharded_caches(setup, batch, slots):
    return placed(setup.mesh, abstract_caches(setup, batch, slots, 0))


def cache_bytes(setup, batch, slots):
    """Bytes of all layers' caches on each device."""
    return bytes_per_device(setup.mesh, abstract_caches(setup, batch, slots, 0))


def compile_decode(setup, batch, slots, *steps):
    """A block of greedy decode steps of the kinds that an answer's `steps` are, or its first."""
    variants = tuple(setup.method.step_variant(step) for step in steps or (1,))
    return decode_block.lower(
        setup,
        abstract_params(setup),
        sharded_caches(setup, batch, slots),
        abstract_state(batch),
        Steps(
            *(_ints(batch), _ints(batch, COLUMNS), abstract_values(batch)),
            *(variants, sampling_static(Sampling())),
        ),
    ).compile()


def compile_segment(setup, batch, slots, tokens, logits="none"):
    last = None
    if logits == "last":
        last = jax.ShapeDtypeStruct((batch, setup.config.vocab_size), jnp.float32)
    return _compiled(setup, slots, _segment(batch, tokens), last, logits)


def compile_spread(setup, batch, slots):
    """The segment of a context that fills half of the slots, spread over the shards of `seq`."""
    prompt = Feed(
        "context",
        setup.chunk,
        context=[range(slots // 2)] * batch,
        slots=slots,
        shards=setup.mesh.shape["seq"],
    )
    (segment,) = setup.method.segments(prompt)
    assert segment.spread
    return _compiled(setup, slots, segment, None, "none")


def _compiled(setup, slots, segment, last, logits):
    batch = len(segment.tokens)
    given = abstract_params(setup), sharded_caches(setup, batch, slots), segment, _ints(batch)
    return whole_segment.lower(setup, *given, last, logits).compile()


def largest_result(text, operation):
    """Bytes of the largest array that such an operation of a compiled program makes."""
    sizes = {"bf16": 2, "f16": 2, "u16": 2, "f32": 4, "s32": 4, "u32": 4}
    made = re.findall(rf"= (\(.*?\)|\S+) {operation}(?:-start)?\(", text)
    return max(
        sizes[kind] * math.prod(int(size) for size in shape.split(",") if size)
        for result in made
        for kind, shape in re.findall(r"(\w+?\d+)\[([\d,]*)\]", result)
    )


def compile_layer(setup, batch, slots, tokens):
    """The first layer's program of a segment of `tokens` columns, of one that goes by layer."""
    hidden = jax.ShapeDtypeStruct((batch, tokens, setup.config.model_dim), setup.dtype)
    return _through_layer.lower(
        setup,
        setup.layer(0),
        layer_params(abstract_params(setup), 0),
        hidden,
        sharded_caches(setup, batch, slots)[0],
        _segment(batch, tokens),
        _ints(batch),
    ).compile()


def _segment(batch, tokens):
    return Segment(
        np.zeros((batch, tokens), np.int32),
        np.full((batch, 1), tokens, np.int32),
        np.zeros((batch,), bool),
        "context",
        (RowGroup(CHUNK_ROWS, 0, tokens),),
    )


def _ints(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)
