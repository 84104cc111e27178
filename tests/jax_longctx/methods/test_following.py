"""Pairs of methods: what stays, and what a step reads of it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_longctx.engine.capacity import footprint
from jax_longctx.engine.context_io import load_context, method_of, save_context
from jax_longctx.engine.running import Ask, RunningBatch
from jax_longctx.engine.setup import Setup
from jax_longctx.errors import ConfigError, InputError
from jax_longctx.evaluation.specs import Spec
from jax_longctx.methods import describe, make_method, settings_of
from jax_longctx.sharding import make_mesh
from tests.jax_longctx.methods.harness import answer_logits, with_caches
from tests.support import joined, random_rows, tiny_config, tiny_engine

ROWS = [random_rows(lengths, seed=seed) for seed, lengths in enumerate([[60, 31], [5, 3], [6, 6]])]
CONTEXTS, QUESTIONS, _ = ROWS
OTHERS = random_rows([4, 6], seed=7)
# All that evict, with room for all tokens, and for some.
FIRSTS = {
    "snapkv": ("window=4,budget=400", "window=4,budget=40"),
    "h2o": ("budget=100,chunk=100", "budget=40,chunk=8"),
    "streaming-llm": ("budget=100,chunk=16", "budget=40,chunk=8"),
    "citrus": ("budget=100,chunk=16", "budget=40,chunk=8"),
    "knorm": ("budget=100", "ratio=0.62"),
    "expected-attention": ("budget=100", "budget=40"),
    "kvzip": ("budget=100,chunk=32", "budget=40,chunk=32"),
}
# All that select, with little to read, and with all.
SECONDS = {
    "quest": ("budget=16,page_size=4,local=8,skip_layers=1", "budget=400"),
    "arkvale": ("budget=16,page_size=4,local=8", "budget=400"),
    "ideal-topk": ("budget=16,local=8", "budget=400"),
    "resa": ("budget=16,page_size=4,local=8", "budget=400"),
    "refreshkv": ("budget=12,qc_stride=2", "budget=400"),
    "full": ("", ""),
}
PAIRS = [("snapkv", second) for second in SECONDS] + [(first, "quest") for first in FIRSTS][1:]
PAIRS += [("knorm", "resa"), ("knorm", "refreshkv")]
SECOND = "quest:budget=16,page_size=4,local=8"
PAIR = f"snapkv:window=4,budget=40 > {SECOND}"


@functools.cache
def engine_of(name, mesh=(1, 1, 1), **options):
    return tiny_engine(make_method(name), mesh=make_mesh(*mesh), chunk=16, **options)


@functools.cache
def logits(name, *mesh, **options):
    return answer_logits(engine_of(name, mesh or (1, 1, 1), **options), ROWS)


def pair(first, second, *, all_stay, all_read):
    return f"{first}:{FIRSTS[first][not all_stay]} > {second}:{SECONDS[second][all_read]}"


@pytest.mark.slow
@pytest.mark.quick("snapkv-quest")
@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_a_first_that_keeps_all_leaves_the_second_alone(first, second):
    both = logits(pair(first, second, all_stay=True, all_read=False))
    np.testing.assert_allclose(both, logits(f"{second}:{SECONDS[second][0]}"), atol=1e-4)
    if second != "full":
        assert np.abs(both - logits("full")).max() > 0.01


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_a_second_that_reads_all_leaves_what_the_first_keeps(first, second):
    both = logits(pair(first, second, all_stay=False, all_read=True))
    # Nothing leaves while answering, where the first alone would evict in each step.
    same = slice(1) if first in ("h2o", "streaming-llm") else slice(None)
    alone = logits(f"{first}:{FIRSTS[first][1]}")
    np.testing.assert_allclose(both[:, same], alone[:, same], atol=1e-4)
    assert np.abs(both - logits("full")).max() > 0.01


RAW = {
    "infllm": "n_init=4,n_local={},block_size=8,topk=2,repr_topk=8,chunk=16",
    "reattention": "global_size=4,local_size={},span=4,count=2,kept=4,chunk=16",
    "free-pages": "sink=4,local={},span=12,budget=24,page_size=8,count=1,chunk=16",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "second"),
    [*(("knorm", second) for second in RAW), ("expected-attention", "infllm")],
)
def test_keys_are_turned_back_for_a_second_that_rotates_them_itself(name, second):
    small, whole = (f"{second}:{RAW[second].format(local)}" for local in (16, 80))
    both = logits(f"{name}:budget=100 > {whole}")
    np.testing.assert_allclose(both, logits("full"), atol=1e-4)
    # Nothing in the first layer's cache depends on what the text's tokens attended.
    first, alone = (
        jax.tree.leaves(with_caches(engine_of(name, by_layer=True), ROWS)[1][0])
        for name in (f"{name}:budget=100 > {small}", small)
    )
    for mine, theirs in zip(first, alone, strict=True):
        if mine.ndim != 4:
            continue
        # Keys and values of a row's 60 tokens, or what is known of its first whole units.
        held = 60 if mine.shape[2] > 64 else 5
        np.testing.assert_allclose(mine[0, :, :held], theirs[0, :, :held], atol=1e-5)
    name = f"expected-attention:budget=40 > {small}"
    np.testing.assert_allclose(logits(name, 2, 2, 2), logits(name), atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(1, 2, 1), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("names", ["snapkv quest", "snapkv refreshkv", "knorm resa"])
def test_a_mesh_equals_one_device(names, mesh):
    name = pair(*names.split(), all_stay=False, all_read=False)
    np.testing.assert_allclose(logits(name, *mesh), logits(name), atol=1e-4)


@pytest.mark.slow
def test_eight_bits_are_handed_over_as_they_are():
    name = pair("snapkv", "quest", all_stay=False, all_read=True)
    alone = logits(f"snapkv:{FIRSTS['snapkv'][1]}", kv="int8")
    np.testing.assert_allclose(logits(name, kv="int8"), alone, atol=1e-4)
    assert np.abs(logits(name) - alone).max() > 1e-3


def test_a_step_holds_and_reads_what_stays():
    def found(name):
        method, mesh = make_method(name), make_mesh()
        setup = Setup(tiny_config(max_position=8192), method, mesh, jnp.float32, 128)
        return footprint(setup, batch=1, context=4000, reserve=90)

    both, first = map(found, (f"snapkv:budget=1000 > {READS}", "snapkv:budget=1000"))
    slots, token = 1152, 2 * 2 * 2 * 8 * 4
    # Two bounds for 16 keys and values.
    assert both.resident == pytest.approx(slots * token * 17 / 16, rel=0.01)
    assert both.read == slots * token // 16 + (128 + 68) * token
    assert first.kept < both.kept < 1.01 * first.kept


READS = "quest:budget=128,granularity=kv_head"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        PAIR,
        f"knorm:budget=40 > {SECOND}",
        f"h2o:budget=40,chunk=8 > {SECOND}",
        f"kvzip:budget=40,chunk=32 > {SECOND}",
        f"expected-attention:budget=40 > infllm:{RAW['infllm'].format(16)}",
        "snapkv:window=4,budget=40 > resa:budget=16,page_size=4,local=8",
        # Heads of numbers of their own, under one method.
        "snapkv:window=4,budget=40,over_heads=ada",
        "keydiff:budget=40,over_heads=critical",
        "duo-attention:heads=10/01,sink=4,recent=16",
    ],
)
def test_questions_of_a_saved_context_and_of_a_running_batch(tmp_path, name):
    engine = engine_of(name, kv="int8")
    context = engine.prefill(CONTEXTS, reserve=16)

    def ask(context, questions, tokens=12):
        return joined(engine.stream(context, questions, max_tokens=tokens))

    first, between = ask(context, QUESTIONS), ask(context, OTHERS)
    assert first != between
    save_context(engine, context, tmp_path / "context")
    assert method_of(tmp_path / "context") == engine.method
    loaded = load_context(engine, tmp_path / "context")
    for each in (context, loaded):
        assert ask(each, QUESTIONS) == first
    # An answer beyond the reserve: the context's caches grow.
    assert [row[:12] for row in ask(loaded, QUESTIONS, 150)] == first
    batch = RunningBatch(engine, places=2, slots=300, reserve=32)
    asks = [Ask(question, max_tokens=12) for question in QUESTIONS]
    begun = [batch.join(context, each, row) for row, each in enumerate(asks)]
    rows = {place: [chosen.token] for place, chosen in begun}
    while batch.running:
        for place, chosen in batch.step().items():
            rows[place] += [each.token for each in chosen]
    assert [rows[place] for place, _ in begun] == first


def test_names_and_settings_are_read_and_written():
    made = make_method(PAIR)
    assert (made.first.budget, made.second.page_size, made.name) == (40, 4, "snapkv > quest")
    described = settings_of(made)
    assert described["name"] == "snapkv > quest"
    assert described["settings"]["second.page_size"] == 4
    assert make_method(**described) == made
    assert make_method("snapkv>quest", {"first.budget": "40"}).first.budget == 40
    spec = Spec.parse("snapkv:budget=L/4,window=4 > quest")
    assert spec.label == "snapkv budget=L/4 window=4 > quest"
    assert spec.at(400) == {"first.budget": "100", "first.window": "4"}
    about = describe("snapkv > quest")
    assert about["settings"]["second.page_size"] == {"type": "int", "default": 16}
    assert (about["answers_apart"], about["keeps_all"], about["phase"]) == (True, False, "decode")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("full > quest", "full evicts nothing, so that nothing can follow it; take quest alone"),
        (
            "r-kv > quest",
            "nothing can follow r-kv: with an interval it drops tokens during answers",
        ),
        ("snapkv > h2o", "h2o cannot follow another method: it chooses, or changes"),
        ("snapkv > infllm:decode=dense", "infllm cannot follow another method: decode=dense"),
        ("knorm > free-pages:lam=1", "free-pages cannot follow another method: lam above 0"),
        ("snapkv > qest", "unknown method 'qest'"),
        ("snapkv > quest:budgt=3", "method 'quest' has no setting 'budgt'"),
        ("snapkv > quest > quest", "names 3 methods; one method may follow another one"),
    ],
)
def test_what_cannot_follow_is_refused_by_name(name, said):
    with pytest.raises((ConfigError, InputError), match=said):
        make_method(name)


def test_a_setting_belongs_to_one_of_the_two():
    with pytest.raises(ConfigError, match=r"no setting 'budget'; those of its two methods are"):
        make_method("snapkv > quest", {"budget": 3})
    with pytest.raises(InputError, match=r"setting first\.budget of snapkv > quest is given twice"):
        make_method("snapkv:budget=40 > quest", {"first.budget": "50"})
    with pytest.raises(ConfigError, match="citrus: budget 1024"):
        engine_of("citrus > quest")
    with pytest.raises(
        ConfigError, match="offloaded: snapkv chooses what stays by keys and values"
    ):
        engine_of("snapkv > quest", offload="host")
