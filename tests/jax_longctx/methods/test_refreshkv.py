"""RefreshKV against numpy and against what it must equal: full attention, SnapKV, itself.

One context is read once; every variant decodes the same tokens from it. One layer is enough where
layers and mesh are not at stake.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_longctx.contract import Prompt, decode_segment
from jax_longctx.engine import programs
from jax_longctx.engine.context_io import load_context, save_context
from jax_longctx.methods.refreshkv import RefreshKV
from jax_longctx.methods.snapkv import SnapKV
from jax_longctx.sharding import make_mesh
from tests.jax_longctx.methods.harness import last_logits, steps
from tests.jax_longctx.methods.leaving import in_order, leaving, partly
from tests.jax_longctx.methods.oracles.partial_cache import PartialDecoder, masked_forward
from tests.oracle import causal_attend, forward, to_numpy
from tests.support import joined, random_rows, tiny_config, tiny_engine

# With the questions: above the budget, below it, above it; one question ends a segment later.
CONTEXTS = random_rows([37, 1, 10, 20])
QUESTIONS = random_rows([3, 2, 18, 1], seed=1)
ANSWERS = random_rows([9, 9, 9, 9], seed=2)
PROMPTS = [[*context, *question] for context, question in zip(CONTEXTS, QUESTIONS, strict=True)]
TOTAL = jnp.array([len(row) for row in CONTEXTS], jnp.int32)
RESERVE, NEVER = 32, 1000
ONE = (1, 1, 1)
METHOD = RefreshKV(budget=6, kernel=3, schedule="fixed", stride=3)
also = functools.partial(pytest.param, marks=pytest.mark.slow)
ADAPTIVE = {"schedule": "adaptive", "qc_stride": 2, "threshold": 0.5}


def layers_of(mesh):
    return 1 if mesh == ONE else 2


@functools.cache
def engine_of(mesh=ONE):
    config = tiny_config(num_layers=layers_of(mesh))
    # The loop keeps the caches of several layers as one.
    by_layer = True if mesh != ONE else None
    return tiny_engine(METHOD, mesh=make_mesh(*mesh), config=config, chunk=16, by_layer=by_layer)


@functools.cache
def oracle_model(mesh=ONE):
    engine = engine_of(mesh)
    return engine.config, to_numpy(jax.device_get(engine.params))


@functools.cache
def read_context(mesh, slots):
    """Every layer's cache at the end of the context: the same for every variant."""
    engine = engine_of(mesh)
    caches = programs.init_caches(engine.setup, 4, slots, RESERVE)
    for segment in METHOD.segments(Prompt("context", 16, CONTEXTS)):
        caches, _ = programs.run_segment(
            engine.setup, engine.params, caches, segment, TOTAL, None, "none"
        )
    return jax.device_get(caches)


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
    buffers = dict.fromkeys("kv") if method.indexed else {}
    partial = dataclasses.replace(cache.partial, chosen=chosen, **buffers)
    return dataclasses.replace(cache, partial=partial)


@functools.cache
def decode(mesh=ONE, slots=128, **changes):
    """The question, and every answer token, under a variant of `METHOD`."""
    engine = engine_of(mesh)
    method = dataclasses.replace(METHOD, **changes)
    setup = dataclasses.replace(engine.setup, method=method)
    caches = tuple(resized(cache, method) for cache in read_context(mesh, slots))
    # Where a variant only decodes in another way, the question's program is shared.
    chooses = {"over_group", "force_self", "kernel", "budget", "ratio", "indexed", "qc_space"}
    chooses |= {"schedule", "ablation", "stride", "evict_on_push"}
    asking = {name: value for name, value in changes.items() if name in chooses}
    asking = dataclasses.replace(engine.setup, method=dataclasses.replace(METHOD, **asking))
    for segment in method.segments(Prompt("question", 16, question=QUESTIONS)):
        caches, _ = programs.run_segment(
            asking, engine.params, caches, segment, TOTAL, None, "none"
        )
    seen = []
    for step, column in enumerate(zip(*ANSWERS, strict=True), start=1):
        caches, logits = answer(setup, engine, caches, column, step)
        lists = [in_order(cache, method) for cache in caches]
        seen.append(Seen(logits, lists, jax.device_get(caches)))
    return seen


def answer(setup, engine, caches, tokens, step, valid=(1, 1, 1, 1)):
    """The answer's token of that number of each row; caches and logits `[B, V]`."""
    tokens, valid = (np.array(x, np.int32)[:, None] for x in (tokens, valid))
    segment = decode_segment(tokens, valid, np.zeros(4, bool), setup.method.step_variant(step))
    caches, logits = programs.run_segment(setup, engine.params, caches, segment, TOTAL, None, "all")
    return caches, np.asarray(logits)[:, 0]


@functools.cache
def full_attention():
    """Logits `[9, B, V]` of the answers' tokens under full attention."""
    rows = [
        forward(*oracle_model(), prompt + answer, causal_attend(1e4))[-9:]
        for prompt, answer in zip(PROMPTS, ANSWERS, strict=True)
    ]
    return np.stack(rows, 1)


