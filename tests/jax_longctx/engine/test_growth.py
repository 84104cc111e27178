"""What grows with the slots: layer by layer, and not where something leaves instead."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_longctx.engine.capacity import grow
from jax_longctx.sharding import OwnAxis, axes_field, leaf_axes, tree_specs


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Paged:
    """Slots, what is kept of each page of them, and a list whose axis is its own."""

    slots: Any = axes_field("batch", "slots")
    pages: Any = axes_field("batch", "pages")
    listed: Any = axes_field(OwnAxis("axis"), None)
    axis: str | None = dataclasses.field(default="budget", metadata={"static": True})


def paged(slots, pages, listed=3, axis="budget"):
    arrays = (jnp.ones((2, slots)), jnp.ones((2, pages)), jnp.ones((listed, 5)))
    return Paged(*arrays, axis)


def sizes(cache):
    return cache.slots.shape[1], cache.pages.shape[1], cache.listed.shape[0]


def test_a_page_is_of_its_own_layer():
    caches = (paged(256, 16), paged(256, 32), paged(512, 4))
    grown = grow(caches, 128)
    assert [sizes(cache) for cache in grown] == [(384, 24, 3), (384, 48, 3), (640, 5, 3)]
    for old, new in zip(jax.tree.leaves(caches), jax.tree.leaves(grown), strict=True):
        kept = new[tuple(map(slice, old.shape))]
        np.testing.assert_array_equal(kept, old)
        assert new.sum() == old.sum()


def test_an_axis_that_each_cache_names_itself():
    for axis, size in [("budget", 3), (None, 3), ("room", 131), ("share", 131)]:
        cache = paged(256, 16, axis=axis)
        assert leaf_axes((cache,))[-1] == (axis, None)
        assert tree_specs(cache).axis == axis
        (grown,) = grow((cache,), 128)
        assert (grown.listed.shape[0], grown.axis) == (size, axis)


def test_a_share_stays_a_share_in_whole_granules():
    """300 of 512 slots; 640 more need 375 more, 3 granules."""
    (grown,) = grow((paged(512, 4, 300, "share"),), 640)
    assert grown.listed.shape[0] == 300 + 384


@pytest.mark.parametrize(
    ("cache", "said"),
    [
        (paged(256, 24), "layer 1: 256 slots in 24 pages, and 128 slots more, are not whole pages"),
        (paged(512, 2), "layer 1: 512 slots in 2 pages, and 128 slots more, are not whole pages"),
        (
            dataclasses.replace(paged(256, 16), slots=None),
            r"layer 1: axis 'pages' of 16 is measured by one number of slots, the cache has \[\]",
        ),
    ],
    ids=["slots", "more", "none"],
)
def test_pages_that_are_not_whole_are_refused(cache, said):
    with pytest.raises(ValueError, match=said):
        grow((paged(256, 16), cache), 128)
