import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_longctx.caches import (
    AppendCache,
    BudgetCache,
    Joining,
    append_only,
    choose,
    drop_oldest,
    empty_budget_cache,
    reading,
)
from jax_longctx.caches.fifo import FifoCache
from jax_longctx.engine.allocate import abstract_caches
from jax_longctx.engine.capacity import footprint
from jax_longctx.engine.context_io import load_context, save_context
from jax_longctx.engine.engine import prefill_question
from jax_longctx.engine.setup import Setup
from jax_longctx.errors import CheckpointError, ConfigError
from jax_longctx.methods import METHODS, make_method
from jax_longctx.sharding import make_mesh
from pallas_kernels import quantised
from pallas_kernels.plane import Plane, part_of
from pallas_kernels.quantised import Quantised
from tests.drawing import normal
from tests.jax_longctx.engine.lowering import compile_layer, no_persistent_cache
from tests.jax_longctx.methods.harness import ALIKE, answer_logits
from tests.jax_longctx.methods.selecting import layer_shape
from tests.small_methods import APART, EVERYTHING, KINDS, small_method
from tests.support import joined, random_rows, tiny_config, tiny_engine

# One of each kind of method is not `thorough`; those that evict in prefill, or choose blocks, run
# each time.
MARKS = {"full": (), "h2o": (), "infllm": (), "quest": pytest.mark.slow, "snapkv": pytest.mark.slow}
EACH = [
    pytest.param(name, marks=MARKS.get(name, pytest.mark.thorough))
    for name in APART
    if name not in ALIKE
]
ROWS = [[37, 9], [5, 5], [6, 6]]
# Compiled: one by one their operations would be as many programs of each shape.
quantise = jax.jit(quantised.quantise)
dequantised = jax.jit(quantised.dequantised)


@functools.cache
def logits(method, kv):
    rows = [random_rows(lengths, seed=seed) for seed, lengths in enumerate(ROWS)]
    return answer_logits(tiny_engine(method, chunk=16, kv=kv), rows, before=5)


def error(method, kv):
    """How far a method that leaves nothing out is from full attention with exact keys."""
    return np.abs(logits(method, kv) - logits(small_method("full"), None)).max()


def test_full_attention_is_off_by_the_rounding_of_keys_and_values():
    """Against a model whose keys and values are rounded beforehand, by their definition."""
    assert 0 < error(small_method("full"), "int8") < 0.06


@pytest.mark.parametrize("name", EACH)
@pytest.mark.quick("h2o", "full")
def test_with_nothing_left_out_it_is_as_near_as_full_attention(name):
    allowed = 2 * error(small_method("full"), "int8")
    assert 0 < error(make_method(name, EVERYTHING[name]), "int8") < allowed


def answers(engine, contexts, questions):
    context = engine.prefill(contexts, reserve=24, questions=questions)
    return asked(engine, context, questions)


def asked(engine, context, questions):
    return joined(engine.stream(context, questions, max_tokens=8))


def step_logits(name, *rows, **options):
    return answer_logits(tiny_engine(small_method(name), chunk=16, kv="int8", **options), rows)


# Methods of a kind meet 8 bits alike, in batches, loops and on meshes.
TOGETHER = [
    *((name, (1, 1, 1)) for name in ("h2o", "snapkv")),
    *(pytest.param(kind, (2, 2, 2), marks=pytest.mark.thorough) for kind in KINDS),
]


@pytest.mark.parametrize(("name", "mesh"), TOGETHER)
@pytest.mark.quick("h2o")
def test_a_ragged_batch_in_the_devices_loop_is_each_row_alone_in_the_hosts(name, mesh):
    contexts, questions = random_rows([90, 40, 1, 0]), random_rows([3, 5, 2, 2], seed=1)
    given, places = random_rows([4] * 4, seed=2), make_mesh(*mesh)
    rows = contexts, questions, given
    together = step_logits(name, *rows, mesh=places, by_layer=False)
    for row in range(4):
        alone = step_logits(name, *([part[row]] for part in rows), by_layer=True)
        np.testing.assert_allclose(together[row], alone[0], atol=1e-4)


