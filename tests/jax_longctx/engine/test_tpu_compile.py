"""The engine's programs compiled ahead of time for v5e, on one chip and sharded over four."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh

from jax_longctx.engine.ahead import lower
from jax_longctx.engine.allocate import abstract_caches
from jax_longctx.engine.capacity import bytes_per_device
from jax_longctx.engine.products import gathers_weights
from jax_longctx.engine.setup import Setup
from jax_longctx.methods import Full, make_method
from jax_longctx.models.mixture import Mixture
from jax_longctx.models.presets import preset
from jax_longctx.planning.collectives import count_collectives, count_reads
from jax_longctx.planning.compiled import abstract_params, local_arrays
from jax_longctx.planning.work import decode_work, step_weight_bytes
from jax_longctx.run_spec import RunSpec
from jax_longctx.settings import Offload, Reading
from jax_longctx.sharding import MESH_AXES, make_mesh
from tests.absent import tpu
from tests.jax_longctx.engine.gpu_programs import arrays, computations, shared_decode, unfused
from tests.jax_longctx.engine.lowering import (
    cache_bytes,
    compile_decode,
    compile_segment,
    compile_spread,
    largest_result,
    no_persistent_cache,
)
from tests.support import tiny_config

pytestmark = pytest.mark.optimized

pytest.importorskip("libtpu")

SLOTS = 32768
SIZES = {
    "num_layers": 4,
    "model_dim": 512,
    "mlp_dim": 1024,
    "num_heads": 8,
    "num_kv_heads": 4,
    "head_dim": 128,
    "vocab_size": 1024,
}


@pytest.fixture(autouse=True, scope="module")
def _as_users_compile():
    """The tests' exact matmuls are for CPU."""
    with no_persistent_cache(), jax.default_matmul_precision("default"):
        yield


def on_v5e(mesh_sizes, method=None, **changes):
    mesh = make_mesh(*mesh_sizes, devices=tpu())
    config = tiny_config(**SIZES | changes)
    return Setup(config, method or Full(), mesh, jnp.dtype(jnp.bfloat16), 512)


@pytest.mark.parametrize("way", [None, pytest.param(Reading(), marks=pytest.mark.slow)], ids=str)
def test_tpu_segment_compiles_in_place_with_its_kernel(way):
    """Temporaries below one layer's keys and values: no copy of any buffer.

    Splash attention is given a layer's slice, which may be a copy. Weights are multiplied in place.
    """
    # Two layers: a kernel takes a second to compile.
    setup = dataclasses.replace(on_v5e((1, 2, 2), num_layers=2), reading=way)
    compiled = compile_segment(setup, 1, SLOTS, 64)
    memory, cache = compiled.memory_analysis(), cache_bytes(setup, 1, SLOTS)
    assert memory.alias_size_in_bytes >= cache
    assert memory.temp_size_in_bytes < cache / setup.config.num_layers
    text = compiled.as_text()
    assert "tpu_custom_call" in text
    assert ("sparse_prefill_attention" in text) == (way is not None)
    # q, k and v of 64 tokens, and their merged attention.
    assert largest_result(text, "all-gather") < min(arrays_of_layers(setup)) / 2


@pytest.mark.slow
def test_tpu_windows_are_written_in_place_and_scores_capped_in_the_kernel():
    window = 4096
    setup = on_v5e((1, 1, 1), windows=(window, None) * 2, attention_cap=30.0)
    ring = 2 * SIZES["num_kv_heads"] * window * SIZES["head_dim"] * 2
    decode = compile_decode(setup, 1, SLOTS)
    memory = decode.memory_analysis()
    assert memory.alias_size_in_bytes >= cache_bytes(setup, 1, SLOTS)
    assert memory.temp_size_in_bytes < ring / 4
    # One for each kind of layer: the kinds take turns in one loop.
    assert decode.as_text().count("tpu_custom_call") == 2


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(1, 1, 1), (1, 2, 2)], ids=str)
def test_tpu_programs_make_no_copy_of_a_layers_experts(mesh):
    mixture = Mixture(count=16, chosen=2)
    setup = on_v5e(mesh, family="qwen3_moe", qk_norm=True, experts=mixture, mlp_dim=2048)
    layer = 16 * 3 * SIZES["model_dim"] * 2048 * 2 // (mesh[1] * mesh[2])
    for compiled in (compile_decode(setup, 1, 4096), compile_segment(setup, 1, 4096, 256)):
        assert compiled.memory_analysis().temp_size_in_bytes < layer / 4


