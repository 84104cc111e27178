"""A donated buffer is given back as what it was: no other leaf is written where it lies.

XLA's GPU compiler copies leaves that change places in the wrong order (jax-ml/jax#39625): what was
to be read has been overwritten by then. A CPU computes the right thing, so this looks at which
output each donated argument is paired with.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest

from jax_longctx.engine import Engine, programs
from jax_longctx.engine.donation import in_place
from jax_longctx.models.llama import init_params
from jax_longctx.sharding import make_mesh
from tests.small_methods import SMALL, small_method
from tests.support import random_rows, tiny_config

PROGRAMS = ("whole_segment", "finish_donated", "decode_block", "start_answer")


def crossings(lowered):
    """Donated leaves that are returned, but in another's buffer."""
    arguments = [
        (jax.tree_util.keystr(path), info)
        for path, info in jax.tree_util.tree_leaves_with_path(lowered.args_info[0])
    ]
    outputs = [
        jax.tree_util.keystr(path)
        for path, _ in jax.tree_util.tree_leaves_with_path(lowered.out_info)
    ]
    signature = lowered.as_text().partition("@main(")[2].partition(") -> ")[0]
    given = re.split(r"%arg\d+: ", signature)[1:]
    assert len(given) == len(arguments), "an argument was left out as unused"
    found, paired = [], 0
    for (name, info), text in zip(arguments, given, strict=True):
        aliased = re.search(r"tf.aliasing_output = (\d+)", text)
        if aliased is None:
            continue
        assert info.donated
        paired += 1
        output, own = outputs[int(aliased[1])], name.partition("]")[2]
        # The buffer of a leaf that is not returned is free for any.
        if not output.endswith(own) and any(path.endswith(own) for path in outputs):
            found.append((name, output))
    assert paired
    return found


class Looked:
    """Stands in for a program: looks at how it would be compiled, and returns zeros."""

    def __init__(self, name):
        self.real, self.answers = getattr(programs, name), name == "decode_block"
        self.count, self.crossings = 0, []

    def __call__(self, *args):
        lowered = self.real.lower(*args)
        self.count += 1
        self.crossings += crossings(lowered)
        made = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), lowered.out_info)

        def numbers(node):
            """The logits were numbers, and a block ends the answer."""
            if not isinstance(node, programs.DecodeState):
                return node
            done = jnp.full_like(node.done, self.answers)
            return dataclasses.replace(node, finite=jnp.ones_like(done), done=done)

        is_state = lambda node: isinstance(node, programs.DecodeState)  # noqa: E731
        return jax.tree.map(numbers, made, is_leaf=is_state)


@pytest.mark.parametrize("name", SMALL)
def test_no_leaf_is_written_where_another_lay(name, monkeypatch):
    # As many kv heads as heads: more leaves are then of one shape.
    config, mesh = tiny_config(num_heads=4, num_kv_heads=4), make_mesh()
    engine = Engine(config, init_params(config, mesh), small_method(name), mesh, chunk=32)
    looked = {program: Looked(program) for program in PROGRAMS}
    with monkeypatch.context() as patch:
        for program, look in looked.items():
            patch.setattr(programs, program, look)
        questions = random_rows([5, 3], seed=1)
        context = engine.prefill(random_rows([70, 40]), reserve=40, questions=questions)
        list(engine.stream(context, questions, max_tokens=4))
    for program, look in looked.items():
        assert look.count, program
        assert not look.crossings, program


def test_an_argument_that_is_not_used_would_be_noticed():
    def first_twice(tree):
        return {"a": tree["a"] + 0.0, "b": tree["a"] + 1.0}

    def in_other_order(tree):
        return [{"b": tree["b"]}, {"a": tree["a"]}]

    shape = jax.ShapeDtypeStruct((3,), jnp.float32)
    tree = {"a": shape, "b": shape}
    with pytest.raises(AssertionError, match="left out"):
        crossings(jax.jit(first_twice, donate_argnums=0).lower(tree))
    assert not crossings(in_place(first_twice, donate_argnums=0).lower(tree))
    # What is returned first takes the first buffer.
    assert crossings(in_place(in_other_order, donate_argnums=0).lower(tree))
