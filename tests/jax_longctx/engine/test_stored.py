import dataclasses
import logging
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from jax_longctx.engine import Lengths, compile_ahead, stored
from jax_longctx.engine.compiling import forget
from jax_longctx.engine.decode import decode_block
from jax_longctx.engine.prefill import whole_segment
from jax_longctx.sharding import make_mesh
from tests.jax_longctx.engine.test_ahead import ANSWER, CONTEXT, QUESTION, answers
from tests.small_methods import small_method
from tests.stored_programs import lowerings, storing
from tests.support import tiny_engine


@pytest.fixture
def folder(tmp_path):
    with storing(tmp_path):
        yield tmp_path


@pytest.fixture
def lowered():
    with lowerings() as names:
        yield names


def engine_of(name):
    return tiny_engine(small_method(name), chunk=32, by_layer=False)


def compiled(name):
    engine = engine_of(name)
    compilation = compile_ahead(engine, Lengths(CONTEXT, [(QUESTION[0], ANSWER)]))
    compilation.wait(check=True)
    return engine, len(compilation)


@pytest.mark.parametrize("name", ["full", "refreshkv"])
@pytest.mark.slow
def test_a_new_process_lowers_nothing_and_answers_alike(folder, lowered, monkeypatch, name, caplog):
    caplog.set_level(logging.INFO)
    expected = answers(engine_of(name))
    forget()
    _, count = compiled(name)
    assert len(lowered) == count == len(list(folder.glob("longctx-*")))
    lowered.clear()
    forget()
    engine, again = compiled(name)
    assert again == count and not lowered
    # The run takes what was stored.
    with monkeypatch.context() as patched:
        for program in (whole_segment, decode_block):
            patched.setattr(program, "jitted", None)
        assert answers(engine) == expected
    if name != "full":
        return
    for file in folder.iterdir():
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    forget()
    engine, _ = compiled(name)
    assert len(lowered) == count and "it is damaged" in caplog.text
    assert answers(engine) == expected
    forget()

    def refuses(*args):
        raise jax.errors.JaxRuntimeError("of another driver")

    monkeypatch.setattr(stored, "load", refuses)
    engine, _ = compiled(name)
    assert "of another driver" in caplog.text and len(list(folder.iterdir())) == count
    assert answers(engine) == expected


@pytest.mark.slow
def test_methods_of_equal_caches_have_programs_of_their_own(folder):
    """Their arguments differ in nothing but what is static."""
    names = "full", "reattention"
    expected = [answers(engine_of(name)) for name in names]
    assert expected[0] != expected[1]
    for name in names:
        compiled(name)
    forget()
    engines = [compiled(name)[0] for name in names]
    assert [answers(engine) for engine in engines] == expected


@dataclasses.dataclass(frozen=True)
class Made:
    function: object


# As a class of the library.
Made.__module__ = stored.__name__


def test_a_program_is_told_from_others(tmp_path, monkeypatch):
    mesh, x = make_mesh(), jnp.ones(3)

    def path(name="f", static=("a", 1), leaves=(x,)):
        program = SimpleNamespace(name=name, split=lambda args: (static, args))
        return stored.path_of(tmp_path, program, mesh, leaves)

    others = [
        path("g"),
        path(static=("a", 2)),
        path(static=(small_method("full"), 1)),
        path(static=(small_method("snapkv"), 1)),
        path(leaves=(jnp.ones(4),)),
        path(leaves=(jnp.ones(3, jnp.bfloat16),)),
        path(leaves=(x, x)),
    ]
    assert path() == path() and len({path(), *others}) == 1 + len(others)
    before = path()
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    assert path() != before
    monkeypatch.undo()
    monkeypatch.setattr(stored, "_text_digest", lambda: "another text")
    assert path() != before
    monkeypatch.undo()
    with jax.log_compiles():
        assert path() == before
    with jax.default_matmul_precision("bfloat16"):
        assert path() != before
    # What another process would describe otherwise is not stored.
    assert path(static=(Made(lambda: 0),)) is None
    assert path(static=(object(),)) is None
    # Another package's text is not looked through.
    assert path(static=(pytest.Item,)) is None
