"""The slots of most votes, of the slots that queries name.

A chunk's votes are counted in an array of the cache's length. A single token's few votes are
compared with each other, at a cost that does not depend on the length. For 32 heads, k = 4 and
131,072 slots, the votes and the spans around the kept slots take 16 us for a token on an H200. For
a chunk of 512 they took 80, of which the sort of all slots was 60; two kernels have taken the place
of this sort (`_best_by_page`). They take 6% off reading 131,072 tokens through 8 layers of the 8B
shape: 2.17 s in place of 2.30.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jax_longctx.contract import LayerContext
from pallas_kernels.dispatch import platform
from pallas_kernels.select_large_k import in_one_launch, select_large_k
from pallas_kernels.voted_slots import most_voted as most_voted_of_few

_LAST = jnp.iinfo(jnp.int32).max
# Slots of a page and entries of a block, where votes are counted by matmul.
_LANES, _VOTES = 128, 4096
# Rows of at least this many slots rank their pages first.
_MANY = 2**18
# Added to numbers of votes: the least float32 whose next one is 1 above it.
_BASE = 2**23


def most_voted(
    named: Int[Array, "B T N C"], slots: int, kept: int, ctx: LayerContext
) -> Int[Array, "B M"]:
    """The `kept` slots of most votes and -1s; `slots` is the length of the cache.

    They ascend, with -1 last. A lone token's are in any order, in as many places as it names.
    """
    if named.shape[1] == 1:
        every = ctx.gather_heads(named, axis=2)
        return most_voted_of_few(every.reshape(len(named), -1), kept)
    votes_BS = ctx.psum_heads(_tally(named.reshape(named.shape[0], -1), slots))
    if platform() == "tpu":
        ranked_BS = jnp.where(votes_BS > 0, votes_BS.astype(jnp.float32), -jnp.inf)
        return select_large_k(ranked_BS, kept, size=kept)
    page = _page_size(slots, min(kept, slots), named.size)
    if page is not None:
        return _best_by_page(votes_BS, min(kept, slots), page)
    # On an H200 `select_large_k` takes 0.41 ms for these slots, a launch for each counting pass;
    # this takes 0.06.
    most_BM, slots_BM = _most(votes_BS, min(kept, slots))
    ascending_BM = jnp.sort(jnp.where(most_BM > 0, slots_BM, _LAST), axis=-1)
    return jnp.where(ascending_BM == _LAST, -1, ascending_BM)


def _page_size(slots: int, kept: int, votes: int) -> int | None:
    """Slots of a page for `_best_by_page`, 1 for slots alone; None where it should not be used.

    It is for devices that list the best of a short row by one kernel.
    """
    if votes >= _BASE:
        return None
    if in_one_launch(slots, kept):
        return 1
    sizes = [
        2**i
        for i in range(1, slots.bit_length())
        if slots % 2**i == 0 and all(in_one_launch(x, kept) for x in (slots >> i, kept << i))
    ]
    return min(sizes, key=lambda size: slots // size + kept * size, default=None)


def _best_by_page(votes: Int[Array, "B S"], kept: int, page: int) -> Int[Array, "B M"]:
    """The `kept` slots of most votes, ascending, then -1; two kernels list them.

    They lie in the `kept` pages that rank first by their most votes, then by their number: each
    page that ranks before a slot's own holds a slot that ranks before it.
    """
    # From `_BASE` on the numbers of float32 are the whole numbers: those of the votes are
    # neighbours, and a search among the bits is short.
    ranked_BS = jnp.where(votes > 0, votes.astype(jnp.float32) + _BASE, -jnp.inf)
    best = functools.partial(select_large_k, k=kept, size=kept, least=_BASE + 1.0)
    if page == 1:
        return best(ranked_BS)
    pages_BPZ = ranked_BS.reshape(len(votes), -1, page)
    first_BM = best(jnp.max(pages_BPZ, axis=-1))
    listed_BMZ = jnp.take_along_axis(pages_BPZ, jnp.maximum(first_BM, 0)[..., None], axis=1)
    listed_BMZ = jnp.where(first_BM[..., None] >= 0, listed_BMZ, -jnp.inf)
    # Ascending pages: ties go to the lower slot.
    at_BM = best(listed_BMZ.reshape(len(votes), -1))
    page_BM = jnp.take_along_axis(first_BM, jnp.maximum(at_BM, 0) // page, axis=1)
    return jnp.where(at_BM < 0, -1, page_BM * page + at_BM % page)


def _most(votes: Int[Array, "B S"], count: int) -> tuple[Int[Array, "B M"], Int[Array, "B M"]]:
    """`lax.top_k`, which sorts all slots; where there are many, only the best pages' slots.

    The `count` best slots lie in the `count` best pages, as in `_best_by_page`.
    """
    batch, slots = votes.shape
    if slots < _MANY or slots % _LANES or count > slots // _LANES:
        most_BM, at_BM = jax.lax.top_k(votes, count)
        return most_BM, at_BM
    pages_BPZ = votes.reshape(batch, -1, _LANES)
    best_BM = jnp.sort(jax.lax.top_k(jnp.max(pages_BPZ, axis=-1), count)[1], axis=-1)
    # Ascending pages: ties go to the lower slot here too.
    listed_BMZ = jnp.take_along_axis(pages_BPZ, best_BM[..., None], axis=1)
    most_BM, at_BM = jax.lax.top_k(listed_BMZ.reshape(batch, -1), count)
    page_BM = jnp.take_along_axis(best_BM, at_BM // _LANES, axis=1)
    return most_BM, page_BM * _LANES + at_BM % _LANES


def _tally(named: Int[Array, "B E"], slots: int) -> Int[Array, "B S"]:
    """How often each slot is named."""
    batch, entries = named.shape
    if platform() != "tpu":
        # `drop` drops an index past the end; a negative one would wrap around.
        at_BE = jnp.where(named < 0, slots, named)
        rows_B1 = jnp.arange(batch)[:, None]
        return jnp.zeros((batch, slots), jnp.int32).at[rows_B1, at_BE].add(1, mode="drop")
    # A TPU scatters single elements slowly. The page and the place of every entry become one-hot
    # rows; their product counts the pairs exactly (float32 sums below 2^24).
    pages_P, places_Z = jnp.arange(-(-slots // _LANES)), jnp.arange(_LANES)
    spare = -entries % min(_VOTES, entries)
    padded_BE = jnp.pad(named, ((0, 0), (0, spare)), constant_values=-1)
    blocks_BXE = padded_BE.reshape(batch, -1, min(_VOTES, entries))

    def add(votes_BPZ: Array, block_BE: Array) -> tuple[Array, None]:
        page_BEP = (block_BE[..., None] // _LANES == pages_P).astype(jnp.bfloat16)
        place_BEZ = (block_BE[..., None] % _LANES == places_Z).astype(jnp.bfloat16)
        pairs_BPZ = jnp.einsum(
            "BEP,BEZ->BPZ", page_BEP, place_BEZ, preferred_element_type=jnp.float32
        )
        return votes_BPZ + pairs_BPZ, None

    empty_BPZ = jnp.zeros((batch, len(pages_P), _LANES), jnp.float32)
    votes_BPZ, _ = jax.lax.scan(add, empty_BPZ, jnp.swapaxes(blocks_BXE, 0, 1))
    return votes_BPZ.reshape(batch, -1)[:, :slots].astype(jnp.int32)
