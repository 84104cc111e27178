"""A limit on the memory mappings that compiled programs take on a CPU."""

import logging
from pathlib import Path

import jax
import jax.monitoring

from jax_longctx.engine.compiling import forget

# This process's mappings, one a line, and the most that a process may have. Only Linux has them.
MAPPINGS, MOST_MAPPINGS = Path("/proc/self/maps"), Path("/proc/sys/vm/max_map_count")
_logger = logging.getLogger(__name__)
# Counting mappings takes milliseconds. So it is done once in this many of JAX's events of tracing,
# lowering and compiling, which is about once in twenty programs.
COUNTED = 60
_events = 0


def _on_compilation(event: str, duration_secs: float, **kwargs: str | int) -> None:
    global _events
    _events += 1


jax.monitoring.register_event_duration_secs_listener(_on_compilation)


def limit_mappings() -> None:
    """Drops all compiled programs once this process uses half of its memory mappings.

    JAX keeps every program. On a CPU each takes tens of memory mappings, of which Linux gives a
    process 65,530: twenty methods at a few text lengths use them up, and then LLVM ends the
    process. A dropped program is compiled again, or read from the disk, when it is next called.
    Call this outside of traced functions, before work that may compile.
    """
    global _events
    if _events < COUNTED or not MAPPINGS.exists():
        return
    _events = 0
    used, most = MAPPINGS.read_bytes().count(b"\n"), int(MOST_MAPPINGS.read_text())
    if used > most // 2:
        _logger.info("dropping all compiled programs: %d of %d mappings in use", used, most)
        forget()
