import contextlib
import functools
import threading
import time

import jax
import jax.monitoring
import jax.numpy as jnp
import pytest

from jax_longctx.engine.ahead import Compilation
from jax_longctx.engine.allocate import init_caches
from jax_longctx.engine.compiling import EVENTS, CompileClock, Program
from jax_longctx.engine.decode import answer_variants, decode_turns
from jax_longctx.engine.prefill import finish_context, run_segment
from jax_longctx.engine.programs import Lengths, compile_ahead, list_context
from jax_longctx.engine.running import Ask, RunningBatch
from jax_longctx.methods import METHODS, Full, make_method
from jax_longctx.models.params import (
    abstract_params,
    init_params,
    stacked_layers,
    stacking_programs,
)
from jax_longctx.run_spec import RunSpec
from jax_longctx.settings import Sampling
from jax_longctx.sharding import make_mesh
from tests.jax_longctx.engine.test_running import compilations
from tests.small_methods import KINDS, small_method
from tests.support import engine_over, joined, random_rows, tiny_config, tiny_engine

CONTEXT, QUESTION, ANSWER = [90], [5], 20
also = functools.partial(pytest.param, marks=pytest.mark.slow)
most = functools.partial(pytest.param, marks=pytest.mark.thorough)
ASKED = {"sampling", "keep"}
TRACED, *_, PROGRAM = EVENTS
REFRESH = make_method("refreshkv", {"schedule": "fixed", "stride": "3"})


@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize(
    ("name", "sizes", "options"),
    [
        ("refreshkv", (), {}),
        *(also(name, (), {}) for name in KINDS if name != "refreshkv"),
        *(most(name, (), {}) for name in METHODS if name not in KINDS),
        also(
            "full",
            (),
            {"kv": "int8", "sampling": Sampling(temperature=0.7, repetition_penalty=1.2)},
        ),
        # A context that is given up, and one that grows.
        *(also(name, (), {"keep": False, "reserve": 8}) for name in ("full", "h2o")),
        also("quest", (), {"offload": "host"}),
        *(also(name, (2, 2, 2), {}) for name in ("quest", "snapkv")),
        also("star", (1, 2, 2), {}),
        also("snapkv > quest", (), {}),
    ],
    ids=str,
)
@pytest.mark.quick("refreshkv")
def test_the_list_is_what_a_run_calls(name, by_layer, sizes, options):
    """None missing, none idle; a run that follows compiles nothing, and answers as always."""
    jax.clear_caches()
    options, asked = dict(options), {key: options[key] for key in ASKED & options.keys()}
    config, mesh, reserve = tiny_config(), make_mesh(*sizes), options.pop("reserve", None)
    how = {"chunk": 32, "by_layer": by_layer} | {k: options[k] for k in options.keys() - ASKED}
    method, rows = small_method(name), mesh.shape["data"]
    # Shapes in place of weights.
    engine = engine_over(config, abstract_params(config, RunSpec(mesh=mesh)), method, mesh, **how)
    lengths = Lengths(CONTEXT * rows, [(QUESTION[0], ANSWER)], reserve)
    compilation = compile_ahead(engine, lengths, **asked)
    compilation.wait(check=True)
    loaded = tiny_engine(method, mesh=mesh, **how)
    engine.take_params(loaded.params)
    given = (CONTEXT * rows, QUESTION * rows, ANSWER, reserve)
    with calls() as called, compilations() as compiled:
        found = answers(engine, *given, **asked)
    assert set(compilation.programs) == called and len(called) > 5
    # A transfer of JAX's own, to several devices.
    assert set(compiled) <= ({"jit(_multi_slice)"} if mesh.size > 1 else set())
    assert found == answers(loaded, *given, **asked)