@pytest.mark.slow
def test_tpu_rows_over_one_context_copy_no_layer_of_it():
    """Sharded; `test_gpu_compile` looks at one device."""
    mesh = (1, 2, 2)
    setup = on_v5e(mesh, make_method("arkvale"))
    request = SimpleNamespace(spec=RunSpec(method=setup.method), context=32000, reserve=512)
    (decode,) = shared_decode(request, setup, 8)
    memory = lower(decode.function, decode.args).compile().memory_analysis()
    keys = SIZES["num_kv_heads"] * SLOTS * SIZES["head_dim"] * 2 // (mesh[1] * mesh[2])
    assert memory.temp_size_in_bytes < 0.75 * keys
    # Keys and values of all layers, which the context has once.
    assert memory.alias_size_in_bytes >= 2 * keys * SIZES["num_layers"]


@pytest.mark.slow
def test_tpu_programs_hold_no_floats_of_a_cache_in_8_bits():
    """Decode reads int8 in its kernel. A chunk's kernel is given blocks of floats."""
    slots = 2 * SLOTS
    setup = dataclasses.replace(on_v5e((1, 1, 1), num_layers=2), kv="int8")
    keys = SIZES["num_kv_heads"] * slots * SIZES["head_dim"] * 2
    decode, segment = compile_decode(setup, 1, slots), compile_segment(setup, 1, slots, 256)
    for compiled, most in ((decode, keys / 20), (segment, keys / 2)):
        memory = compiled.memory_analysis()
        assert memory.temp_size_in_bytes < most
        assert memory.alias_size_in_bytes >= cache_bytes(setup, 1, slots)
        assert "tpu_custom_call" in compiled.as_text()


@pytest.mark.slow
def test_tpu_products_convert_weights_in_8_bits_as_they_read_them():
    """No program holds a matrix of a layer in bfloat16."""
    slots, sizes = 4096, {"num_layers": 2, "vocab_size": 1536}
    setup = dataclasses.replace(on_v5e((1, 2, 2), **sizes), weights="int8")
    layers = {
        shape for kind, shape in local_arrays(abstract_params(setup)["layers"]) if kind == "s8"
    }
    matrices = {shape[1:] for shape in layers}
    assert len(matrices) == 4
    for compiled in (compile_decode(setup, 2, slots), compile_segment(setup, 1, slots, 96)):
        held = {
            tuple(size for size in array if size != 1)
            for each in unfused(computations(compiled.as_text()))
            for kind, array in arrays(each)
            if kind == "bf16"
        }
        assert not held & (layers | matrices)


def arrays_of_layers(setup):
    """Bytes of each array of one layer's weights."""
    stacks = jax.tree.leaves(abstract_params(setup)["layers"])
    return [leaf.size // leaf.shape[0] * leaf.dtype.itemsize for leaf in stacks if leaf.ndim > 2]


def test_tpu_decode_reads_each_weight_once_over_all_devices():
    """A step on 2 x 2 shards reads a quarter of the weights on each, and gathers none."""
    setup = on_v5e((1, 2, 2), vocab_size=1536)
    compiled, cache = compile_decode(setup, 2, SLOTS), cache_bytes(setup, 2, SLOTS)
    memory, text, params = compiled.memory_analysis(), compiled.as_text(), abstract_params(setup)
    assert memory.temp_size_in_bytes < cache / 20
    assert memory.alias_size_in_bytes >= cache
    weights = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params)) / 4
    read = count_reads(text, local_arrays(params))
    # All weights but the table of the embedding, of which it reads a few rows.
    assert 0.99 * step_weight_bytes(setup) < read <= 1.1 * weights
    assert memory.argument_size_in_bytes <= 1.1 * (weights + cache)
    # What is gathered is of two rows.
    assert largest_result(text, "all-gather") < min(arrays_of_layers(setup)) / 20
    # q, k and v; the merge of attention; the sums of the output projection and of the MLP.
    assert 0 <= count_collectives(text)[0] - 4 * setup.config.num_layers <= 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chip", "mesh", "name"),
    [
        ("v5e:2x2", (1, 4, 1), "full"),
        ("v5e:2x2", (1, 1, 4), "quest"),
        ("v6e:2x4", (1, 2, 4), "full"),
        ("v6e:2x4", (1, 8, 1), "quest"),
    ],
)
def test_tpu_decode_exchanges_as_often_as_planned(chip, mesh, name):
    config = tiny_config(**SIZES | {"vocab_size": 2048})
    devices = make_mesh(*mesh, devices=tpu(chip))
    setup = Setup(config, make_method(name), devices, jnp.dtype(jnp.bfloat16), 512)
    found = count_collectives(compile_decode(setup, 1, SLOTS).as_text())[0]
    planned = decode_work(setup, batch=1, context=SLOTS - 512, read=0).collectives
    # The rest are of the embedding, the logits and the next token.
    assert 0 <= found - planned <= 4 < planned


