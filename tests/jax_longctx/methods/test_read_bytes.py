"""What a decode step reads, in bytes: of a layer with two kv heads of 8 float32 numbers a token."""

import jax.numpy as jnp
import pytest

from tests.jax_longctx.methods.selecting import layer_shape
from tests.jax_longctx.methods.test_refusals import PAGES, SCOPE, UNITS, made

SLOTS = 8192
TOKEN = 2 * 2 * 8 * 4
WHOLE = SLOTS * TOKEN
SHAPE = layer_shape(*(jnp.zeros(size, jnp.float32) for size in [(1, 4, 8), (1, 2, SLOTS, 8)]))
# InfLLM's representatives and its ring.
UNIT_BYTES = 4 * (SLOTS // 4) * 8 * 4 + 4 * (16 + 4 + 8 - 1) * 4
# Pages of 16: bounds are a sixteenth of keys and values, the budget an eighth.
BOUNDS, BUDGET = WHOLE // 16, WHOLE // 8 + 68 * TOKEN
RESA = BOUNDS + BUDGET
LIKE_QUEST = "granularity=kv_head ratio=0.125"
BOUNDED = f"{PAGES} digest=bounds"


@pytest.mark.parametrize(
    ("name", "settings", "length", "expected"),
    [
        ("full", "", 100, WHOLE),
        *(("snapkv", "budget=12 window=4", n, min(n, 12) * TOKEN) for n in (200, 7)),
        ("refreshkv", "budget=6 schedule=fixed stride=3", 200, 7 * TOKEN + WHOLE // 3),
        ("refreshkv", "budget=6 qc_stride=2", 200, 7 * TOKEN + WHOLE // 2),
        ("refreshkv", "ratio=0.3", 100, 31 * TOKEN + WHOLE // 5),
        ("infllm", UNITS, 10, UNIT_BYTES + 10 * TOKEN),
        ("infllm", UNITS, 4000, UNIT_BYTES + (4 + 16 + 3 * 4) * TOKEN),
        ("infllm", f"{UNITS} decode=dense", 4000, WHOLE),
        # Global, 8 spans of 4, local, and to rank all keys: or the first and the last alone.
        (
            "reattention",
            f"{SCOPE} global_size=4 local_size=32 kept=8",
            400,
            68 * TOKEN + WHOLE // 2,
        ),
        *(
            ("reattention", f"{SCOPE} global_size=4 local_size=32 count=0", n, min(n, 36) * TOKEN)
            for n in (400, 9)
        ),
        # Digests of pages of 8; four query heads name one page each, the budget holds two spans.
        *(("free-pages", BOUNDED, n, WHOLE // 8 + min(n, 60) * TOKEN) for n in (150, 10)),
        ("quest", "granularity=kv_head", SLOTS, BOUNDS + BUDGET),
        # Two heads of a group that select alone.
        ("quest", "", SLOTS, BOUNDS + 2 * BUDGET),
        ("quest", "skip_layers=1", SLOTS, WHOLE),
        ("resa", LIKE_QUEST, SLOTS, RESA),
    ],
)
def test_a_step_reads(name, settings, length, expected):
    method = made(name, settings).of_layer(0, 1)
    assert method.read_bytes(method.init_cache(SHAPE), length) == expected