@pytest.mark.parametrize(
    ("name", "by_layer", "shared"),
    [
        ("full", False, True),
        *(also(*case) for case in (("full", True, True), ("refreshkv", True, False))),
        also("snapkv", False, False),
    ],
)
def test_the_list_of_a_batch_is_what_its_rows_call(name, by_layer, shared):
    jax.clear_caches()
    config, method, how = tiny_config(), small_method(name), {"chunk": 32, "by_layer": by_layer}
    engine = engine_over(config, abstract_params(config, RunSpec()), method, make_mesh(), **how)
    lengths = Lengths(CONTEXT, [(QUESTION[0], ANSWER)])

    def batch_of(context):
        rows = {"context": context} if shared else {"slots": context.slots}
        return RunningBatch(engine, places=3, reserve=context.reserve, **rows)

    compilation = Compilation(engine.mesh)
    with compilation.listing():
        context = list_context(engine.setup, engine.params, lengths, 0)
        batch_of(context).list_programs(context, QUESTION, max_tokens=ANSWER)
    compilation.wait(check=True)
    engine.take_params(tiny_engine(method, **how).params)
    request = Ask(random_rows(QUESTION)[0], max_tokens=ANSWER)
    with calls() as called, compilations() as compiled:
        context = engine.prefill(random_rows(CONTEXT), reserve=lengths.reserved)
        batch = batch_of(context)
        batch.join(context, request)
        while batch.running:
            batch.step()
        batch.leave(batch.join(context, request)[0])
    assert set(compilation.programs) == called and len(called) > 6
    assert not compiled


@contextlib.contextmanager
def calls():
    """The keys of the programs that are run within it (`Program.key`)."""
    found, call = set(), Program.__call__

    def run(program, *args):
        if not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(args)):
            found.add(program.key(args))
        return call(program, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Program, "__call__", run)
        yield found


def answers(engine, texts=CONTEXT, questions=QUESTION, tokens=ANSWER, reserve=None, **asked):
    rows, questions = random_rows(texts, seed=1), random_rows(questions, seed=2)
    reserve = reserve or len(questions[0]) + tokens
    context = engine.prefill(rows, reserve=reserve, questions=questions)
    return joined(engine.stream(context, questions, max_tokens=tokens, **asked))


@pytest.mark.parametrize(
    "sizes", [also((1, 1, 1), id="one device"), pytest.param((1, 1, 2), id="a mesh")]
)
def test_weights_are_stacked_by_the_programs_that_were_lowered(sizes):
    jax.clear_caches()
    config, mesh = tiny_config(), make_mesh(*sizes)
    lowered = stacking_programs(config, abstract_params(config, RunSpec(mesh=mesh)))
    with compilations() as ahead:
        for program in lowered:
            program.compile()
    assert len(ahead) == len(lowered) > 3
    params = init_params(config, RunSpec(mesh=mesh))
    with compilations() as compiled:
        stacked = stacked_layers(config, params)
    assert not compiled
    layer = params["layers"]["1"]
    assert (stacked["layers"]["attn"]["o"][1] == layer["attn"]["o"]).all()
    assert (stacked["layers"]["mlp"]["gate_up"][1, :, 1] == layer["mlp"]["up"]).all()


def test_a_failure_is_raised_where_it_is_asked_for():
    refused = Program(lambda x: x[:2] * 0, compiler_options={"xla_no_such_option": "1"})
    compilation = Compilation(make_mesh())
    with compilation.listing():
        made = refused(jnp.ones(3))
    assert made.shape == (2,)
    compilation.wait()
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
        compilation.wait(check=True)


def test_seconds_of_compilation_are_joined_where_they_nest(monkeypatch):
    times = iter((3.0, 4.0, 6.0))
    monkeypatch.setattr(time, "perf_counter", lambda: next(times))
    with CompileClock() as clock:
        # An inner trace from 2 to 3, the outer from 1 to 4, a program from 4 to 6.
        for event, seconds in ((0, 1.0), (0, 3.0), (2, 2.0)):
            jax.monitoring.record_event_duration_secs(EVENTS[event], seconds)
        record = jax.monitoring.record_event_duration_secs
        thread = threading.Thread(target=record, args=(PROGRAM, 6.0))
        thread.start()
        thread.join()
        jax.monitoring.record_event("/jax/compilation_cache/cache_hits")
    assert clock.seconds() == 5.0
    assert clock.seconds(3.5) == 2.5 and clock.seconds(3.5, 5.0) == 1.5
    assert (clock.programs, clock.hits) == (2, 1)
    jax.monitoring.record_event_duration_secs(PROGRAM, 6.0)
    assert clock.programs == 2