def logits_of(seen):
    return np.stack([step.logits for step in seen])


def compare(seen, method, mesh=ONE):
    """Logits, lists and full steps of every row with numpy's, which runs each row alone."""

    def is_full(step, cosines):
        if method.schedule == "fixed":
            return step % method.stride == 0
        return step % method.qc_stride == 0 and cosines[method.qc_space] <= method.threshold

    for row, prompt in enumerate(PROMPTS):
        budget = method.budget or max(int(method.ratio * len(prompt)), 1)
        expected = PartialDecoder(
            *oracle_model(mesh),
            prompt,
            evict=method.evict_on_push,
            forced=1 if method.force_self else 0,
            budget=budget,
            kernel=method.kernel,
            kind="max",
            over=method.over_group,
        )
        for column, step in enumerate(seen):
            before = list(expected.full_steps)
            logits = expected.step(ANSWERS[row][column], is_full, method.ablation)
            np.testing.assert_allclose(step.logits[row], logits, atol=1e-4)
            for layer, cache in enumerate(step.caches):
                lists = step.lists[layer][row]
                if before[layer] == expected.full_steps[layer]:
                    assert [sorted(ids) for ids in lists] == expected.read[layer]
                kept = [ids[-budget:] if method.evict_on_push else ids for ids in lists]
                leave = leaving(method, column + 1)
                assert partly(kept, leave) == partly(expected.lists[layer], leave)
                assert cache.full_steps[row] == expected.full_steps[layer]
                assert cache.steps[row] == column + 1


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {**ADAPTIVE, "qc_space": "pre_rope"},
        {"ablation": "no_full"},
        {"budget": None, "ratio": 0.2, "indexed": True},
        *(
            pytest.param(changes, marks=pytest.mark.thorough)
            for changes in (
                ADAPTIVE,
                {"force_self": False, "over_group": "mean"},
                {"ablation": "no_refresh"},
                {"budget": None, "ratio": 0.2},
            )
        ),
    ],
    ids=str,
)
@pytest.mark.quick("{}", "adaptive")
def test_ragged_rows_equal_numpy_row_by_row(changes):
    """Also X21 (the prompt in chunks) and X22: each row is compared with numpy's, alone.

    A ratio is of the row's own prompt: 8, 1, 5 and 4 tokens.
    """
    compare(decode(**changes), dataclasses.replace(METHOD, **changes))


@pytest.mark.thorough
def test_questions_in_turn_and_from_disk(tmp_path):
    """A, B, A; and a question and answer longer than the context's reserve (the caches grow)."""
    method = dataclasses.replace(METHOD, **ADAPTIVE)
    engine = tiny_engine(method, config=engine_of().config, chunk=16)
    others = random_rows([5, 4, 1, 3], seed=3)

    def ask(context, questions):
        return joined(engine.stream(context, questions, max_tokens=8))

    context = engine.prefill(CONTEXTS, reserve=RESERVE)
    save_context(engine, context, tmp_path / "saved")
    first, second = ask(context, QUESTIONS), ask(context, others)
    assert first != second
    assert ask(context, QUESTIONS) == first
    # The last question's steps; the first token of an answer is the question's.
    assert [cache.steps.tolist() for cache in context.usable_caches()] == [[7] * 4]
    assert ask(load_context(engine, tmp_path / "saved"), others) == second
    assert ask(engine.prefill(CONTEXTS, reserve=2), QUESTIONS) == first


@pytest.mark.thorough
def test_a_ratio_is_of_the_prompt_whatever_the_capacity():
    """Thrice the slots make a longer list, of which a row fills what its prompt says."""
    seen = decode(slots=384, **(ratio := {"budget": None, "ratio": 0.2}))
    assert seen[0].caches[0].partial.chosen.shape[2] == 77
    compare(seen, dataclasses.replace(METHOD, **ratio))
    assert [step.lists for step in seen] == [step.lists for step in decode(**ratio)]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("mesh", "changes"), [((2, 2, 2), {}), ((1, 4, 1), {"indexed": True})], ids=str
)
def test_a_mesh_equals_numpy(mesh, changes):
    changes = {**ADAPTIVE, **changes}
    compare(decode(mesh, **changes), dataclasses.replace(METHOD, **changes), mesh)


@pytest.mark.slow
def test_layers_and_rows_decide_alone():
    """What makes the comparison above one of rows and layers that differ."""
    full = np.stack([cache.full_steps for cache in decode((2, 2, 2), **ADAPTIVE)[-1].caches])
    assert 0 < full.sum() < full.size * 4
    assert (full[0] != full[1]).any() and len(set(full[0])) > 1
    spaces = [decode(**ADAPTIVE), decode(**ADAPTIVE, qc_space="pre_rope")]
    assert np.ptp([seen[-1].caches[0].full_steps for seen in spaces], axis=0).any()


