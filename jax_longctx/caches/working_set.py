"""The working set of a store: the page in each frame on the device.

Rows have frames of their own, and so has every kv head where heads choose apart. A page that is
wanted and has no frame takes the one that was not used for longest. There are as many frames as one
step wants pages, at least, so no page leaves that the same step wants.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jax_longctx.caches.append_only import Rewinding
from jax_longctx.contract import LayerContext
from jax_longctx.sharding import OwnAxis, axes_field

# What is counted, from one fork to the next.
_COUNTS = ("steps", "hits", "misses", "waited")


class Fetches(NamedTuple):
    """Pages that are wanted, by row and group; those that are `new` are to be fetched.

    `rank` is the number of new ones before an entry, in its row and group.
    """

    pages: Int[Array, "B X M"]
    frames: Int[Array, "B X M"]
    new: Bool[Array, "B X M"]
    rank: Int[Array, "B X M"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WorkingSet(Rewinding):
    """Frames and the pages in them, for all heads (X = 1) or for each kv head.

    Attributes:
      group: the logical axis of X.
      frame: the frame of each page, from 1 on, and 0 for none.
      page_in: the page in each frame, -1 for none.
      used: the step that used a frame last.
      clock: steps of the row.
      steps: decode steps since the last fork.
      hits, misses: pages that these chose, and that had a frame or had none.
      waited: steps with a miss.
    """

    group: str | None = dataclasses.field(metadata={"static": True})
    frame: Int[Array, "B X P"] = axes_field("batch", OwnAxis("group"), "pages")
    page_in: Int[Array, "B X W"] = axes_field("batch", OwnAxis("group"), None)
    used: Int[Array, "B X W"] = axes_field("batch", OwnAxis("group"), None)
    clock: Int[Array, " B"] = axes_field("batch")
    steps: Int[Array, " B"] = axes_field("batch")
    hits: Int[Array, " B"] = axes_field("batch")
    misses: Int[Array, " B"] = axes_field("batch")
    waited: Int[Array, " B"] = axes_field("batch")

    @property
    def apart(self) -> bool:
        """Whether kv heads choose apart; a shard may have one of them."""
        return self.group is not None

    @property
    def pages(self) -> int:
        """Pages of a row."""
        return self.frame.shape[2]

    @property
    def count(self) -> int:
        """Frames of a row, or of its kv head."""
        return self.page_in.shape[2]

    def rewind(self) -> Any:
        """The same frames, whose pages do not change; counts begin anew."""
        zeros = {name: jnp.zeros_like(self.steps) for name in _COUNTS}
        return dataclasses.replace(self, **zeros)

    def emptied(self, row: Any, rows: int) -> "WorkingSet":
        """The same without the pages of `rows` rows from `row` on."""

        def put(x: Array, value: int) -> Array:
            new = jnp.full((rows, *x.shape[1:]), value, x.dtype)
            return jax.lax.dynamic_update_slice_in_dim(x, new, row, axis=0)

        zeros = {n: put(getattr(self, n), 0) for n in ("frame", "used", "clock", *_COUNTS)}
        return dataclasses.replace(self, page_in=put(self.page_in, -1), **zeros)

    def frames_of(self, pages: Int[Array, "B Y C"]) -> Int[Array, "B Z C"]:
        """The frame of each page, -1 for none; one list (Z = 1) for heads that choose together."""
        found = _of_groups(self.frame, self._grouped(pages)) - 1
        return found.reshape(found.shape[0], -1, pages.shape[2])

    def taken(
        self, pages: Int[Array, "B Y C"], valid: Int[Array, " B"], ctx: LayerContext, *, step: bool
    ) -> tuple["WorkingSet", Fetches]:
        """The working set with frames for all of these pages, -1 for none.

        Args:
          pages: lists of all heads, of each kv head or of each query head.
          valid: tokens of each row; a row without any has no pages.
          step: whether this is a decode step, which is counted.
        """
        wanted = self._grouped(pages)
        at = _of_groups(self.frame, wanted) - 1
        entry = jnp.arange(wanted.shape[2])
        same = wanted[..., :, None] == wanted[..., None, :]
        earlier = entry < entry[:, None]
        first = (wanted >= 0) & ~jnp.any(same & earlier, axis=-1)
        hit, new = first & (at >= 0), first & (at < 0)
        clock = self.clock + (valid > 0)
        now = jnp.broadcast_to(clock[:, None, None], wanted.shape)
        used = _put(self.used, at, now, hit)
        # Frames in the order of use. Those of this step's hits come last, and there are enough.
        oldest = jax.lax.top_k(-used, min(wanted.shape[2], self.count))[1]
        # Not `cumsum`, whose windows of windows compile for seconds on GPUs.
        rank = jnp.sum(new[..., None, :] & earlier, axis=-1, dtype=jnp.int32)
        frame = jnp.take_along_axis(oldest, jnp.minimum(rank, oldest.shape[2] - 1), axis=2)
        leaving = jnp.take_along_axis(self.page_in, frame, axis=2)
        table = _put(self.frame, leaving, jnp.zeros_like(frame), new & (leaving >= 0))
        tables = {
            "frame": _put(table, wanted, frame + 1, new),
            "page_in": _put(self.page_in, frame, wanted, new),
            "used": _put(used, frame, now, new),
        }
        counts: dict[str, Any] = {}
        if step:
            hits, misses = (jnp.sum(x, axis=(1, 2), dtype=jnp.int32) for x in (hit, new))
            if self.apart:
                hits, misses = ctx.psum_heads(hits), ctx.psum_heads(misses)
            counted = {"steps": valid > 0, "hits": hits, "misses": misses, "waited": misses > 0}
            counts = {name: getattr(self, name) + x for name, x in counted.items()}
        after = dataclasses.replace(self, clock=clock, **tables, **counts)
        return after, Fetches(wanted, frame, new, rank)

    def _grouped(self, pages: Int[Array, "B Y C"]) -> Int[Array, "B X M"]:
        """The lists of the heads of each group as one. Heads that choose together have the same."""
        if not self.apart:
            return pages[:, :1]
        return pages.reshape(pages.shape[0], self.frame.shape[1], -1)


def empty_working_set(
    batch: int, groups: int, pages: int, frames: int, group: str | None
) -> WorkingSet:
    """Frames without pages, of `groups` groups of heads along the logical axis `group`."""
    table = (batch, groups)
    # An array for each field: a donated buffer may be named once.
    counts = {name: jnp.zeros((batch,), jnp.int32) for name in ("clock", *_COUNTS)}
    return WorkingSet(
        group=group,
        frame=jnp.zeros((*table, pages), jnp.int32),
        page_in=jnp.full((*table, frames), -1, jnp.int32),
        used=jnp.zeros((*table, frames), jnp.int32),
        **counts,
    )


def _of_groups(table: Int[Array, "B X P"], pages: Int[Array, "B X M"]) -> Int[Array, "B X M"]:
    return jnp.take_along_axis(table, jnp.clip(pages, 0, table.shape[2] - 1), axis=2)


def _put(
    table: Int[Array, "B X P"],
    at: Int[Array, "B X M"],
    new: Int[Array, "B X M"],
    where: Bool[Array, "B X M"],
) -> Int[Array, "B X P"]:
    """The table with `new` at the indices `at`, of those entries where `where` says so."""
    batch, groups, size = table.shape
    line = jnp.arange(batch * groups).reshape(batch, groups, 1) * size + at
    line = jnp.where(where, line, table.size)
    flat = table.reshape(-1).at[line.reshape(-1)].set(new.reshape(-1), mode="drop")
    return flat.reshape(table.shape)
