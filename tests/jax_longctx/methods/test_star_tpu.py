"""Star and full attention compiled ahead of time for sixteen chips of a v5e: what travels."""

import jax
import jax.numpy as jnp
import pytest

from jax_longctx.contract import Feed
from jax_longctx.engine import Sampling
from jax_longctx.engine.capacity import bucket, bytes_per_device, staged_caches
from jax_longctx.engine.decode import Steps, decode_block
from jax_longctx.engine.prefill import whole_segment
from jax_longctx.engine.sampling import sampling_static
from jax_longctx.engine.setup import Setup
from jax_longctx.methods import make_method
from jax_longctx.planning.compiled import count_collectives
from jax_longctx.sharding import make_mesh
from tests.absent import tpu
from tests.jax_longctx.engine.lowering import (
    abstract_params,
    abstract_state,
    abstract_values,
    no_persistent_cache,
    placed,
)
from tests.support import tiny_config

pytestmark = [pytest.mark.optimized, pytest.mark.thorough]

CONTEXT, RESERVE, LAYERS = 16 * 1024 - 64, 63, 2
SHAPE = {"model_dim": 1024, "mlp_dim": 2048, "num_heads": 16, "num_kv_heads": 8, "head_dim": 128}
STAR = {"block": 1024}


@pytest.fixture(scope="module", autouse=True)
def _as_users_compile():
    """The tests' exact matmuls are for CPU."""
    with no_persistent_cache(), jax.default_matmul_precision("default"):
        yield


def setup_of(name, settings, seq, tensor):
    mesh = make_mesh(1, seq, tensor, devices=tpu("v5e:4x4"))
    config = tiny_config(num_layers=LAYERS, vocab_size=1024, **SHAPE)
    method = make_method(name, settings)
    return Setup(config, method, mesh, jnp.dtype(jnp.bfloat16), 512)


def prefill(setup):
    """A compiled program for each kind of segment, by its variant and columns on a shard."""
    slots = bucket(CONTEXT + RESERVE + 1, setup.mesh.shape["seq"])
    caches, _, _ = staged_caches(setup, 1, CONTEXT, RESERVE)
    total = jax.ShapeDtypeStruct((1,), jnp.int32)
    found = {}
    prompt = Feed(
        "context",
        setup.chunk,
        context=[range(CONTEXT)],
        slots=slots,
        shards=setup.mesh.shape["seq"],
        vocab_size=CONTEXT,
    )
    for segment in setup.method.segments(prompt):
        shards = setup.mesh.shape["seq"] if segment.spread else 1
        kind = segment.variant, segment.tokens.shape[1] // shards
        if kind not in found:
            lowered = whole_segment.lower(
                setup,
                abstract_params(setup),
                placed(setup.mesh, caches),
                segment,
                total,
                None,
                "none",
            )
            found[kind] = lowered.compile()
    return found


def decode(setup):
    """The compiled block of decode steps, and bytes of the caches on a device."""
    _, _, caches = staged_caches(setup, 1, CONTEXT, RESERVE)
    static = (setup.method.step_variant(1),), sampling_static(Sampling())
    total = jax.ShapeDtypeStruct((1,), jnp.int32)
    lowered = decode_block.lower(
        setup,
        abstract_params(setup),
        placed(setup.mesh, caches),
        abstract_state(1),
        Steps(total, total.update(shape=(1, 32)), abstract_values(1), *static),
    )
    return lowered.compile(), bytes_per_device(setup.mesh, caches)


@pytest.mark.parametrize(
    ("kv", "kinds"), [("recompute", {("anchor", 512), ("", 512)}), ("broadcast", {("sends", 1024)})]
)
def test_blocks_side_by_side_send_an_anchor_or_nothing(kv, kinds):
    setup = setup_of("star", {**STAR, "anchor_kv": kv}, seq=16, tensor=1)
    found = prefill(setup)
    assert set(found) == kinds
    # Each layer's weights are gathered, and the embedding's.
    layer = 1024 * (16 + 2 * 8) * 128 + 16 * 128 * 1024 + 3 * 1024 * 2048
    weights = 2 * (LAYERS * layer + 1024 * 1024)
    for program in found.values():
        collectives, moved = count_collectives(program.as_text())
        if kv == "recompute":
            # The number that says when a segment is done comes from the first shard.
            assert collectives == 4 * LAYERS + 2 and weights <= moved <= weights + 64
        else:
            # Keys and values of the anchor in every layer, and how many there are.
            anchor = 2 * 1024 * 8 * 128 * 2
            assert (4 + 1) * LAYERS <= collectives <= (4 + 3) * LAYERS + 2
            assert LAYERS * anchor <= moved - weights <= 1.01 * LAYERS * 2 * anchor


@pytest.mark.parametrize(("name", "settings"), [("star", STAR), ("full", {})], ids=["star", "full"])
def test_a_decode_step_over_sixteen_shards_moves_activations_alone(name, settings):
    setup = setup_of(name, settings, seq=16, tensor=1)
    program, cache = decode(setup)
    collectives, moved = count_collectives(program.as_text())
    # In a layer: queries, keys and values, attention's merge, the sums after attention and the MLP.
    # Then the embedding, and the choice of the token.
    assert collectives == 4 * LAYERS + 3
    assert LAYERS * 16 * 16 * (2 * 128 + 4) <= moved < 2 * 1024 * 1024
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= cache
    assert memory.temp_size_in_bytes < cache


def test_full_attention_reads_a_context_over_slots_and_heads():
    setup = setup_of("full", {}, seq=2, tensor=8)
    (program,) = prefill(setup).values()
    collectives, moved = count_collectives(program.as_text())
    # Attention's output and the MLP's over the heads, and the merge over the slots.
    assert collectives >= 3 * LAYERS and moved > 0
    assert "tpu_custom_call" in program.as_text()