# Eviction.

POSITIONS = ("true", "shifted")


def caches_after(name, kv="int8", apart=True, **settings):
    """The first layer's after a long and a short row's question; `apart`: those of the answer."""
    method = dataclasses.replace(small_method(name), **settings)
    engine = tiny_engine(method, chunk=16, kv=kv, by_layer=True)
    contexts, questions = random_rows([100, 30]), random_rows([3, 5], seed=1)
    context = engine.prefill(contexts, reserve=24, questions=questions)
    stream = engine.stream(context, questions, max_tokens=2, keep=False)
    taken = None
    with engine.asked(context, False) as run:
        asked = engine.padded(questions)
        prefill_question(engine.setup, engine.params, run, asked, context.total)
        if apart and engine.method.info.answers_apart:
            engine.answer_apart(run, context, 2, False)
        taken = jax.tree.map(np.asarray, run.caches[0])
    stream.close()
    return taken


def parts(tree, kind):
    return [
        x
        for x in jax.tree.leaves(tree, is_leaf=lambda y: isinstance(y, kind))
        if isinstance(x, kind)
    ]


@pytest.fixture(scope="module")
def everything_kept():
    """The first layer's store under full attention: a token's key and value, as they are stored.

    In the first layer they depend on the token and its position alone.
    """
    (store,) = parts(caches_after("full"), AppendCache)
    return store


def check_same_bits(kept, tokens, store, lengths, keys=True):
    for row, length in enumerate(lengths):
        for head in range(tokens.shape[1]):
            at = tokens[row, head, :length]
            for name in ("k", "v") if keys else ("v",):
                mine, all_of_them = getattr(kept, name), getattr(store, name)
                # Heads that keep tokens of their own read their kv head's.
                of = head * all_of_them.shape[1] // tokens.shape[1]
                np.testing.assert_array_equal(
                    mine.values[row, head, :length], all_of_them.values[row, of, at]
                )
                np.testing.assert_array_equal(
                    mine.scales[row, head, :length], all_of_them.scales[row, of, at]
                )


# All move tokens by the same functions: one method of each kind of scores and of threads.
EVICTING = [
    *((name, way) for name in ("streaming-llm", "h2o") for way in POSITIONS),
    *((name, "true") for name in ("tova", "h2o-shared", "citrus", "citrus-individual")),
]


@pytest.mark.parametrize(("name", "positions"), EVICTING)
@pytest.mark.quick("h2o-true")
def test_eviction_moves_numbers_and_scales_together(name, positions, everything_kept):
    # What CItruS's setting leaves open, its methods do not take.
    takes = "positions" in {field.name for field in dataclasses.fields(small_method(name))}
    settings = {"positions": positions} if takes else {}
    caches = parts(caches_after(name, apart=False, **settings), BudgetCache)
    assert caches
    for cache in caches:
        assert isinstance(cache.k, Quantised) and cache.length.max() < 100
        # Shifted keys are stored before rotary embedding.
        keys = takes and positions == "true"
        check_same_bits(cache, cache.token, everything_kept, cache.length, keys)


@pytest.mark.parametrize("name", ["snapkv", "refreshkv"])
@pytest.mark.quick("refreshkv")
def test_chosen_tokens_keep_their_numbers_and_scales(name, everything_kept):
    (cache,) = parts(caches_after(name), FifoCache)
    limit = cache.capacity if name == "snapkv" else 49
    tokens = np.asarray(cache.tokens(limit, cache.capacity))
    assert cache.count.max() == 48
    check_same_bits(cache, tokens, everything_kept, np.asarray(cache.count))


