"""Compilation ahead: the run that follows compiles nothing, and answers as it always does."""

import itertools
import threading
import time
from functools import partial

import jax
import jax.monitoring
import jax.numpy as jnp
import pytest

from jax_longctx.engine.ahead import Compilation, begun_or_none
from jax_longctx.engine.engine import Engine, blocks_of_all
from jax_longctx.engine.programs import EVENTS, CompileClock, Program
from jax_longctx.errors import InputError
from jax_longctx.models.llama import (
    abstract_params,
    init_params,
    stacked_layers,
    stacking_programs,
)
from jax_longctx.sharding import make_mesh
from tests.small_methods import small_method
from tests.support import joined, random_rows, tiny_config, tiny_engine

CONTEXT, QUESTION, ANSWER = [90], [5], 20
PROGRAM = EVENTS[-1]
MODES = {False: "looped", True: "by layer"}
OFTEN = ("full", "snapkv", "refreshkv")
QUICK = [("full", True), ("refreshkv", False)]
also = partial(pytest.param, marks=pytest.mark.slow)
most = partial(pytest.param, marks=pytest.mark.thorough)


def named(value):
    """What a case's name says of a parameter: a mode by its word."""
    return MODES[value] if isinstance(value, bool) else value


@pytest.fixture
def compiled():
    """The names of the programs that are compiled meanwhile."""
    names = []

    def listen(event, seconds, **about):
        if event == PROGRAM:
            names.append(about["fun_name"])

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    jax.monitoring.unregister_event_duration_listener(listen)


def unloaded(method, by_layer, mesh, **options):
    """An engine of the tiny model that has shapes in place of weights."""
    config = tiny_config()
    params = abstract_params(config, mesh, jnp.float32)
    return Engine(config, params, method, mesh, chunk=32, by_layer=by_layer, **options)


def answers(engine, rows, asked, keep):
    context = engine.prefill(rows, reserve=QUESTION[0] + ANSWER, questions=asked)
    return joined(engine.stream(context, asked, max_tokens=ANSWER, keep=keep))


@pytest.mark.parametrize(
    ("name", "by_layer"),
    [
        *QUICK,
        *(also(*pair) for pair in itertools.product(OFTEN, MODES) if pair not in QUICK),
        # Questions at prefill, units, and pages that each row has its own number of.
        *(most(name, False) for name in ("citrus", "infllm", "free-pages")),
    ],
    ids=named,
)
def test_the_run_that_follows_compiles_nothing(name, by_layer, compiled):
    check_run(small_method(name), by_layer, compiled)


@pytest.mark.parametrize("by_layer", MODES, ids=named)
@pytest.mark.slow
def test_the_run_of_an_offloaded_context_compiles_nothing(by_layer, compiled):
    """What stands in for the host's arrays lies in its memory: else programs are others."""
    check_run(small_method("quest"), by_layer, compiled, offload="host")


def check_run(method, by_layer, compiled, **options):
    jax.clear_caches()
    mesh = make_mesh()
    rows, asked = random_rows(CONTEXT, seed=1), random_rows(QUESTION, seed=2)
    engine = unloaded(method, by_layer, mesh, **options)
    compilation = engine.compile(CONTEXT, QUESTION, max_tokens=ANSWER)
    compilation.wait(check=True)
    assert len(compilation) > 3 and compilation.seconds > 0
    loaded = tiny_engine(method, mesh=mesh, chunk=32, by_layer=by_layer)
    before = compiled.copy()
    engine.take_params(loaded.params)
    found = answers(engine, rows, asked, keep=True)
    assert compiled == before
    assert found == answers(loaded, rows, asked, keep=True)


@pytest.mark.parametrize(
    "sizes", [also((1, 1, 1), id="one device"), pytest.param((1, 1, 2), id="a mesh")]
)
def test_weights_are_stacked_by_the_programs_that_were_lowered(sizes, compiled):
    jax.clear_caches()
    config, mesh = tiny_config(), make_mesh(*sizes)
    lowered = stacking_programs(config, abstract_params(config, mesh, jnp.float32))
    for program in lowered:
        program.compile()
    before = compiled.copy()
    params = init_params(config, mesh)
    of_init = compiled[len(before) :]
    stacked = stacked_layers(config, params)
    assert compiled == [*before, *of_init] and len(before) == len(lowered) > 3
    layer = params["layers"]["1"]
    assert (stacked["layers"]["attn"]["o"][1] == layer["attn"]["o"]).all()
    assert (stacked["layers"]["mlp"]["gate_up"][1, :, 1] == layer["mlp"]["up"]).all()


@pytest.mark.slow
def test_on_a_mesh_the_large_programs_are_found(compiled):
    jax.clear_caches()
    method, mesh = small_method("quest"), make_mesh(2, 2, 2)
    rows, asked = random_rows([90, 40], seed=1), random_rows([5, 3], seed=2)
    engine = unloaded(method, False, mesh)
    engine.compile([90, 40], [5, 3], max_tokens=ANSWER).wait(check=True)
    loaded = tiny_engine(method, mesh=mesh, chunk=32, by_layer=False)
    engine.take_params(loaded.params)
    compiled.clear()
    found = answers(engine, rows, asked, keep=True)
    large = {"jit(_segment)", "jit(_decode_block)", "jit(_through_layer)", "jit(_finish)"}
    assert not large & set(compiled)
    assert found == answers(loaded, rows, asked, keep=True)


def test_a_rehearsal_takes_steps_of_every_variant():
    assert [blocks_of_all(small_method("full"), tokens) for tokens in (1, 2, 3, 60)] == [
        *(1, 2, 3, 3)
    ]
    # A full step comes now and then: the rehearsal goes on until its second.
    assert blocks_of_all(small_method("refreshkv"), 200) > 3


def test_a_failure_is_raised_where_it_is_asked_for():
    refused = Program(lambda x: x[:2] * 0, compiler_options={"xla_no_such_option": "1"})
    compilation = Compilation(make_mesh())
    with compilation.rehearsing():
        made = refused(jnp.ones(3))
    assert made.shape == (2,) and not made.any()
    compilation.wait()
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
        compilation.wait(check=True)


def test_only_want_of_memory_and_refusals_are_left_to_the_run():
    def fails(error):
        def begin():
            raise error

        return begin

    short = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
    assert begun_or_none(fails(short)) is None
    assert begun_or_none(fails(InputError("no rows"))) is None
    for other in (jax.errors.JaxRuntimeError("INTERNAL: broken"), ValueError("a bug")):
        with pytest.raises(type(other), match=r"broken|a bug"):
            begun_or_none(fails(other))


def test_seconds_of_compilation_are_joined_where_they_nest(monkeypatch):
    times = iter((3.0, 4.0, 6.0))
    monkeypatch.setattr(time, "perf_counter", lambda: next(times))
    with CompileClock() as clock:
        # An inner trace from 2 to 3, the outer from 1 to 4, a program from 4 to 6.
        for event, seconds in ((0, 1.0), (0, 3.0), (2, 2.0)):
            jax.monitoring.record_event_duration_secs(EVENTS[event], seconds)
        thread = threading.Thread(
            target=jax.monitoring.record_event_duration_secs, args=(PROGRAM, 6.0)
        )
        thread.start()
        thread.join()
        jax.monitoring.record_event("/jax/compilation_cache/cache_hits")
    assert clock.seconds() == 5.0
    assert clock.seconds(3.5) == 2.5 and clock.seconds(3.5, 5.0) == 1.5
    assert (clock.programs, clock.hits) == (2, 1)
    jax.monitoring.record_event_duration_secs(PROGRAM, 6.0)
    assert clock.programs == 2
