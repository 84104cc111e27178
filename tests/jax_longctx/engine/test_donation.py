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
from jax.extend.core import Literal
from jax.tree_util import tree_leaves_with_path as leaves_with_path

from jax_longctx.engine import decode, engine, layers, prefill, scoring
from jax_longctx.engine.compiling import IN_PLACE
from jax_longctx.engine.decode import DecodeState
from jax_longctx.engine.scoring import loglikelihoods
from jax_longctx.models.params import init_params
from jax_longctx.run_spec import RunSpec
from jax_longctx.sharding import make_mesh
from tests.small_methods import KINDS, small_method
from tests.support import engine_over, random_rows, tiny_config

# Of either mode.
PROGRAMS = {
    False: [
        (prefill, "whole_segment"),
        (prefill, "finish_donated"),
        (decode, "decode_block"),
        (engine, "start_answer"),
        (scoring, "forced_block"),
    ],
    True: [(layers, "_through_layer"), (prefill, "_finish_layer_donated")],
}
# Of every kind of cache one, for which all programs are looked at.
EACH = ("full", "snapkv", "citrus", "resa", "star")
# What calls a program of its own, or marks a value, and hands it on as it is.
CALLS = ("jit", "pjit", "closed_call", "shard_map", "sharding_constraint")


def crossings(traced):
    """What is returned in the buffer of a donated leaf, where that or it has another of its own."""
    lowered = traced.lower()
    arguments, outputs = (
        [(jax.tree_util.keystr(path), info) for path, info in leaves_with_path(tree)]
        for tree in (lowered.args_info[0], lowered.out_info)
    )
    signature = lowered.as_text().partition("@main(")[2].partition(") -> ")[0]
    given = re.split(r"%arg\d+: ", signature)[1:]
    assert len(given) == len(arguments), "an argument was left out as unused"
    owners = [_owner(name, arguments) for name, _ in outputs]
    sources = [_source(traced.jaxpr.jaxpr, value) for value in traced.jaxpr.jaxpr.outvars]
    found, paired = [], 0
    for i, ((name, info), text) in enumerate(zip(arguments, given, strict=True)):
        aliased = re.search(r"tf.aliasing_output = (\d+)", text)
        if aliased is None:
            continue
        assert info.donated
        paired += 1
        o = int(aliased[1])
        output, shape = outputs[o]
        # The buffer of a leaf that is not returned is free for any that has none of its size.
        fits = owners[o] is not None and arguments[owners[o]][1].shape == shape.shape
        if owners[o] != i and (i in owners or fits):
            found.append((name, output))
        # Another's value may be copied to where nothing lay that is returned elsewhere.
        if sources[o] not in (None, i) and i in sources:
            found.append((arguments[sources[o]][0], output))
    assert paired
    return found


def _owner(output, arguments):
    """Index of the donated leaf that an output is the new value of, by its name."""
    # A layer's `[1].count` is not the state's `.count`, though the output's name ends so.
    inner = output.partition("]")[2]
    named = [
        (own == inner, len(own), i)
        for i, (name, info) in enumerate(arguments)
        if info.donated and (own := name.partition("]")[2]) and output.endswith(own)
    ]
    return max(named)[2] if named else None


def _source(jaxpr, variable):
    """Index of the argument that a value is, unchanged; None where it was computed."""
    while variable not in jaxpr.invars:
        (made,) = [equation for equation in jaxpr.eqns if variable in equation.outvars] or [None]
        if made is None or made.primitive.name not in CALLS:
            return None
        at = made.outvars.index(variable)
        if "jaxpr" in made.params:
            inner = getattr(made.params["jaxpr"], "jaxpr", made.params["jaxpr"])
            if isinstance(inner.outvars[at], Literal):
                return None
            at = _source(inner, inner.outvars[at])
        if at is None:
            return None
        variable = made.invars[at]
    return jaxpr.invars.index(variable)


class Looked:
    """Stands in for a program: looks at how it would be compiled, and returns zeros."""

    def __init__(self, module, name):
        self.real, self.answers = getattr(module, name), name == "decode_block"
        self.seen, self.crossings = {}, []

    def __call__(self, *args):
        leaves, structure = jax.tree.flatten(args)
        shapes = [(leaf.shape, leaf.dtype) if hasattr(leaf, "shape") else leaf for leaf in leaves]
        key = str((shapes, structure))
        if key not in self.seen:
            traced = self.real.trace(*args)
            self.seen[key] = traced.out_info
            self.crossings += crossings(traced)
        made = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), self.seen[key])

        def numbers(node):
            """The logits were numbers, and a block ends the answer."""
            if not isinstance(node, DecodeState):
                return node
            done = jnp.full_like(node.done, self.answers)
            return dataclasses.replace(node, finite=jnp.ones_like(done), done=done)

        return jax.tree.map(numbers, made, is_leaf=lambda node: isinstance(node, DecodeState))


CASES = [(name, True) for name in EACH]
CASES += [(name, False) for name in {*KINDS, *EACH}]
QUICK = [("citrus", False), *((name, True) for name in ("full", "snapkv", "star"))]
CASES = [
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in sorted(CASES)
]


@pytest.mark.parametrize(("name", "by_layer"), CASES)
def test_no_leaf_is_written_where_another_lay(name, by_layer, monkeypatch):
    # As many kv heads as heads: more leaves are then of one shape.
    config, mesh = tiny_config(num_heads=4, num_kv_heads=4), make_mesh()
    method, params = small_method(name), init_params(config, RunSpec(mesh=mesh))
    engine = engine_over(config, params, method, mesh, chunk=32, by_layer=by_layer)
    contexts, questions = random_rows([70, 40]), random_rows([5, 3], seed=1)
    looked = {program: Looked(*program) for program in PROGRAMS[by_layer]}
    for program, look in looked.items():
        monkeypatch.setattr(*program, look)
    if not by_layer:
        context = engine.prefill(contexts, reserve=40, questions=questions)
        # Also of caches that have grown.
        for most in (4, 200) if name in EACH else (4,):
            list(engine.stream(context, questions, max_tokens=most))
    if name in EACH:
        loglikelihoods(engine, contexts, questions)
    for program, look in looked.items():
        assert look.seen or (name not in EACH and program[0] is scoring), program
        assert not look.crossings, program


def test_other_leaves_places_and_names_would_be_noticed():
    def first_twice(tree):
        return {"a": tree["a"] + 0.0, "b": tree["a"] + 1.0}

    def in_other_order(tree):
        return [{"b": tree["b"]}, {"a": tree["a"]}]

    def exchanged(tree):
        return {"a": tree["b"], "b": tree["a"], "c": tree["c"]}

    def found(function, names="ab", **options):
        tree = dict.fromkeys(names, jax.ShapeDtypeStruct((3,), jnp.float32))
        return crossings(jax.jit(function, donate_argnums=0, **options).trace(tree))

    with pytest.raises(AssertionError, match="left out"):
        found(first_twice)
    assert not found(first_twice, **IN_PLACE)
    # What is returned first takes the first buffer.
    assert found(in_other_order, **IN_PLACE)
    assert found(exchanged, "abc", **IN_PLACE) == [("[0]['b']", "['a']"), ("[0]['a']", "['b']")]
