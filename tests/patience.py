"""How long tests wait, on a machine that may be slow or busy.

A bound in seconds is of a fast machine at rest. `patience` scales it to this machine as it is now,
by a fixed piece of work that is timed anew every half minute.
"""

import time

__all__ = ["patience"]

# What the piece takes on a fast machine at rest.
_REFERENCE = 0.1
_ROUNDS = 3_500_000
_LASTS = 30.0
_measured: tuple[float, float] | None = None


def patience(seconds: float) -> float:
    """The seconds to allow now for what takes less than `seconds` on a fast machine at rest."""
    return seconds * _slowness()


def _slowness() -> float:
    """How many times longer than there a fixed piece of work takes; at least 1."""
    global _measured
    now = time.monotonic()
    if _measured is None or now - _measured[0] > _LASTS:
        _measured = now, max(1.0, max(_piece(), _piece()) / _REFERENCE)
    return _measured[1]


def _piece() -> float:
    begun, total = time.monotonic(), 0
    for number in range(_ROUNDS):
        total += number & 7
    assert total
    return time.monotonic() - begun