@pytest.mark.parametrize("one", [False, True])
@pytest.mark.parametrize("oldest", [False, True])
def test_a_token_is_rounded_once(oldest, one):
    heads, width, size = 2, 8, 6
    arrays = (np.zeros(shape, np.float32) for shape in [(1, heads, width), (1, heads, 16, width)])
    shape = dataclasses.replace(layer_shape(*arrays), kv="int8")
    cache = empty_budget_cache(shape, size, grows=False)
    text = np.asarray(normal(1, 24, heads, width))
    stored = quantise(np.swapaxes(text, 1, 2))
    step = 1 if one else 3
    # Compiled, as the engine runs them: one by one their operations would be as many programs.
    drop = jax.jit(functools.partial(drop_oldest, first=2, one=one, after=None))
    keep = jax.jit(functools.partial(choose, one=one))
    for start in range(0, 24, step):
        new, held = text[:, start : start + step], int(cache.length[0])
        count = min(held + step, size)
        given = (np.array([count], np.int32), np.array([step], np.int32))
        if oldest:
            leaving = np.array([held + step - count], np.int32)
            cache = drop(cache, Joining(new, 2 * new, None, *given), leaving=leaving)
        else:
            scores = np.asarray(normal(1, heads, size + step, seed=start))
            present = np.arange(size + step) < held
            present[size:] = True
            scores = np.where(present, scores, -np.inf)
            cache = keep(cache, Joining(new, 2 * new, None, *given), scores)
        for head in range(heads):
            at = np.asarray(cache.token)[0, head, :count]
            for mine, kept in zip(jax.tree.leaves(cache.k), jax.tree.leaves(stored), strict=True):
                np.testing.assert_array_equal(mine[0, head, :count], np.asarray(kept)[0, head, at])
            back = np.asarray(dequantised(cache.v))[0, head, :count]
            exact = 2 * np.asarray(text)[0, at, head]
            step_size = np.asarray(cache.v.scales, np.float32)[0, head, :count, None]
            assert (np.abs(back - exact) <= step_size / 2 * (1 + 1e-5)).all()


# Storage.


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize("plane", [False, True])
@pytest.mark.parametrize(("rows", "tokens"), [(1, 1), (3, 1), (3, 5), (1, 5)])
def test_numbers_and_scales_are_written_and_read_together(
    monkeypatch, platform, plane, rows, tokens
):
    for module in (append_only, reading):
        monkeypatch.setattr(module, "platform", lambda: platform)
    slots = 16
    before, text = (normal(rows, 2, size, 8, seed=seed) for seed, size in ((0, slots), (1, tokens)))
    old, new = quantise(before), quantise(text)
    start = np.array([3, 0, slots - tokens], np.int32)[:rows]
    valid = np.array([tokens, max(tokens - 2, 1), tokens], np.int32)[:rows]
    listed = np.broadcast_to(np.array([[[5, -1, 0, slots - 1]]], np.int32), (rows, 1, 4))

    @jax.jit
    def write_and_read(kept, text, start, valid, listed):
        if plane:
            kept = jax.tree.map(lambda x: Plane(jnp.stack([x * 0, x, x * 0]), jnp.int32(1)), kept)
        written = append_only.write_rows(kept, text, start, valid)
        return part_of(written), reading.read_lines(written, listed)

    written, lines = write_and_read(old, np.swapaxes(text, 1, 2), start, valid, listed)
    expected = jax.tree.map(lambda leaf: np.array(leaf), old)
    for row in range(rows):
        for name in ("values", "scales"):
            part = np.array(getattr(new, name))[row, :, : valid[row]]
            getattr(expected, name)[row, :, start[row] : start[row] + valid[row]] = part
    got = jax.tree.map(np.array, written)
    for row in range(rows):
        # The slot after a row's last one may hold garbage.
        spoilt = int(start[row] + valid[row])
        for name in ("values", "scales"):
            mine, wanted = (
                np.delete(getattr(x, name)[row], spoilt, axis=1)
                if spoilt < slots
                else getattr(x, name)[row]
                for x in (got, expected)
            )
            np.testing.assert_array_equal(mine, wanted)
    exact = np.array(dequantised(written))[:, :, [5, 0, 0, slots - 1]]
    exact[:, :, 1] = 0
    np.testing.assert_array_equal(lines, exact)


