"""RefreshKV against numpy and what it must equal: full attention, SnapKV, itself; its programs.

One context is read once; every variant decodes the same tokens from it. One layer is enough where
layers and mesh are not at stake.
"""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_longctx.contract import Feed, decode_segment
from jax_longctx.engine.allocate import cache_shapes
from jax_longctx.engine.capacity import grow
from jax_longctx.engine.runs import per_layer
from jax_longctx.engine.setup import Setup
from jax_longctx.methods.refreshkv import RefreshKV
from jax_longctx.sharding import make_mesh
from research.refreshkv_ablated import RefreshKVAblated
from tests.jax_longctx.engine.lowering import cache_bytes, compile_decode, no_persistent_cache
from tests.jax_longctx.methods import test_snapkv
from tests.jax_longctx.methods.branches import decided_by_floats
from tests.jax_longctx.methods.harness import (
    FedRows,
    full_logits,
    last_logits,
    oracle_params,
    steps,
    under,
)
from tests.jax_longctx.methods.oracles.partial_cache import PartialDecoder
from tests.support import random_rows, tiny_config, tiny_engine

# With the questions: above the budget, below it, above it; one question ends a segment later.
CONTEXTS = random_rows([37, 1, 10, 20])
QUESTIONS = random_rows([3, 2, 18, 1], seed=1)
ANSWERS = random_rows([9, 9, 9, 9], seed=2)
PROMPTS = [[*context, *question] for context, question in zip(CONTEXTS, QUESTIONS, strict=True)]
RESERVE, NEVER = 32, 1000
ONE = (1, 1, 1)
METHOD = RefreshKV(budget=6, kernel=3, schedule="fixed", stride=3)
also = functools.partial(pytest.param, marks=pytest.mark.slow)
ADAPTIVE = {"schedule": "adaptive", "qc_stride": 2, "threshold": 0.5}


def in_order(cache, method):
    """Each row's and head's tokens that the step could read, the first to leave first."""
    order, size = cache.partial, cache.partial.chosen.shape[2] + 1
    limits = order.count + 1 if method.budget is None else size
    return test_snapkv.in_order(order, limits, size)


def leaving(method, step):
    """How many tokens may still leave a list before it is made anew; None: all of them."""
    never = method.schedule != "fixed" or ablation_of(method) == "no_refresh"
    return None if never else method.stride - step % method.stride


def ablation_of(method):
    return getattr(method, "ablation", "none")


def partly(lists, ordered):
    return [(ids[:ordered], sorted(ids)) for ids in lists]


@functools.cache
def engine_of(mesh=ONE):
    config = tiny_config(num_layers=1 if mesh == ONE else 2)
    # The loop keeps the caches of several layers as one.
    by_layer = True if mesh != ONE else None
    return tiny_engine(METHOD, mesh=make_mesh(*mesh), config=config, chunk=16, by_layer=by_layer)


@functools.cache
def oracle_model(mesh=ONE):
    return engine_of(mesh).config, oracle_params(engine_of(mesh))


@functools.cache
def read_context(mesh, slots):
    """Every layer's cache at the end of the context: the same for every variant."""
    run = FedRows.of(engine_of(mesh), CONTEXTS, RESERVE, slots)
    for _ in run.read(CONTEXTS):
        pass
    return jax.device_get(run.caches)


@dataclasses.dataclass(frozen=True)
class Seen:
    """After one token: logits `[B, V]`, and for each layer, row and kv head the list in order."""

    logits: np.ndarray
    lists: list[list[list[list[int]]]]
    caches: tuple


def resized(cache, method):
    """The context's cache with an empty partial one of the method's own kind and size."""
    size = method.budget or math.ceil(method.ratio * cache.store.k.shape[2])
    chosen = np.full((*cache.partial.chosen.shape[:2], size), -1, np.int32)
    partial = dataclasses.replace(cache.partial, chosen=chosen)
    return dataclasses.replace(cache, partial=partial)


def varied(changes):
    kind = RefreshKVAblated if "ablation" in changes else RefreshKV
    return kind(**{**vars(METHOD), **changes})