@pytest.mark.parametrize("name", ["snapkv", "refreshkv", "citrus", "reattention", "star"])
@pytest.mark.quick("snapkv")
def test_other_lengths_trace_nothing(name):
    # Other tests may have traced the same programs.
    jax.clear_caches()
    engine = tiny_engine(small_method(name), chunk=16, by_layer=name != "refreshkv")
    with compilations(TRACED) as traced:
        answers(engine, [103], [8], 12)
        assert traced
        traced.clear()
        # Of a text, a question and an answer each, and of all at once.
        for text, question, tokens in [(120, 8, 12), (103, 5, 12), (103, 8, 17), (97, 6, 15)]:
            assert len(answers(engine, [text], [question], tokens)[0]) == tokens
            assert not traced, (text, question, tokens)


@pytest.mark.slow
def test_methods_share_the_programs_without_layers():
    jax.clear_caches()
    shared = {"_embedded", "_normed", "_marker", "_wanted", "_next_state", "_fed", "start_answer"}
    for name in ("full", "quest", "snapkv"):
        engine = tiny_engine(small_method(name), chunk=16, by_layer=True)
        with compilations(TRACED) as traced:
            answers(engine)
        assert "_through_layer" in traced
        assert shared & set(traced) == (shared if name == "full" else set())


def test_layers_that_are_alike_share_a_program_and_take_their_caches():
    config = tiny_config(num_layers=5, windows=(7, None, 7, None, None))
    engine = tiny_engine(config=config, by_layer=True)
    caches = init_caches(engine.setup, 1, 128, 0)
    prompt = engine.setup.feed("context", 128, context=random_rows([24]))
    (segment,), total = engine.method.segments(prompt), jnp.array([24], jnp.int32)
    given = engine.setup, engine.params, caches, segment, total, None, "hidden"
    with compilations() as compiled:
        new, _ = run_segment(*given)
    assert compiled.count("jit(_through_layer)") == 2
    finished = finish_context(engine.setup, new, total, 0)
    assert all(cache.k.is_deleted() and cache.v.is_deleted() for cache in (*caches, *new))
    assert [int(cache.position[0]) for cache in finished] == [24] * 5


def test_an_answers_kinds_of_steps_and_its_turns():
    assert answer_variants(REFRESH, 20) == ("partial", "check")
    # Steps 1 and 2 are partial, and the first token of an answer takes none.
    assert answer_variants(REFRESH, 3) == ("partial",)
    always = make_method("refreshkv", {"schedule": "fixed", "stride": "1"})
    assert answer_variants(always, 9) == ("check",)
    # A program is compiled for an answer of one token too.
    assert answer_variants(Full(), 1) == ("",)
    turns = decode_turns(REFRESH, ("partial", "check"), [range(5, 11), range(3, 5)], 8)
    # Steps 6 and 9 of the first row are full; the block has room for two more.
    assert turns.tolist() == [[0, 1, 0, 0, 1, 0, -1, -1], [1, 0, *[-1] * 6]]
    assert decode_turns(Full(), ("",), [range(1, 3)], 3).tolist() == [[0, 0, -1]]
    engine = tiny_engine(REFRESH, config=tiny_config(num_layers=1), by_layer=True)
    prompts = random_rows([21])
    longer = joined(engine.generate(prompts, max_tokens=7))
    # Of the block of steps 2 to 5 step 3 would be a full one.
    assert joined(engine.generate(prompts, max_tokens=3)) == [longer[0][:3]]
