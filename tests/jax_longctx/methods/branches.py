"""Which branches of a decode step hold collectives, and by what they are taken.

A branch that only some of the shards enter never ends. So a predicate may come from integers,
which all shards hold alike, and from floats only through a maximum over the shards of heads and
slots (`LayerContext.agree`).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal, jaxprs_in_params

from jax_longctx.contract import decode_segment
from jax_longctx.engine.allocate import abstract_caches
from jax_longctx.engine.prefill import finish_context, finish_question, run_segment
from jax_longctx.engine.setup import Setup
from jax_longctx.models.params import init_params
from jax_longctx.run_spec import RunSpec
from jax_longctx.sharding import make_mesh
from tests.support import tiny_config

COLLECTIVES = ("psum", "pmax", "pmin", "all_gather", "ppermute", "all_to_all")


def decided_by_floats(method, step=1):
    """For every branch with a collective in the program of an answer's `step`: by floats or not."""
    config, mesh = tiny_config(num_layers=1), make_mesh(1, 2, 2)
    setup = Setup(config, method, mesh, jnp.dtype(jnp.float32), 16, by_layer=True)
    rows = jax.ShapeDtypeStruct((2,), jnp.int32)
    caches = abstract_caches(setup, 2, 256, 32)
    caches = jax.eval_shape(lambda c, n: finish_context(setup, c, n, 32), caches, rows)
    if method.info.answers_apart:
        finish = functools.partial(finish_question, setup, reserve=32)
        caches = jax.eval_shape(finish, caches, rows)
    ones = np.ones((2, 1), np.int32)
    segment = decode_segment(ones, ones, np.zeros(2, bool), method.step_variant(step))
    params = jax.eval_shape(lambda: init_params(config, RunSpec(mesh=mesh), seed=0))

    def step(params, caches, total):
        return run_segment(setup, params, caches, segment, total, None, "none")

    found: list[bool] = []
    _visit(jax.make_jaxpr(step)(params, caches, rows).jaxpr, {}, found)
    return found


def _visit(jaxpr, outside, found):
    """`outside` says which variable of an outer program each input is."""
    made = {out: eqn for eqn in jaxpr.eqns for out in eqn.outvars}
    made |= {name: source for name, source in outside.items() if name not in made}
    for eqn in jaxpr.eqns:
        inner = list(jaxprs_in_params(eqn.params))
        branching = eqn.primitive.name == "cond"
        operands = eqn.invars[1:] if branching else eqn.invars
        for sub in inner:
            names = dict(zip(sub.invars, operands, strict=False))
            sources = {inner_name: (name, made) for inner_name, name in names.items()}
            _visit(sub, sources if len(sub.invars) == len(operands) else {}, found)
        deciding = _deciding(eqn)
        if deciding and any(f"{name}[" in str(sub) for sub in inner for name in COLLECTIVES):
            found.append(any(_from_floats(name, made) for name in deciding))


def _deciding(eqn):
    """What decides between branches, or how often a loop turns; else nothing."""
    if eqn.primitive.name == "cond":
        return eqn.invars[:1]
    if eqn.primitive.name != "while":
        return []
    asks, consts = eqn.params["cond_jaxpr"].jaxpr, eqn.params["cond_nconsts"]
    given = [*eqn.invars[:consts], *eqn.invars[consts + eqn.params["body_nconsts"] :]]
    used = {name for inner in asks.eqns for name in inner.invars if not isinstance(name, Literal)}
    return [name for inner, name in zip(asks.invars, given, strict=True) if inner in used]


def _from_floats(name, made):
    """Whether a value comes from floats that the shards have not agreed on."""
    queue, done = [(name, made)], set()
    while queue:
        name, made = queue.pop()
        if isinstance(name, Literal) or name in done:
            continue
        done.add(name)
        if jnp.issubdtype(name.aval.dtype, jnp.floating):
            return True
        source = made.get(name)
        if isinstance(source, tuple):
            queue.append(source)
        elif source is not None:
            agreed = source.primitive.name == "pmax" and {"tensor", "seq"} <= set(
                source.params["axes"]
            )
            queue += [] if agreed else [(given, made) for given in source.invars]
    return False
