"""Texts that repeat their tokens, under methods that rank keys before rotary embedding.

Equal tokens have equal keys in the first layer. The computed ones differ by rounding, in another
way in every program. In exact arithmetic they tie and the lower slot comes first: what the float64
oracles do, and what a row must do in every batch, chunk and mesh.
"""

import functools

import numpy as np
import pytest

from jax_longctx.sharding import make_mesh
from tests.jax_longctx.methods import test_infllm, test_reattention
from tests.jax_longctx.methods.harness import check_rows, row_logits, traces
from tests.jax_longctx.methods.oracles import infllm, reattention
from tests.support import tiny_config, tiny_engine

# One layer: in the next one tokens differ by what stands before them.
CONFIG = tiny_config(num_layers=1, model_dim=64, head_dim=16, max_position=1024)
# Of each row: context, question, answer. The answer's first tokens, read alone, leave the local
# part and are ranked, too.
LENGTHS = [(600, 5, 72), (331, 5, 72), (600, 5, 72), (493, 5, 72)]
RANKS_KEYS = reattention.Rules(g=4, w=64, m=8, k=4, kept=8, c=64)
# Means of three keys are ranked. Those of equal tokens are sums in different orders.
RANKS_UNITS = infllm.Rules(i0=4, w=40, bs=8, kb=4, r=3, x=40)


def read(method, rows, mesh=(1, 1, 1)):
    return row_logits(tiny_engine(method, config=CONFIG, mesh=make_mesh(*mesh)), rows, reserve=128)


@functools.cache
def cases(name):
    """A method, rows that repeat tokens, and the logits of the float64 oracle."""
    oracle, rules, method_of, types = {
        "reattention": (reattention, RANKS_KEYS, test_reattention.method_of, 38),
        "infllm": (infllm, RANKS_UNITS, test_infllm.method_of, 4),
    }[name]
    rng, pairs = np.random.default_rng(0), zip(*LENGTHS, strict=True)
    rows = [[rng.integers(0, types, length).tolist() for length in pair] for pair in pairs]
    found = traces(oracle, tiny_engine(config=CONFIG), rules, rows)
    return method_of(rules), rows, [np.concatenate(trace.logits) for trace in found]


@pytest.mark.parametrize(("name", "mesh"), [("reattention", (1, 2, 2)), ("infllm", (2, 2, 2))])
@pytest.mark.slow
def test_equal_tokens_tie_on_every_mesh(name, mesh):
    method, rows, expected = cases(name)
    check_rows(read(method, rows, mesh), expected)


@pytest.mark.parametrize("name", ["reattention", "infllm"])
@pytest.mark.slow
def test_equal_tokens_tie_alone_as_in_a_batch(name):
    method, rows, expected = cases(name)
    check_rows(read(method, [part[:1] for part in rows]), expected[:1])
