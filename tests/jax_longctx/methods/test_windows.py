import copy
import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jax_longctx.caches import WindowCache
from jax_longctx.engine.allocate import _turns
from jax_longctx.engine.capacity import footprint
from jax_longctx.engine.context_io import load_context, save_context
from jax_longctx.engine.setup import Setup
from jax_longctx.methods import METHODS
from jax_longctx.parts.appending import Appending
from jax_longctx.sharding import make_mesh, numbers_of_layers
from pallas_kernels.common import Window, merge
from pallas_kernels.prefill_attention import reference
from tests.jax_longctx.methods.harness import ask_twice, check_rows, row_logits, texts
from tests.small_methods import small_method
from tests.support import joined, tiny_config, tiny_engine

WINDOW = 7
# Texts that end in and beyond the window, and in several chunks; answers that go beyond it.
ROWS = texts([(45, 4), (5, 2)], answer=12)
SOME = tiny_config(windows=(WINDOW, None))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Masked(Appending):
    """A layer with a window by its definition: every key is kept, and masked by positions."""

    def attend(self, new, cache, segment, ctx):
        after, parts = cache, []
        for group in segment.groups:
            q, k, v = (x[:, group.columns] for x in new)
            at_BT = cache.position[:, None] + jnp.arange(q.shape[1])
            q, k = ctx.rotate(q, at_BT), ctx.rotate(k, at_BT)
            seen = Window(ctx.window, cache.position)
            past = cache.k, cache.v, cache.length
            how = {"scale": ctx.scale}
            earlier = reference.cache_attention(q, *past, window=seen, **how)
            within = reference.causal_attention(q, k, v, window=ctx.window, **how)
            parts.append(merge([earlier, within]))
            if group.name == "chunk" and segment.role != "probe":
                after = cache.append(k, v, segment.valid_of(), ctx)
        return tuple(jnp.concatenate(each, axis=1) for each in zip(*parts, strict=True)), after


class MaskedSetup(Setup):
    def layer(self, index):
        layer = super().layer(index)
        return layer if layer.window is None else dataclasses.replace(layer, method=Masked())


def by_masks(engine):
    """The engine whose layers with windows keep every key."""
    other = copy.copy(engine)
    other.setup = MaskedSetup(**vars(engine.setup))
    return other


ABLE = [name for name in METHODS if small_method(name).cannot_slide is None]


@pytest.mark.parametrize("name", ABLE)
@pytest.mark.quick("full", "citrus-individual")
def test_a_window_of_its_own_is_full_attention_under_a_mask(name):
    """Chunks, ragged rows, probes, an instruction beside a chunk, and answers beyond the window."""
    engine = tiny_engine(small_method(name), config=SOME, chunk=16, by_layer=True)
    found = row_logits(engine, ROWS)
    check_rows(found, row_logits(by_masks(engine), ROWS), atol=1e-5)


def test_a_context_answers_again_and_from_a_file(tmp_path):
    """What an answer writes takes the places of the context's tokens: it has a copy of them."""
    engine = tiny_engine(config=SOME, chunk=16)
    _, *others = texts([(45, 6), (5, 3)], answer=9, seed=4)
    ask_twice(engine, tmp_path, ROWS, others)


@pytest.mark.parametrize("options", [{}, {"kv": "int8"}], ids=["floats", "int8"])
@pytest.mark.slow
def test_kinds_that_take_turns_are_one_loop(tmp_path, options):
    """Two kinds in turn and a rest, on a mesh too; a context goes from one mode to the other."""
    config = tiny_config(num_layers=5, windows=(WINDOW, None) * 2 + (20,))
    contexts, questions, _ = ROWS
    answers = {}
    for sizes in ((1, 1, 1), (2, 2, 2)):
        for by_layer in (True, False):
            how = {"mesh": make_mesh(*sizes), "by_layer": by_layer, **options}
            engine = tiny_engine(config=config, chunk=16, **how)
            context = engine.prefill(contexts, reserve=32)
            answers[sizes, by_layer] = joined(engine.stream(context, questions, max_tokens=12))
            folder = tmp_path / f"{sizes}{by_layer}"
            save_context(engine, context, folder)
            if not by_layer:
                numbers = [range(0, 4, 2), range(1, 4, 2), range(4, 5)]
                assert numbers_of_layers(context.usable_caches()) == numbers
                context = load_context(engine, tmp_path / f"{sizes}True")
                again = joined(engine.stream(context, questions, max_tokens=12))
                assert again == answers[sizes, True]
    first, *others = answers.values()
    assert all(other == first for other in others)


@pytest.mark.parametrize(
    ("kinds", "found"),
    [
        ("aaaaaaaa", (1, 8)),
        ("aabbbbbb", (1, 2)),
        ("abababab", (2, 4)),
        ("aaaaab" * 5 + "aaaa", (6, 5)),
        ("aaab" * 16, (4, 16)),
        ("abc", (1, 1)),
        ("abbb", (1, 1)),
    ],
)
def test_which_layers_are_looped_over_together(kinds, found):
    assert _turns(list(kinds)) == found


def test_what_windows_take_does_not_grow_with_the_text():
    setups = [
        tiny_engine(config=tiny_config(windows=windows)).setup
        for windows in ((None, None), (WINDOW, None))
    ]
    sizes = {"batch": 1, "reserve": 64}
    for context in (1_000, 100_000):
        full, some = (footprint(setup, context=context, **sizes) for setup in setups)
        # 128 slots, a tile, and a position.
        window = 2 * 128 * 2 * 8 * 4
        assert some.resident == full.resident // 2 + window + 4
        assert some.read == full.read // 2 + window


def test_segments_longer_than_the_window_leave_its_last_tokens():
    rng = np.random.default_rng(0)
    zeros = jnp.zeros((2, 1, 128, 4))
    cache = WindowCache(zeros, zeros, jnp.array([5, 0]))
    new = jnp.asarray(rng.normal(size=(2, 20, 1, 4)), jnp.float32)
    after = cache.append(new, new, jnp.array([18, 3]), WINDOW)
    assert after.position.tolist() == [23, 3]
    for position in range(23 - WINDOW, 23):
        found = after.k[0, 0, position % WINDOW]
        np.testing.assert_array_equal(found, new[0, position - 5, 0])
    np.testing.assert_array_equal(after.k[1, 0, :3], new[1, :3, 0])
