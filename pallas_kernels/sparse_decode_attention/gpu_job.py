"""What every worker of the sparse decode on Hopper reads: steps of listed pages (see `gpu`)."""

from dataclasses import dataclass
from typing import Any

from jax.experimental import pallas as pl

from pallas_kernels import hopper, hopper_rows, hopper_slots
from pallas_kernels.hopper_stream import BLOCK, Stream
from pallas_kernels.sparse_decode_attention.lists import Pages

# Page ids of a worker's piece of a list pass through shared memory in lines of 16 bytes, the least
# that TMA copies, and in as many as one copy takes.
ID_LINE, ID_LINES = 4, 256


@dataclass(frozen=True, kw_only=True)
class Job:
    """The kernel's static arguments."""

    batch: int
    lists: int  # of a row
    kv_heads: int
    pages_of_head: int
    shared_pages: int  # of a head, of the slots that rows share; 0 where they share none
    group: int | None  # query heads of a kv head in a flat list; None for lists of one head
    page_size: int
    splits: int
    share: int  # steps of a worker at most
    listed: int  # ids of a list that lie whole in shared memory; 0 where those of a piece do
    before: int  # pages at the row's beginning that follow the listed ones
    after: int  # pages from the bound `stop` on that follow these
    first_page: int  # the page that is listed as 0
    stream: Stream

    @property
    def form(self) -> Any:
        return hopper_slots if self.stream.by_slots else hopper_rows

    @property
    def slots(self) -> int:
        """Slots of a row, shared and own."""
        return (self.pages_of_head + self.shared_pages) * self.page_size

    @property
    def pages(self) -> int:
        """Pages of a step."""
        return BLOCK // self.page_size


def cut_lists(pages: Pages, lists: int, length: int) -> dict[str, int]:
    """The job's numbers of a list's pieces: one worker a processor, and the ids of a piece fit."""
    around, before, after = pages.around, 0, 0
    if around is not None:
        before = pl.cdiv(around.before, pages.size)
        # They may begin at the end of a page.
        after = pl.cdiv(around.after - 1, pages.size) + 1 if around.after else 0
    steps = pl.cdiv((length + before + after) * pages.size, BLOCK)
    splits, whole = max(hopper.processors() // lists, 1), 1
    if around is None:
        splits = max(splits, pl.cdiv(length, ID_LINE * ID_LINES))
        # Pieces begin at whole lines of ids.
        whole = max(1, ID_LINE * pages.size // BLOCK)
    share = pl.cdiv(pl.cdiv(steps, min(splits, steps)), whole) * whole
    listed = 0 if around is None else length
    return dict(
        splits=pl.cdiv(steps, share), share=share, listed=listed, before=before, after=after
    )
