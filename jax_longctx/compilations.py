"""Compiled programs on the disk, which the next process finds again.

They lie in `jax_longctx` under the user's cache folder, the least recently used ones beyond
`MOST_BYTES` leave at the next start. `JAX_COMPILATION_CACHE_DIR` and `jax.config` win, and theirs
is left as it is; `JAX_ENABLE_COMPILATION_CACHE=false` turns all of it off.
"""

import os
from pathlib import Path

import jax

__all__ = ["keep_compilations"]

# Some ten methods on a large model, or a hundred on a small one.
MOST_BYTES = 2 * 1024**3


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
