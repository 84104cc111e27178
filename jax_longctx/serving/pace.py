"""How prefill and decode share the devices.

While rows decode, a text is prefilled in slices. A slice ends with the first chunk after
`READ_SECONDS`, so that tokens wait no longer than for a slice, a chunk and a block. Decode then
gets a quarter of that time, so that prefill keeps four fifths of its speed, unless one step takes
longer.
"""

from jax_longctx.engine.engine import BLOCK

# Seconds of joins and prefill between two blocks of decode steps.
READ_SECONDS = 0.08
# Decode's time beside a prefill, as a share of the prefill's.
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
        """Updates the smoothed seconds per step."""
        self._step = max(1e-4, (self._step + seconds / max(1, steps)) / 2)
