"""refreshkv: what its decode program reads and copies, its sizes, and words about bad settings."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

from jax_longctx.engine import programs
from jax_longctx.engine.capacity import grow
from jax_longctx.errors import ConfigError
from jax_longctx.methods import make_method
from jax_longctx.methods.refreshkv import RefreshKV
from jax_longctx.sharding import make_mesh
from tests.jax_longctx.engine.lowering import cache_bytes, compile_decode, no_persistent_cache
from tests.jax_longctx.methods.branches import decided_by_floats
from tests.support import tiny_config, tiny_engine


def bodies(text):
    """The computations of a compiled program by name, as lines."""
    found, name = {}, None
    for line in text.splitlines():
        if line and not line[0].isspace():
            head = re.match(r"(?:ENTRY )?%?([\w.\-]+) .*\{$", line)
            name = head.group(1) if head else None
            if name:
                found[name] = []
        elif name:
            found[name].append(line)
    return found


def reached(computations, name, through_branches):
    """Lines of a computation and of those that it calls, conditional branches among them or not."""
    lines, queue, done = [], [name], set()
    while queue:
        name = queue.pop()
        if name in done:
            continue
        done.add(name)
        for line in computations[name]:
            lines.append(line)
            if " conditional(" in line and not through_branches:
                continue
            queue += [word for word in re.findall(r"%([\w.\-]+)", line) if word in computations]
    return lines


@pytest.mark.parametrize(
    ("step", "branch"),
    [
        pytest.param(1, False, id="partial"),
        pytest.param(5, True, id="checked", marks=pytest.mark.slow),
    ],
)
def test_a_partial_step_neither_reads_nor_copies_the_full_cache(step, branch):
    """Read from the decode program: matmuls over all slots stand in branches of a check alone."""
    slots, batch = 16384, 2
    config = tiny_config(num_layers=1, num_heads=8, num_kv_heads=2, head_dim=64)
    method = RefreshKV(budget=512)
    setup = programs.Setup(config, method, make_mesh(), jnp.dtype(jnp.float32), 512)
    with no_persistent_cache():
        compiled = compile_decode(setup, batch, slots, step)
    computations = bodies(compiled.as_text())
    entry = re.search(r"^ENTRY %?([\w.\-]+)", compiled.as_text(), re.MULTILINE)
    assert entry is not None

    def reads(through_branches):
        lines = reached(computations, entry.group(1), through_branches)
        return [line for line in lines if re.search(rf" dot\(.*{slots}|{slots}.* dot\(", line)]

    assert bool(reads(through_branches=True)) == branch
    assert not reads(through_branches=False)
    memory = compiled.memory_analysis()
    full = 2 * config.num_layers * batch * 2 * slots * 64 * 4
    assert cache_bytes(setup, batch, slots) > full
    assert memory.alias_size_in_bytes > full
    # A layer's logits and scores of 8 heads: a sixteenth of keys and values each 4 arrays.
    assert memory.temp_size_in_bytes < full / 8


def test_a_full_step_by_schedule_has_no_branch():
    """What a branch may change is copied on a GPU, and its predicate waited for."""
    method = RefreshKV(budget=6, schedule="fixed", stride=3)
    setup = programs.Setup(tiny_config(num_layers=1), method, make_mesh(), jnp.dtype("float32"), 16)
    for step in (1, 3):
        text = compile_decode(setup, 2, 256, step).as_text()
        assert "while(" in text and "conditional(" not in text


@pytest.mark.slow
def test_one_program_of_both_kinds_of_steps_copies_no_cache():
    """A loop for each kind within one: neither carries copies of what the other changes."""
    slots, batch = 16384, 2
    config = tiny_config(num_layers=1, num_heads=8, num_kv_heads=2, head_dim=64)
    method = RefreshKV(budget=512, schedule="fixed", stride=3)
    setup = programs.Setup(config, method, make_mesh(), jnp.dtype(jnp.float32), 512)
    with no_persistent_cache():
        compiled = compile_decode(setup, batch, slots, 1, 3)
    assert compiled.as_text().count(" while(") >= 3 and "conditional(" not in compiled.as_text()
    memory = compiled.memory_analysis()
    full = 2 * batch * 2 * slots * 64 * 4
    assert memory.alias_size_in_bytes > full
    assert memory.temp_size_in_bytes < full / 8


def test_a_partial_step_reads_the_budget():
    (shape,) = programs.cache_shapes(tiny_engine(config=tiny_config(num_layers=1)).setup, 2, 256, 8)
    token = 2 * 2 * 2 * 8 * 4  # keys and values x 2 rows x 2 heads x 8 x float32
    fixed = RefreshKV(budget=6, schedule="fixed", stride=3)
    for method, every in [(fixed, 3), (RefreshKV(budget=6, qc_stride=2), 2)]:
        cache = method.init_cache(shape)
        assert method.read_bytes(cache, 200) == token * 7 + token * 256 // every


def test_without_a_budget_there_is_room_for_a_share_of_any_prompt():
    (shape,) = programs.cache_shapes(
        tiny_engine(config=tiny_config(num_layers=1)).setup, 2, 256, 16
    )
    for settings, size in [({}, 32), ({"ratio": 0.3}, 77), ({"ratio": 1e-3}, 1)]:
        cache = jax.eval_shape(functools.partial(RefreshKV(**settings).init_cache, shape))
        assert cache.partial.chosen.shape[2] == size
    method = RefreshKV(ratio=0.3)
    cache = method.init_cache(shape)
    token = 2 * 2 * 2 * 8 * 4
    assert method.read_bytes(cache, 100) == token * 31 + token * 256 // 5


@pytest.mark.parametrize(
    ("settings", "shapes"),
    [
        ({"budget": 6}, (6, 128)),
        ({"budget": 6, "evict_on_push": False}, (6, 128 + 256)),
        ({"ratio": 0.3}, (77 + 128, 128 + 128)),
        ({"ratio": 0.3, "evict_on_push": False}, (77 + 128, 128 + 256)),
    ],
    ids=str,
)
def test_a_partial_cache_grows_with_what_it_holds(settings, shapes):
    """After 256 more slots: of a list of tokens, and of buffers for them."""
    (shape,) = programs.cache_shapes(
        tiny_engine(config=tiny_config(num_layers=1)).setup, 2, 256, 16
    )
    cache = jax.eval_shape(lambda: grow((RefreshKV(**settings).init_cache(shape),), 256)[0])
    assert (cache.partial.chosen.shape[2], cache.partial.k.shape[2]) == shapes
    assert cache.store.k.shape[2] == 512


@pytest.mark.parametrize("indexed", [False, True])
def test_shards_agree_on_a_full_step(indexed):
    """Of no row, of some or of all: one branch, with collectives."""
    method = RefreshKV(budget=6, indexed=indexed)
    assert decided_by_floats(method, step=1) == []
    assert decided_by_floats(method, step=5) == [False]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"stride": "0"}, "stride must be at least 1, got 0"),
        ({"qc_stride": "-2"}, "qc_stride must be at least 1, got -2"),
        ({"budget": "0"}, "budget must be at least 1, got 0"),
        ({"ratio": "0"}, "ratio must be above 0 and at most 1, got 0.0"),
        ({"ratio": "1.5"}, "ratio must be above 0 and at most 1, got 1.5"),
        ({"threshold": "1.1"}, "threshold is a cosine from -1 to 1, got 1.1"),
        ({"threshold": "nan"}, "threshold is a cosine from -1 to 1, got nan"),
        ({"kernel": "2"}, "kernel must be odd and at least 1, got 2"),
        ({"indexed": "true", "evict_on_push": "false"}, "indexed=true gathers a fixed number"),
        ({"ablation": "no_full", "force_self": "false"}, "ablation=no_full reads the new partial"),
    ],
    ids=str,
)
def test_bad_settings_are_refused(settings, said):
    with pytest.raises(ConfigError) as error:
        make_method("refreshkv", settings)
    assert str(error.value).startswith(f"refreshkv: {said}")
    assert "\n" not in str(error.value)


def test_a_sliding_window_is_refused():
    with pytest.raises(ConfigError, match=r"refreshkv: .* sliding window of 16 tokens"):
        RefreshKV().validate(tiny_config(windows=(None, 16)))