def test_a_row_that_has_stopped_is_left_alone():
    """Also where its last step was one that the schedule makes full."""
    engine, before = engine_of(), decode()[-1]
    caches = before.caches
    for step in (10, 11, 12):
        caches, _ = answer(engine.setup, engine, caches, [1, 2, 3, 4], step, [1, 0, 1, 0])
    (old,), (new,) = before.caches, jax.device_get(caches)
    assert new.steps.tolist() == [12, 9, 12, 9] and new.full_steps.tolist() == [4, 3, 4, 3]
    lists, stopped = in_order(new, METHOD), in_order(old, METHOD)
    for row in range(4):
        assert (lists[row] == stopped[row]) == (row % 2 == 1)
        assert (new.query[row] == old.query[row]).all() == (row % 2 == 1)
    for name in "kv":
        held = [getattr(cache.partial, name)[1::2, :, : METHOD.budget] for cache in (old, new)]
        np.testing.assert_array_equal(*held)


def test_only_segments_in_which_a_question_ends_choose():
    variants = [s.variant for s in METHOD.segments(Prompt("question", 16, question=[[1] * 40]))]
    assert variants == ["", "", "ends"]
    assert {s.variant for s in METHOD.segments(Prompt("context", 16, context=[[1] * 40]))} == {""}


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


@pytest.mark.parametrize(("evict", "policy"), [(True, "fifo"), (False, "grow")])
@pytest.mark.quick("fifo")
def test_rk_4_x11_x12_without_full_steps_it_is_snapkv(evict, policy):
    seen = decode(stride=NEVER, evict_on_push=evict)
    compare(seen, dataclasses.replace(METHOD, stride=NEVER, evict_on_push=evict))
    (cache,) = seen[-1].caches
    assert np.all(cache.steps) and not np.any(cache.full_steps)
    engine, caches = read_prompts()
    method = dataclasses.replace(engine.method, decode_policy=policy)
    setup = dataclasses.replace(engine.setup, method=method)
    caches = programs.finish_question(setup, caches, TOTAL, reserve=RESERVE)
    for column, step in zip(zip(*ANSWERS, strict=True), seen, strict=True):
        tokens, ones = np.array(column, np.int32)[:, None], np.ones((4, 1), np.int32)
        segment = decode_segment(tokens, ones, np.zeros(4, bool), "")
        caches, logits = programs.run_segment(
            setup, engine.params, caches, segment, TOTAL, None, "all"
        )
        np.testing.assert_allclose(step.logits, np.asarray(logits)[:, 0], atol=1e-5)


@functools.cache
def read_prompts():
    """An engine of SnapKV as RefreshKV chooses, and its caches after the questions."""
    method = SnapKV(budget=6, window=1, kernel=3, over_group="max")
    engine = tiny_engine(method, config=engine_of().config, chunk=16)
    *_, last = steps(engine, CONTEXTS, QUESTIONS, reserve=RESERVE)
    return engine, last.caches


def test_rk_6_the_training_mask_is_decoding_without_eviction():
    """And RK-7: where the choice holds the prompt, the mask is causal."""
    seen = logits_of(decode(stride=NEVER, evict_on_push=False))
    for row, (prompt, answer) in enumerate(zip(PROMPTS, ANSWERS, strict=True)):
        how = {"kernel": 3, "kind": "max", "over": "max", "forced": 1}
        tokens = (*oracle_model(), prompt, answer)
        np.testing.assert_allclose(
            seen[:, row], masked_forward(*tokens, budget=6, **how), atol=1e-4
        )
        causal = masked_forward(*tokens, budget=len(prompt), **how)
        np.testing.assert_allclose(causal, full_attention()[:, row], atol=1e-9)


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


def test_rk_9_a_list_of_tokens_is_the_same_as_their_keys():
    seen = decode(indexed=True)
    np.testing.assert_allclose(logits_of(seen), logits_of(decode()), atol=1e-5)
    assert [step.lists for step in seen] == [step.lists for step in decode()]
    # The list of the newest step is what its buffers hold: keys of the full cache.
    for cache in decode()[-1].caches:
        assert cache.partial.k is not None
        tokens = np.asarray(cache.partial.tokens(METHOD.budget + 1, METHOD.budget + 1))[..., None]
        gathered = np.take_along_axis(cache.store.k, np.maximum(tokens, 0), axis=2)
        held = cache.partial.k[:, :, : METHOD.budget + 1]
        np.testing.assert_array_equal(np.where(tokens < 0, held, gathered), held)


def test_rk_10_leaving_tokens_change_the_answer():
    fifo, grow = decode(stride=NEVER), decode(stride=NEVER, evict_on_push=False)
    assert np.abs(logits_of(fifo) - logits_of(grow)).max() > 1e-3


@pytest.mark.slow
def test_an_answer_takes_the_steps_that_the_schedule_names():
    """The engine's blocks, cut where the kind of step changes, are the same steps one by one."""
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
    (cache, *_) = programs.per_layer(context.caches)
    assert cache.full_steps.tolist() == [3] * 4 and cache.steps.tolist() == [14] * 4