@functools.cache
def decode(mesh=ONE, slots=128, **changes):
    """The question, and every answer token, under a variant of `METHOD`."""
    method = varied(changes)
    caches = tuple(resized(cache, method) for cache in read_context(mesh, slots))
    # Where a variant only decodes in another way, the question's program is shared.
    chooses = {"over_group", "kernel", "budget", "ratio", "schedule", "ablation", "stride"}
    asking = {name: value for name, value in changes.items() if name in chooses}
    asking = under(engine_of(mesh), varied(asking))
    run = FedRows(asking, slots, RESERVE, jnp.array([len(row) for row in CONTEXTS]), caches)
    for _ in run.answer(QUESTIONS, ()):
        pass
    run.engine = under(engine_of(mesh), method)
    return [
        Seen(
            last_logits(step),
            [in_order(cache, method) for cache in step.caches],
            jax.device_get(step.caches),
        )
        for step in run.tokens(ANSWERS)
    ]


@functools.cache
def full_attention():
    """Logits `[9, B, V]` of the answers' tokens under full attention."""
    rows = full_logits(engine_of(), (CONTEXTS, QUESTIONS, ANSWERS))
    return np.stack([logits[-9:] for logits in rows], 1)


def logits_of(seen):
    return np.stack([step.logits for step in seen])


def compare(seen, method, mesh=ONE):
    """Logits, lists and full steps of every row with numpy's, which runs each row alone."""

    def is_full(step, cosine):
        if method.schedule == "fixed":
            return step % method.stride == 0
        return step % method.qc_stride == 0 and cosine <= method.threshold

    for row, prompt in enumerate(PROMPTS):
        budget = method.budget or max(int(method.ratio * len(prompt)), 1)
        expected = PartialDecoder(
            *oracle_model(mesh),
            prompt,
            budget=budget,
            kernel=method.kernel,
            kind="max",
            over=method.over_group,
        )
        for column, step in enumerate(seen):
            before = list(expected.full_steps)
            logits = expected.step(ANSWERS[row][column], is_full, ablation_of(method))
            np.testing.assert_allclose(step.logits[row], logits, atol=1e-4)
            for layer, cache in enumerate(step.caches):
                lists = step.lists[layer][row]
                if before[layer] == expected.full_steps[layer]:
                    assert [sorted(ids) for ids in lists] == expected.read[layer]
                kept = [ids[-budget:] for ids in lists]
                leave = leaving(method, column + 1)
                assert partly(kept, leave) == partly(expected.lists[layer], leave)
                assert cache.full_steps[row] == expected.full_steps[layer]
                assert cache.steps[row] == column + 1


@pytest.mark.parametrize(
    "changes",
    [
        {},
        ADAPTIVE,
        {"ablation": "no_full"},
        {"budget": None, "ratio": 0.2},
        *(
            pytest.param(changes, marks=pytest.mark.thorough)
            for changes in ({"over_group": "mean"}, {"ablation": "no_refresh"})
        ),
    ],
    ids=str,
)
@pytest.mark.quick("{}", "adaptive")
def test_ragged_rows_equal_numpy_row_by_row(changes):
    """Also X21 (the prompt in chunks) and X22: each row is compared with numpy's, alone.

    A ratio is of the row's own prompt: 8, 1, 5 and 4 tokens.
    """
    compare(decode(**changes), varied(changes))