@pytest.mark.slow
def test_tpu_many_spread_tokens_gather_one_layers_weights_at_a_time():
    temporaries = []
    for layers in (2, 6):
        setup = on_v5e((1, 2, 2), make_method("ring", {}), num_layers=layers)
        assert gathers_weights(setup.config, setup.mesh, 1024)
        compiled = compile_spread(setup, 1, 2048)
        # An array of one layer, over `tensor`, not a stack of them.
        whole = max(arrays_of_layers(setup)) / 2
        assert largest_result(compiled.as_text(), "all-gather") == whole
        temporaries.append(compiled.memory_analysis().temp_size_in_bytes)
    assert temporaries[1] - temporaries[0] < min(arrays_of_layers(setup)) / 2
    # Few tokens are gathered in their place: an MLP's weights are more bytes than 256 tokens.
    setup = on_v5e((1, 2, 2), make_method("ring", {}), num_layers=2, mlp_dim=8192)
    assert not gathers_weights(setup.config, setup.mesh, 256)
    gathered = largest_result(compile_spread(setup, 1, 512).as_text(), "all-gather")
    # The hidden states of both shards' tokens.
    assert max(arrays_of_layers(setup)) / 4 > gathered == 512 * SIZES["model_dim"] * 2


def test_spread_tokens_gather_what_is_fewer_bytes():
    """Llama-3.1-8B over four shards: its layers' weights are 3,328 tokens' hidden states."""
    config = preset("llama-3.1-8b")
    mesh = AbstractMesh((1, 4, 1), MESH_AXES)
    layer = 2 * 4096 * (32 + 8) * 128 + 3 * 4096 * 14336
    tokens = layer / 4 / (4 * 4096)
    assert tokens == 3328
    assert not gathers_weights(config, mesh, 3328)
    assert gathers_weights(config, mesh, 3329)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kv", "chip"),
    [
        ("infllm", None, "v5e:2x2"),
        ("quest", "int8", "v6e:2x2"),
        # Its decode alone: a text is read as others read it, without what lies in the host.
        ("reattention", None, "v5e:2x2"),
    ],
)
def test_tpu_programs_leave_an_offloaded_context_where_it_is(chip, name, kv):
    """Bytes by kind of memory: the host's pages are arguments, updated in place and not copied."""
    devices = tpu(chip)
    rope = dataclasses.replace(tiny_config().rope, trained_length=SLOTS)
    config = tiny_config(**SIZES, rope=rope, max_position=SLOTS)
    given = config, make_method(name), make_mesh(devices=devices), jnp.dtype(jnp.bfloat16), 512
    setup = Setup(*given, kv=kv, offload=Offload())
    shapes = abstract_caches(setup, 1, SLOTS, 0)
    host, device = (bytes_per_device(setup.mesh, shapes, host=each) for each in (True, False))
    numbers = 2 * config.num_layers * config.num_kv_heads * SLOTS * config.head_dim
    if name == "reattention":
        # Its keys stay on the device.
        numbers //= 2
    assert host == numbers * (1 if kv else 2)
    layer = host / config.num_layers
    # Of a chunk that is read by full attention a layer is on the device, in its turn.
    brought = 2 * layer if name == "quest" else 0
    compiled = {"decode": (compile_decode(setup, 1, SLOTS), 0)}
    if name != "reattention":
        compiled["segment"] = compile_segment(setup, 1, SLOTS, 512), brought
    for what, (program, passing) in compiled.items():
        memory = program.memory_analysis()
        assert memory.host_argument_size_in_bytes == host, what
        assert memory.host_alias_size_in_bytes == host, what
        assert memory.host_temp_size_in_bytes == 0, what
        assert memory.alias_size_in_bytes >= device, what
        # It was 46 MB here, more than half a layer's context, and less than one.
        most = layer if (name, chip, what) == ("infllm", "v5e:2x2", "decode") else layer / 2
        assert memory.temp_size_in_bytes < passing + most, what
