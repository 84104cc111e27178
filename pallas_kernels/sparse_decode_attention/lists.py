"""Arguments and results as the Mosaic kernels see them: entries of pages, rows of queries.

A kernel takes lists of entries (kv head x pages of a head + page), -1 for none. For each list it
takes the query rows that attend to it, [L,R]; L is 2 with a prior's query, else 1. The list of a
head, kv or query, has R query heads that follow each other. The flat list of a batch row has all
query heads, ordered by kv head; a row counts only the entries of its own kv head.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from pallas_kernels.common import AnyCache, PerRow


@partial(jax.tree_util.register_dataclass, data_fields=("length",), meta_fields=("before", "after"))
@dataclass(frozen=True)
class Around:
    """The slots around those that may be listed: below `start`, and from `stop` up to `length`.

    Attributes:
      length: [B], at most the cache's slots.
      before, after: the most slots below `start`, and from `stop` on, of any row.
    """

    length: PerRow
    before: int
    after: int


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("listed", "start", "stop", "heads", "around"),
    meta_fields=("size", "first"),
)
@dataclass(frozen=True)
class Pages:
    """The slots s that are attended: of the listed pages s // size, start[b] <= s < stop[b].

    Attributes:
      listed: lists [B,X,C]: for X = K one for each kv head's group, for X = N one for each query
        head, for X = 1 one for all heads; a page is at most once in a list, and -1 is no page.
        With size 1 they are slots. With `heads` one flat list [B,E] a row.
      start, stop: [B]; the slots outside may hold anything.
      heads: entry e of row b is page listed[b,e] of kv head heads[b,e], in any order and at most
        once in a row; -1 in either is no entry.
      around: slots to attend beside the listed ones, where `takes_around` says that it can be.
      first: the page that is listed as 0. Not with a flat list or shared slots.
    """

    listed: Int[Array, "B X C"] | Int[Array, "B E"]
    start: PerRow
    stop: PerRow
    size: int
    heads: Int[Array, "B E"] | None = None
    around: Around | None = None
    first: int = 0


class Shared(NamedTuple):
    """The slots below `split`, which rows share. Slot s of a row is its own slot s - split.

    Attributes:
      k, v: of one row, [1,K,S,H].
      split: a multiple of the page size, so that every page lies on one side.
    """

    k: AnyCache
    v: AnyCache
    split: Int[Array, " 1"]


def lists_of(pages: Int[Array, "B X C"], kv_heads: int) -> int:
    """The number of lists: one for all heads is one for each kv head."""
    return kv_heads if pages.shape[1] == 1 else pages.shape[1]


def entries_of(pages: Pages, kv_heads: int, pages_of_head: int) -> Int[Array, "B X C"]:
    """The entries of lists [B,X,C] of a kv or a query head each; of flat ones [B,E] with X = 1."""
    listed, heads = pages.listed, pages.heads
    if heads is None:
        heads = (jnp.arange(listed.shape[1]) * kv_heads // listed.shape[1])[:, None]
    named = (heads >= 0) & (heads < kv_heads) & (listed >= 0) & (listed < pages_of_head)
    entries = jnp.where(named, heads * pages_of_head + listed, -1).astype(jnp.int32)
    return entries if pages.heads is None else entries[:, None]


def rows_of(
    q: Float[Array, "B 1 N H"], prior_query: Float[Array, "B 1 N H"] | None, lists: int
) -> Float[Array, "B X M H"]:
    """The M = L R query rows of every list: the queries, then the prior's."""
    each = [x.reshape(x.shape[0], lists, -1, x.shape[3]) for x in (q, prior_query) if x is not None]
    return each[0] if len(each) == 1 else jnp.concatenate(each, axis=2)


def results_of(
    out: Float[Array, "B X M H"], lse: Float[Array, "B X M"], q: Float[Array, "B 1 N H"]
) -> tuple[Array, ...]:
    """(out, lse) of the queries and then of the prior's, whose out is in float32."""
    batch, lists, _, head_dim = out.shape
    rows = q.shape[2] // lists
    shape = batch, lists, -1, rows
    results = []
    for i in range(out.shape[2] // rows):
        dtype = jnp.float32 if results else q.dtype
        results += [
            out.reshape(*shape, head_dim)[:, :, i].reshape(q.shape).astype(dtype),
            lse.reshape(shape)[:, :, i].reshape(q.shape[:3]),
        ]
    return tuple(results)
