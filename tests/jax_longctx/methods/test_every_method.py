"""What every method must do: equal full attention where nothing is left out, on models with every
option, and answer through the command line by name."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

from checkpoints_convert import convert
from jax_longctx.cli.main import app
from jax_longctx.engine.capacity import grow
from jax_longctx.engine.context_io import load_context, save_context
from jax_longctx.errors import InputError
from jax_longctx.methods import METHODS, make_method
from jax_longctx.models.params import init_params
from jax_longctx.models.rope import RopeConfig
from jax_longctx.run_spec import RunSpec
from jax_longctx.sharding import leaf_axes, make_mesh
from tests.checkpoints_convert.tiny import random_state, write_checkpoint
from tests.jax_longctx.cli.tiny_model import hf_config, write_tokenizer
from tests.jax_longctx.methods.branches import decided_by_floats
from tests.jax_longctx.methods.harness import ALIKE, answer_logits, texts
from tests.small_methods import APART, EVERYTHING, SMALL, small_method
from tests.support import engine_over, joined, random_rows, tiny_config, tiny_engine

pytestmark = pytest.mark.thorough

ROWS, QUESTIONS = [37, 1, 20], [3, 2, 5]
# In a type and through commands ranking is nothing of its own.
OF_KINDS = [name for name in APART if name not in ALIKE]


def config_with_everything():
    """Biases, norms of queries and keys, tied embeddings, eight query heads over one kv head."""
    rope = RopeConfig(kind="yarn", theta=1e4, trained_length=32, factor=8.0)
    return tiny_config(
        family="qwen3",
        qkv_bias=True,
        qk_norm=True,
        tie_embeddings=True,
        num_heads=8,
        num_kv_heads=1,
        rope=rope,
        max_position=256,
    )


def answers(engine, contexts, questions, **options):
    context = engine.prefill(contexts, reserve=24, questions=questions)
    return asked(engine, context, questions, **options)


def asked(engine, context, questions, **options):
    return joined(engine.stream(context, questions, max_tokens=8, **options))


@pytest.fixture(scope="module")
def full_answers():
    engine = tiny_engine(config=config_with_everything(), chunk=16)
    contexts, questions = random_rows(ROWS), random_rows(QUESTIONS, seed=1)
    return answers(engine, contexts, questions)


# Dynamic NTK replaces the checkpoint's own scaling, which it refuses to do.
@pytest.mark.parametrize("name", [name for name in METHODS if name != "dynamic-ntk"])
def test_nothing_left_out_is_full_attention_on_a_model_with_every_option(name, full_answers):
    method = make_method(name, EVERYTHING[name])
    engine = tiny_engine(method, config=config_with_everything(), chunk=16)
    contexts, questions = random_rows(ROWS), random_rows(QUESTIONS, seed=1)
    assert answers(engine, contexts, questions, keep=False) == full_answers


@pytest.mark.parametrize("name", OF_KINDS)
def test_bfloat16_with_nothing_left_out_is_near_full_attention(name):
    """The next token's logits after teacher-forced tokens, which cannot drift apart."""
    full, other = (
        bfloat16_logits(method)
        for method in (small_method("full"), make_method(name, EVERYTHING[name]))
    )
    exact = bfloat16_logits(small_method("full"), jnp.float32)
    assert np.abs(full - exact).max() > 0
    # Rounding is no worse than full attention's own, give or take.
    assert np.abs(other - exact).max() < 2 * np.abs(full - exact).max()


@functools.cache
def bfloat16_logits(method, dtype=jnp.bfloat16):
    config, mesh = tiny_config(num_layers=1), make_mesh()
    params = init_params(config, RunSpec(mesh=mesh, dtype="bfloat16"), seed=0)
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
    engine = engine_over(config, params, method, mesh, chunk=16)
    rows = texts([(37, 5), (9, 5)], 6)
    return answer_logits(engine, rows, before=5).astype(np.float32)


# With a share of the prompt as a budget too, which grows with it, and full steps by the queries.
# Rules that rank alone are saved and on a mesh in their own tests; ArkVale stores other digests.
PASSES = [
    *((name, SMALL[name]) for name in (*OF_KINDS, "arkvale")),
    ("refreshkv", {"ratio": 0.3, "schedule": "adaptive", "qc_stride": 2, "threshold": 0.5}),
]


@pytest.mark.parametrize(("name", "settings"), PASSES, ids=[f"{n}-{len(s)}" for n, s in PASSES])
def test_a_context_answers_alike_again_after_saving_grown_and_on_a_mesh(name, settings, tmp_path):
    method, config = make_method(name, settings), tiny_config(num_layers=1, max_position=4096)
    engine, mesh = (
        tiny_engine(method, config=config, mesh=make_mesh(*sizes), chunk=16)
        for sizes in [(1, 1, 1), (2, 2, 2)]
    )
    contexts, questions = random_rows([450, 201, 0]), random_rows([3, 5, 2], seed=1)
    others = questions if method.info.needs_question else random_rows([4, 1, 9], seed=2)
    context = engine.prefill(contexts, reserve=24, questions=questions)
    save_context(engine, context, tmp_path / "context")
    first, between = asked(engine, context, questions), asked(engine, context, others)
    assert (between == first) == (others == questions)
    assert asked(engine, context, questions) == first
    loaded = load_context(engine, tmp_path / "context")
    assert asked(engine, loaded, questions, keep=False) == first
    assert asked(engine, context, questions, keep=False) == first
    with pytest.raises(InputError, match="given up"):
        asked(engine, context, questions)
    # A question and answer of more than was reserved make the caches grow.
    little = engine.prefill(contexts, reserve=1, questions=questions)
    before = jax.eval_shape(lambda caches: caches, little.usable_caches())
    grown = jax.tree.leaves(jax.eval_shape(lambda caches: grow(caches, 256), before))
    for old, new, axes in zip(jax.tree.leaves(before), grown, leaf_axes(before), strict=True):
        grows = {"slots", "pages", "room", "share"} & set(axes)
        assert (old.shape != new.shape) == bool(grows), (axes, old.shape, new.shape)
    # What evicts while it answers holds nothing that grows.
    if not method.info.keeps_all and getattr(method, "protocol", "") == "own":
        assert grown == jax.tree.leaves(before)
    assert asked(engine, little, questions) == first
    assert answers(mesh, contexts, questions) == first


@pytest.mark.parametrize("name", METHODS)
def test_no_float_of_one_shard_decides_on_a_collective(name):
    assert not any(decided_by_floats(small_method(name)))


@pytest.mark.parametrize("name", OF_KINDS)
def test_by_name_through_the_command_line(name, checkpoint, tmp_path):
    book = tmp_path / "book.txt"
    book.write_text("The pass key is 12345. Remember it. " * 20)
    settings = [part for key, value in SMALL[name].items() for part in ("--set", f"{key}={value}")]
    how = ["-c", checkpoint, "--method", name, *settings, "--chunk", "64", "--max-tokens", "4"]
    asked = CliRunner().invoke(app, ["ask", str(book), "Who?", "Why?", *how])
    assert asked.exit_code == 0, asked.output
    assert asked.stdout.count("\n") >= 2
    rereads = METHODS[name]().info.needs_question
    assert ("the text is read 2 times" in asked.stderr) is rereads
    continued = CliRunner().invoke(app, ["generate", book.read_text(), *how])
    assert continued.exit_code == 0, continued.output


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    config = hf_config(vocab_size=300)
    write_checkpoint(folder / "hf", config, random_state(config))
    write_tokenizer(folder / "hf")
    convert(folder / "hf", folder / "model")
    return str(folder / "model")