@pytest.mark.thorough
def test_a_ratio_is_of_the_prompt_whatever_the_capacity():
    seen = decode(slots=384, **(ratio := {"budget": None, "ratio": 0.2}))
    assert seen[0].caches[0].partial.chosen.shape[2] == 77
    compare(seen, dataclasses.replace(METHOD, **ratio))


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param((2, 2, 2), marks=pytest.mark.slow),
        pytest.param((1, 4, 1), marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_a_mesh_equals_numpy(mesh):
    changes = ADAPTIVE
    compare(decode(mesh, **changes), varied(changes), mesh)


def test_a_row_that_has_stopped_is_left_alone():
    engine, (old,) = engine_of(), decode()[-1].caches
    tokens, valid = (np.array(x, np.int32)[:, None] for x in ([1, 2, 3, 4], [1, 0, 1, 0]))
    run = FedRows(engine, 128, RESERVE, jnp.array([len(row) for row in CONTEXTS]), (old,))
    for step in (10, 11, 12):
        variant = METHOD.step_variant(step)
        (_,) = run.feed([decode_segment(tokens, valid, np.zeros(4, bool), variant)])
    (new,) = jax.device_get(run.caches)
    assert new.steps.tolist() == [12, 9, 12, 9] and new.full_steps.tolist() == [4, 3, 4, 3]
    lists, stopped = in_order(new, METHOD), in_order(old, METHOD)
    for row in range(4):
        assert (lists[row] == stopped[row]) == (row % 2 == 1)
        assert (new.query[row] == old.query[row]).all() == (row % 2 == 1)
    for name in "kv":
        held = [getattr(cache.partial, name)[1::2, :, : METHOD.budget] for cache in (old, new)]
        np.testing.assert_array_equal(*held)


def test_only_segments_in_which_a_question_ends_choose():
    variants = [s.variant for s in METHOD.segments(Feed("question", 16, question=[[1] * 40]))]
    assert variants == ["", "", "ends"]
    assert {s.variant for s in METHOD.segments(Feed("context", 16, context=[[1] * 40]))} == {""}


@pytest.mark.parametrize("changes", [{}, also({"ablation": "no_refresh"})], ids=str)
def test_rk_1_rk_5_x13_a_full_step_each_token_is_full_attention(changes):
    seen = decode(stride=1, **changes)
    np.testing.assert_allclose(logits_of(seen), full_attention(), atol=1e-4)


@pytest.mark.parametrize("changes", [ADAPTIVE, also({"ablation": "no_full"})], ids=str)
def test_rk_2_a_budget_that_holds_all_is_full_attention(changes):
    """X1, whatever the schedule."""
    seen = decode(budget=60, **changes)
    np.testing.assert_allclose(logits_of(seen), full_attention(), atol=1e-4)
    assert (logits_of(decode()) != full_attention()).any()


def test_rk_3_x14_a_threshold_of_1_is_a_fixed_schedule():
    seen = decode(schedule="adaptive", qc_stride=3, threshold=1.0)
    np.testing.assert_allclose(logits_of(seen), logits_of(decode()), atol=1e-5)

    # One layer; where the schedule is known, tokens that cannot leave are in no order.
    lists, same = ([partly(r, 0) for s in x for r in s.lists[0]] for x in (seen, decode()))
    assert lists == same
    (cache,) = seen[-1].caches
    np.testing.assert_array_equal(cache.steps, 3 * np.asarray(cache.full_steps))


def test_rk_4_x11_x12_without_full_steps_the_first_choice_stays():
    seen = decode(stride=NEVER)
    compare(seen, dataclasses.replace(METHOD, stride=NEVER))
    (cache,) = seen[-1].caches
    assert np.all(cache.steps) and not np.any(cache.full_steps)


def test_rk_8_a_lazy_merge_is_the_same_until_tokens_have_left():
    """Tokens that wait for a full step are the list's last, until there are more than it holds."""
    for seen, stride in [(decode(), 3), (decode(stride=NEVER), NEVER)]:
        for column, step in enumerate(seen):
            waiting = (column + 1) % stride
            for layer in step.lists:
                for prompt, heads in zip(PROMPTS, layer, strict=True):
                    newest = len(prompt) + column
                    lazy = list(range(newest - waiting + 1, newest + 1))
                    held = [ids[-METHOD.budget :][-waiting or len(ids) :] for ids in heads]
                    assert all((ids == lazy) == (waiting <= METHOD.budget) for ids in held)


def test_rk_9_the_partial_cache_holds_keys_of_the_full_one():
    for cache in decode()[-1].caches:
        assert cache.partial.k is not None
        tokens = np.asarray(cache.partial.tokens(METHOD.budget + 1, METHOD.budget + 1))[..., None]
        gathered = np.take_along_axis(cache.store.k, np.maximum(tokens, 0), axis=2)
        held = cache.partial.k[:, :, : METHOD.budget + 1]
        np.testing.assert_array_equal(np.where(tokens < 0, held, gathered), held)


@pytest.mark.slow
def test_an_answer_takes_the_steps_that_the_schedule_names():
    engine = tiny_engine(dataclasses.replace(METHOD, stride=4), chunk=16)
    context = engine.prefill(CONTEXTS, reserve=32)
    answers = [[] for _ in CONTEXTS]
    for block in engine.stream(context, QUESTIONS, max_tokens=15):
        for row, new in zip(answers, block, strict=True):
            row.extend(new)
    single = list(steps(engine, CONTEXTS, QUESTIONS, [row[:-1] for row in answers]))[-14:]
    for column, step in enumerate(single, start=1):
        chosen = last_logits(step).argmax(axis=1)
        assert chosen.tolist() == [row[column] for row in answers]
    (cache, *_) = per_layer(context.caches)
    assert cache.full_steps.tolist() == [3] * 4 and cache.steps.tolist() == [14] * 4


SLOTS = 16384


def of_many_slots(method, *steps):
    """A decode program, which copies no cache."""
    config = tiny_config(num_layers=1, num_heads=8, num_kv_heads=2, head_dim=64)
    setup = Setup(config, method, make_mesh(), jnp.dtype(jnp.float32), 512)
    with no_persistent_cache():
        compiled = compile_decode(setup, 2, SLOTS, *steps)
    memory, full = compiled.memory_analysis(), 2 * 2 * 2 * SLOTS * 64 * 4
    assert cache_bytes(setup, 2, SLOTS) > full
    assert memory.alias_size_in_bytes > full
    # A layer's logits and scores of 8 heads: a sixteenth of keys and values each 4 arrays.
    assert memory.temp_size_in_bytes < full / 8
    return compiled


@pytest.mark.parametrize(
    ("step", "check"),
    [
        pytest.param(1, False, id="partial"),
        pytest.param(5, True, id="checked", marks=pytest.mark.slow),
    ],
)
def test_a_partial_step_neither_reads_nor_copies_the_full_cache(step, check):
    """Read from the decode program: matmuls over all slots stand in the loop of a check alone."""
    text = of_many_slots(RefreshKV(budget=512), step).as_text()
    reads = re.findall(rf"^.* dot\(.*{SLOTS}.*$|^.*{SLOTS}.* dot\(.*$", text, re.MULTILINE)
    assert bool(reads) == check
    assert all("/attention/while/body/" in line for line in reads)
    assert "conditional(" not in text


def test_a_full_step_by_schedule_has_no_branch():
    """What a branch may change is copied on a GPU, and its predicate waited for."""
    method = RefreshKV(budget=6, schedule="fixed", stride=3)
    setup = Setup(tiny_config(num_layers=1), method, make_mesh(), jnp.dtype("float32"), 16)
    for step in (1, 3):
        text = compile_decode(setup, 2, 256, step).as_text()
        assert "while(" in text and "conditional(" not in text


@pytest.mark.slow
def test_one_program_of_both_kinds_of_steps_copies_no_cache():
    """A loop for each kind within one: neither carries copies of what the other changes."""
    text = of_many_slots(RefreshKV(budget=512, schedule="fixed", stride=3), 1, 3).as_text()
    assert text.count(" while(") >= 3 and "conditional(" not in text


def test_without_a_budget_there_is_room_for_a_share_of_any_prompt():
    (shape,) = cache_shapes(engine_of().setup, 2, 256, 16)
    for settings, size in [({}, 32), ({"ratio": 0.3}, 77), ({"ratio": 1e-3}, 1)]:
        cache = jax.eval_shape(functools.partial(RefreshKV(**settings).init_cache, shape))
        assert cache.partial.chosen.shape[2] == size
    method = RefreshKV(ratio=0.3)
    cache = method.init_cache(shape)
    token = 2 * 2 * 2 * 8 * 4
    assert method.read_bytes(cache, 100) == token * 31 + token * 256 // 5


@pytest.mark.parametrize(
    ("settings", "shapes"),
    [({"budget": 6}, (6, 128)), ({"ratio": 0.3}, (77 + 128, 128 + 128))],
    ids=str,
)
def test_a_partial_cache_grows_with_what_it_holds(settings, shapes):
    (shape,) = cache_shapes(engine_of().setup, 2, 256, 16)
    cache = jax.eval_shape(lambda: grow((RefreshKV(**settings).init_cache(shape),), 256)[0])
    assert (cache.partial.chosen.shape[2], cache.partial.k.shape[2]) == shapes
    assert cache.store.k.shape[2] == 512


def test_shards_agree_on_a_full_step():
    method = RefreshKV(budget=6)
    assert decided_by_floats(method, step=1) == []
    assert decided_by_floats(method, step=5) == [False]
