from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.voted_slots import Spans, reference, voted_slots
from tests.drawing import computed

slow = partial(pytest.param, marks=pytest.mark.slow)


def voted_slots_of(*, rows, slots, votes, kept, span, first, local, page=1):
    """Arguments of the operation: rows whose votes are spread, and close to each other."""
    random = np.random.default_rng(7)
    # A full row, a shorter one, one without a middle, one of less than the first slots.
    length = np.resize([slots, slots - slots // 5, first + 1, max(first // 2, 1)], rows)
    stop = length - np.clip(length - first, 0, local)
    named = np.full((rows, votes), -1)
    for row, (names, end) in enumerate(zip(named, stop, strict=True)):
        low, high = first // page, -(-end // page)
        if end <= first:
            continue
        names[:] = random.integers(low, high, votes)
        # Half of them in a few slots, so that many tie and spans overlap, up to both edges.
        near = low if row % 2 else max(high - 9, low)
        names[::2] = random.integers(near, min(near + 9, high), len(names[::2]))
        names[random.random(votes) < 0.2] = -1
    size = -(-min(first + min(votes, kept) * span + local, slots) // 128) * 128
    how = dict(spans=Spans(kept, span, first, page), slots=slots, size=size)
    return tuple(jnp.asarray(x, jnp.int32) for x in (named, stop, length)), how


@pytest.mark.parametrize(
    "options",
    [
        slow(dict(slots=128, votes=24, kept=5, span=8, first=4, local=20)),
        dict(slots=640, votes=128, kept=127, span=32, first=32, local=96),
        dict(slots=512, votes=40, kept=6, span=32, first=20, local=50, page=16),
        dict(slots=300, votes=33, kept=300, span=1, first=0, local=1),
        slow(dict(slots=400, votes=50, kept=3, span=17, first=8, local=64, page=8)),
    ],
)
def test_the_listed_slots_are_those_of_the_definition(options):
    args, how = voted_slots_of(rows=4, **options)
    expected = computed(reference.voted_slots, *args, **how)
    found = computed(voted_slots, *args, implementation="xla", **how)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    number, listed = (np.asarray(x) for x in (expected[1], expected[0]))
    assert number[0] > options["first"] + options["local"]
    assert np.all((listed >= 0).sum(axis=1) == number)


def test_settings_below_one_are_refused():
    args, how = voted_slots_of(rows=1, slots=128, votes=9, kept=2, span=4, first=2, local=9, page=1)
    with pytest.raises(ValueError, match="kept=2, size=0, first=2, page=1"):
        voted_slots(*args, **how | {"spans": how["spans"]._replace(size=0)})
