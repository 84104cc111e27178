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
from jax_longctx.engine import Engine
from jax_longctx.engine.capacity import grow
from jax_longctx.engine.context_io import load_context, save_context
from jax_longctx.errors import InputError
from jax_longctx.methods import METHODS, make_method
from jax_longctx.models.config import RopeConfig
from jax_longctx.models.llama import init_params
from jax_longctx.sharding import leaf_axes, make_mesh
from tests.checkpoints_convert.tiny import random_state, write_checkpoint
from tests.jax_longctx.cli.tiny_model import hf_config, write_tokenizer
from tests.jax_longctx.methods.branches import decided_by_floats
from tests.jax_longctx.methods.harness import steps
from tests.small_methods import APART, EVERYTHING, SMALL, small_method
from tests.support import random_rows, tiny_config, tiny_engine

pytestmark = pytest.mark.thorough

ROWS, QUESTIONS = [37, 1, 20], [3, 2, 5]


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


def answers(engine, contexts, questions, reserve=24, **options):
    context = engine.prefill(contexts, reserve=reserve, questions=questions)
    rows = [[] for _ in contexts]
    for block in engine.stream(context, questions, max_tokens=8, **options):
        for row, new in zip(rows, block, strict=True):
            row.extend(new)
    return rows


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


@pytest.mark.parametrize("name", APART)
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
    """Logits `[N, V]` of two rows' questions and answers."""
    config, mesh = tiny_config(num_layers=1), make_mesh()
    params = init_params(config, mesh, seed=0, dtype=jnp.bfloat16)
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
    engine = Engine(config, params, method, mesh, chunk=16)
    rows = [
        random_rows(lengths, seed=seed) for seed, lengths in enumerate([[37, 9], [5, 5], [6, 6]])
    ]
    # Row by row: methods cut a question differently.
    logits = [[], []]
    for step in steps(engine, *rows):
        if step.segment.role in ("query", "decode"):
            for row in range(2):
                logits[row].append(step.logits[row, : step.valid[row]])
    return np.concatenate([*logits[0], *logits[1]]).astype(np.float32)


GROWING = [
    *((name, SMALL[name]) for name in APART),
    ("refreshkv", {"ratio": 0.3, "stride": 3, "schedule": "fixed"}),
]


@pytest.mark.parametrize(("name", "settings"), GROWING, ids=[f"{n}-{len(s)}" for n, s in GROWING])
def test_what_was_reserved_changes_no_answer_and_no_budget(name, settings):
    """A question and answer of more than was reserved make the caches grow."""
    engine = tiny_engine(make_method(name, settings), config=tiny_config(num_layers=1), chunk=16)
    contexts, questions = random_rows([90, 40]), random_rows([3, 5], seed=1)
    kept = answers(engine, contexts, questions, reserve=64)
    assert answers(engine, contexts, questions, reserve=1) == kept
    context = engine.prefill(contexts, reserve=1, questions=questions)
    before = context.usable_caches()
    sizes = [leaf.shape for leaf in jax.tree.leaves(grow(before, 256))]
    for old, new, axes in zip(jax.tree.leaves(before), sizes, leaf_axes(before), strict=True):
        grows = {"slots", "pages", "room", "share"} & set(axes)
        assert (old.shape != new) == bool(grows), (axes, old.shape, new)
    # What evicts while it answers holds nothing that grows.
    if not engine.method.info.keeps_all and getattr(engine.method, "protocol", "") == "own":
        assert sizes == [leaf.shape for leaf in jax.tree.leaves(before)]


@pytest.mark.parametrize("name", APART)
def test_a_mesh_answers_as_one_device(name):
    contexts, questions = random_rows([90, 40, 0]), random_rows([3, 5, 2], seed=1)
    one, mesh = (
        tiny_engine(
            small_method(name), config=tiny_config(num_layers=1), mesh=make_mesh(*sizes), chunk=16
        )
        for sizes in [(1, 1, 1), (2, 2, 2)]
    )
    assert answers(mesh, contexts, questions) == answers(one, contexts, questions)


@pytest.mark.parametrize("name", METHODS)
def test_no_float_of_one_shard_decides_on_a_collective(name):
    assert not any(decided_by_floats(small_method(name)))


@pytest.mark.parametrize("name", APART)
def test_a_context_answers_again_and_after_saving(name, tmp_path):
    engine = tiny_engine(small_method(name), chunk=16)
    contexts, questions = random_rows([90, 40]), random_rows([3, 5], seed=1)
    context = engine.prefill(contexts, reserve=24, questions=questions)
    save_context(engine, context, tmp_path / "context")

    def ask(of, **options):
        return list(engine.stream(of, questions, max_tokens=8, **options))

    first = ask(context)
    assert ask(context) == first
    assert ask(load_context(engine, tmp_path / "context"), keep=False) == first
    assert ask(context, keep=False) == first
    with pytest.raises(InputError, match="given up"):
        ask(context)


@pytest.mark.parametrize("name", APART)
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
