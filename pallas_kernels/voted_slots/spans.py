"""Which slots are listed around the most named ones."""

from typing import NamedTuple


class Spans(NamedTuple):
    """The spans around the most named slots, behind the first ones.

    The span around slot s is s - size // 2 and the `size - 1` slots after that. A page p stands for
    its middle, slot p page + page // 2.

    Attributes:
      kept: how many named ones stay at most.
      size: slots of a span.
      first: slots at the row's beginning that are always listed.
      page: slots of what is named.
    """

    kept: int
    size: int
    first: int
    page: int = 1