@pytest.mark.parametrize(
    "name",
    [
        *("full", pytest.param("citrus", marks=pytest.mark.slow)),
        *(
            pytest.param(name, marks=pytest.mark.thorough)
            for name in ("h2o", "quest", "resa", "star", "snapkv", "refreshkv")
        ),
    ],
)
def test_a_context_keeps_its_8_bits_saved_and_grown(name, tmp_path):
    """A question and answer of more than was reserved make numbers and scales grow."""
    contexts, questions = random_rows([90, 40]), random_rows([3, 5], seed=1)
    config = tiny_config(num_layers=1)
    engine = tiny_engine(small_method(name), config=config, chunk=16, kv="int8")
    context = engine.prefill(contexts, reserve=1, questions=questions)
    save_context(engine, context, tmp_path / "kept")
    loaded = load_context(engine, tmp_path / "kept")
    for old, new in zip(*map(jax.tree.leaves, (context.caches, loaded.caches)), strict=True):
        assert old.dtype == new.dtype
        np.testing.assert_array_equal(*(np.asarray(x).view(np.uint8) for x in (old, new)))
    first = asked(engine, context, questions)
    assert asked(engine, loaded, questions) == first
    assert answers(engine, contexts, questions) == first
    other = tiny_engine(small_method(name), config=config, chunk=16)
    with pytest.raises(CheckpointError, match="made with kv 'int8', now it is None"):
        load_context(other, tmp_path / "kept")


def test_names_of_kv():
    with pytest.raises(ConfigError, match="unknown kv 'int4'; known: bfloat16, int8"):
        tiny_engine(kv="int4")
    with pytest.raises(ConfigError, match=r"kv bfloat16: .* loaded in float32, .*; leave kv away"):
        tiny_engine(kv="bfloat16")
    assert tiny_engine(kv="int8").setup.kv == "int8"


# The small filters are of heads of 8 numbers.
@pytest.mark.parametrize("name", [name for name in METHODS if name != "q-filters"])
def test_bytes_of_keys_and_values(name):
    """Resident and read bytes count numbers and scales: width + 2 for width * 4."""
    method, config = small_method(name), tiny_config(head_dim=64)
    setups = [
        Setup(config, method, make_mesh(), jnp.dtype(jnp.float32), 16, True, kv)
        for kv in (None, "int8")
    ]
    wide, kept = (abstract_caches(setup, 1, 1024, 32)[0] for setup in setups)
    fewer = [
        sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
        for cache in (wide, kept)
    ]
    stores = parts(kept, Quantised)
    assert stores and all(x.shape[3] == 64 for x in stores)
    assert fewer[0] - fewer[1] == sum(4 * x.size - x.nbytes for x in stores)
    sizes = [footprint(setup, batch=1, context=900, reserve=32) for setup in setups]
    for what in ("peak", "resident", "kept", "read"):
        assert getattr(sizes[1], what) < getattr(sizes[0], what)


@pytest.mark.optimized
@pytest.mark.parametrize("tokens", [1, 256])
@pytest.mark.parametrize(
    "name",
    [
        *("full", "quest"),
        *(
            pytest.param(name, marks=pytest.mark.thorough)
            for name in ("refreshkv", "infllm", "reattention", "resa")
        ),
    ],
)
@pytest.mark.quick("full-1", "quest-256")
def test_no_program_holds_keys_or_values_as_floats(name, tokens):
    """The temporaries of a layer's program stay below its keys alone in bfloat16."""
    config = tiny_config(num_layers=1, num_heads=2, num_kv_heads=2, head_dim=128)
    settings = {"budget": 1024} if name in ("quest", "resa", "refreshkv") else {}
    method, slots = make_method(name, settings), 131_072
    setup = Setup(config, method, make_mesh(), jnp.dtype(jnp.bfloat16), 512, True, "int8")
    with no_persistent_cache():
        memory = compile_layer(setup, 1, slots, tokens).memory_analysis()
    keys = 2 * slots * 128 * 2
    assert memory.temp_size_in_bytes < keys / 2
    stored = abstract_caches(setup, 1, slots, 0)[0]
    assert memory.alias_size_in_bytes >= sum(x.nbytes for x in parts(stored, Quantised))
