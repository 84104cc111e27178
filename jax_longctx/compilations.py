"""Compiled programs: on the disk, where the next process finds them, and in memory.

On the disk they lie in `jax_longctx` under the user's cache folder, the least recently used ones
beyond `MOST_BYTES` leave at the next start. `JAX_COMPILATION_CACHE_DIR` and `jax.config` win, and
theirs is left as it is; `JAX_ENABLE_COMPILATION_CACHE=false` turns all of it off.

In memory JAX keeps every program. On a CPU each program takes tens of memory mappings, of which
Linux gives a process 65,530: twenty methods at a few text lengths use them up, and then LLVM ends
the process. `limit_mappings` drops all programs before that.
"""

import logging
import os
from pathlib import Path

import jax
import jax.monitoring

__all__ = ["keep_compilations", "limit_mappings"]

# Some ten methods on a large model, or a hundred on a small one.
MOST_BYTES = 2 * 1024**3
# This process's mappings, one a line, and the most that a process may have. Only Linux has them.
MAPPINGS, MOST_MAPPINGS = Path("/proc/self/maps"), Path("/proc/sys/vm/max_map_count")

_logger = logging.getLogger(__name__)
# Counting mappings takes milliseconds: it is done when JAX has told this often that it traced or
# compiled something, which is some twenty programs.
EVENTS = 60
_events = 0


def _on_compilation(event: str, duration_secs: float, **kwargs: str | int) -> None:
    global _events
    _events += 1


jax.monitoring.register_event_duration_secs_listener(_on_compilation)


def limit_mappings() -> None:
    """Drops all compiled programs once this process uses half of its memory mappings.

    A dropped program is compiled again, or read from the disk, when it is next called. Call this
    outside of traced functions, before work that may compile.
    """
    global _events
    if _events < EVENTS or not MAPPINGS.exists():
        return
    _events = 0
    used, most = MAPPINGS.read_bytes().count(b"\n"), int(MOST_MAPPINGS.read_text())
    if used > most // 2:
        _logger.info("dropping all compiled programs: %d of %d mappings in use", used, most)
        jax.clear_caches()


def keep_compilations() -> None:
    """Programs compiled once are found again, unless JAX was told where or nothing can be kept."""
    if jax.config.jax_compilation_cache_dir is not None:
        return
    if not jax.config.jax_enable_compilation_cache:
        return
    folder = _folder()
    if folder is not None:
        _make_room(folder, MOST_BYTES)
        jax.config.update("jax_compilation_cache_dir", str(folder))


def _folder() -> Path | None:
    """Where programs may be kept; None where that cannot be written, which JAX would warn of."""
    try:
        # A user without a home has no cache.
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jax_longctx"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        return None
    return folder if os.access(folder, os.W_OK | os.X_OK) else None


def _make_room(folder: Path, most: int) -> None:
    """Removes what was used least recently until `most` bytes are left, as far as it may."""
    try:
        found = [(file, file.stat()) for file in folder.iterdir() if file.is_file()]
        left = sum(about.st_size for _, about in found)
        for file, about in sorted(found, key=lambda pair: max(pair[1].st_atime, pair[1].st_mtime)):
            if left <= most:
                return
            file.unlink(missing_ok=True)
            left -= about.st_size
    except OSError:
        # Another process removed one meanwhile and makes room itself, or it is another user's: no
        # reason not to begin.
        return
