"""A text over four and eight shards of the slots is read and answered as on one device.

Every shard of the four holds two stripes, where slots are dealt in stripes. Each of the
eight holds one run of slots, the last of them none of the text.
"""

import functools

import numpy as np
import pytest

from jax_longctx.methods import METHODS, make_method
from jax_longctx.planning.compiled import count_collectives
from jax_longctx.sharding import make_mesh
from tests.jax_longctx.engine.lowering import compile_decode
from tests.jax_longctx.methods.harness import answer_logits, texts
from tests.small_methods import SMALL
from tests.support import tiny_config, tiny_engine

# 1,024 slots over four shards, of 256 each; over eight, of 128 each. `test_every_method` has every
# method on two.
LENGTHS = [(850, 5), (301, 3)]
# Settings that choose in different ways.
CASES = {
    "full": {},
    **{name: SMALL[name] for name in ("ideal-topk", "infllm", "reattention", "snapkv", "star")},
    "resa": SMALL["resa"],
    "refreshkv": SMALL["refreshkv"],
    "resa-psa": {**SMALL["resa"], "allocation": "psa-estimate"},
    "quest-ada": {**SMALL["quest"], "granularity": "kv_head", "allocation": "ada-floor"},
}
OF_FOUR = ("ideal-topk", "infllm", "quest-ada", "refreshkv", "resa-psa", "star")
OF_EIGHT = ("reattention", "resa", "snapkv")
QUICK = ("reattention", 4)
PAIRS = [
    *((name, 4) for name in ("full", "reattention", *OF_FOUR)),
    *((name, 8) for name in OF_EIGHT),
]


@functools.cache
def logits(name, shards):
    method = make_method(name if name in METHODS else name.rsplit("-", 1)[0], CASES[name])
    config = tiny_config(num_layers=1, max_position=4096)
    engine = tiny_engine(method, config=config, mesh=make_mesh(1, shards, 1), chunk=64)
    return answer_logits(engine, texts(LENGTHS, 4))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shards"),
    [case if case == QUICK else pytest.param(*case, marks=pytest.mark.thorough) for case in PAIRS],
)
def test_sharded_slots_answer_as_one_device(name, shards):
    np.testing.assert_allclose(logits(name, shards), logits(name, 1), atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings", "entries"),
    [
        ("ideal-topk", {"budget": 32, "local": 16}, 32),
        pytest.param(
            "quest",
            {"budget": 32, "page_size": 2, "local": 16, "granularity": "kv_head"},
            16,
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_shards_send_their_best_and_not_all_scores(name, settings, entries):
    config = tiny_config(num_layers=1, max_position=16384)
    mesh = make_mesh(1, 8, 1)
    engine = tiny_engine(make_method(name, settings), config=config, mesh=mesh, by_layer=False)
    moved = count_collectives(compile_decode(engine.setup, 1, 8192).as_text())[1]
    # A score and an index of each entry from every shard, and a head's part of the merges.
    assert 4 * 8 * entries * 8 / 2 <= moved < 4 * 8 * entries * 8 + 8 * 4 * 1000
    assert moved < 4 * 8192 * 4 / 2
