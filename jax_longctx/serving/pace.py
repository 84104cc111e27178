"""How reading and decoding share the devices.

While rows decode, a text is read in slices. A slice ends with the first chunk after `READ_SECONDS`,
so that tokens wait no longer than for a slice, a chunk and a block. Decoding then gets a quarter of
what the slice took, so that reading keeps four fifths of its speed, unless one step takes longer.
"""

from jax_longctx.engine.engine import BLOCK

# Seconds of joins and reading between two blocks of decode steps.
READ_SECONDS = 0.08
# Decoding's share of the time while a text is read: a quarter of what reading takes.
DECODE_SHARE = 0.25
# Seconds of a decode block: rows join and tokens arrive as often.
BLOCK_SECONDS = 0.03


class Pace:
    """Says how many steps to decode, from the time that steps took."""

    def __init__(self) -> None:
        self._step = BLOCK_SECONDS

    def steps(self, read: float | None = None) -> int:
        """Steps of the next block, after a slice that took `read` seconds, or without one."""
        block = BLOCK_SECONDS if read is None else min(BLOCK_SECONDS, DECODE_SHARE * read)
        return max(1, min(BLOCK, int(block / self._step)))

    def took(self, seconds: float, steps: int) -> None:
        """Counts a block of so many steps; one that compiled counts little after a few others."""
        self._step = max(1e-4, (self._step + seconds / max(1, steps)) / 2)
