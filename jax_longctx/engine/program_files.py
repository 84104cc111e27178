"""Compiled programs on the disk, of `stored` and of JAX's persistent cache.

A program is machine code, and JAX stores it as a pickle: whoever can write its file can run code in
this process. So folders and files must be this user's or root's, and nobody else may write to them
(`trusted`). A file begins with a digest of its name and its content. What is damaged, was stored
under another name or cannot be loaded is removed (`opened`), compiled again and stored again.

By itself JAX's cache runs any program under the wanted name, and never replaces a damaged one. A
cache in a bucket, or with a limit of its own, is left to JAX.
"""

import contextlib
import functools
import hashlib
import logging
import os
from pathlib import Path
from typing import Any

import jax
from jax._src import compilation_cache
from jax._src.compilation_cache_interface import CacheInterface
from jax._src.lru_cache import LRUCache

from jax_longctx.files import distrust, private_folder

_logger = logging.getLogger(__name__)
# Bytes of JAX's cache: some ten methods on a large model, or a hundred on a small one.
MOST_BYTES = 2 * 1024**3
# Most small files: each start looks at every one.
MOST_FILES = 20_000
# Folders with programs that are not used, as the log has said.
_told: set[Path] = set()


@functools.cache
def trusted(folder: Path, *, own: bool = False) -> bool:
    """Whether programs in the folder may run, which is made if need be; the log says why not."""
    try:
        private_folder(folder, 0o755, own=own)
    except OSError as error:
        advice = "let JAX_COMPILATION_CACHE_DIR name a folder that only you can write to"
        said = "the compilation cache %s is not used: %s; %s"
        _logger.warning(said, folder, error.strerror, advice)
        return False
    return True


def store(file: Path, content: bytes) -> None:
    """Writes a whole file, or none where it cannot be written."""
    partial = file.with_name(f"{file.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(_digest(file.name, content) + content)
        partial.chmod(0o644)
        partial.replace(file)
    except OSError as error:
        _logger.info("%s is not stored: %s", file, error)
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def opened(file: Path) -> bytes | None:
    """What was given to `store`; None where the file is not there, or is not used and removed."""
    try:
        why = distrust(file) or (None if file.is_file() else "it is no file")
        content = b"" if why else file.read_bytes()
    except OSError:
        # It is not there, or cannot be read now.
        return None
    size = hashlib.sha256().digest_size
    if not why and content[:size] != _digest(file.name, content[size:]):
        why = "it is damaged, or was stored under another name"
    return drop(file, why) if why else content[size:]


def drop(file: Path, why: Any) -> None:
    """Removes a program that is not used; the log tells of the first in each folder."""
    level = logging.INFO if file.parent in _told else logging.WARNING
    _told.add(file.parent)
    said = "the compiled program %s is not used: %s; it and others of its kind are compiled again"
    _logger.log(level, said, file, why)
    with contextlib.suppress(OSError):
        file.unlink(missing_ok=True)


def _digest(name: str, content: bytes) -> bytes:
    return hashlib.sha256(b"%b\0%b" % (name.encode(), content)).digest()


class SealedCache(CacheInterface):
    """JAX's persistent cache with sealed files. Damaged ones are compiled again and replaced."""

    def __init__(self, path: str):
        self._path = Path(path)

    def get(self, key: str) -> bytes | None:
        """The program, or None."""
        return opened(self._file(key)) if trusted(self._path) else None

    def put(self, key: str, value: bytes) -> None:
        """Stores a program."""
        if trusted(self._path):
            store(self._file(key), value)

    def _file(self, key: str) -> Path:
        return self._path / f"{key}-sealed-cache"


def _cache(path: str, *, max_size: int) -> CacheInterface:
    ours = "://" not in path and max_size == -1
    return SealedCache(path) if ours else LRUCache(path, max_size=max_size)


@functools.cache
def seal_cache() -> None:
    """From now on JAX's persistent cache in this process is a `SealedCache`."""
    # JAX has no option for it. A test notices a JAX that looks elsewhere.
    hooked: Any = compilation_cache
    hooked.LRUCache = _cache
    # A cache that was opened before is not sealed.
    compilation_cache.reset_cache()


def keep_compilations() -> None:
    """Turns on JAX's persistent compilation cache, in `jax_longctx` under the user's cache folder.

    Each start removes the least recently used programs beyond `MOST_BYTES`. A cache folder set by
    `JAX_COMPILATION_CACHE_DIR` or `jax.config` is used instead, and nothing is removed from it.
    `JAX_ENABLE_COMPILATION_CACHE=false` turns the cache off. None is used that others can write.
    """
    seal_cache()
    config: Any = jax.config
    if config.jax_compilation_cache_dir is not None or not config.jax_enable_compilation_cache:
        return
    folder = _cache_folder()
    if folder is not None:
        _make_room(folder)
        config.update("jax_compilation_cache_dir", str(folder))
        # JAX leaves out what compiles in less than a second. A first token needs some fifty such
        # programs, which are read in a tenth of the time.
        config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def _cache_folder() -> Path | None:
    """The cache folder; None where it is not trusted or cannot be written: JAX would warn."""
    try:
        # A user without a home has no cache.
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jax_longctx"
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        return None
    return folder if os.access(folder, os.W_OK | os.X_OK) and trusted(folder, own=True) else None


def _make_room(folder: Path) -> None:
    """Removes the least recently used files until both limits hold."""
    try:
        found = [(file, file.stat()) for file in folder.iterdir() if file.is_file()]
        left, count = sum(about.st_size for _, about in found), len(found)
        for file, about in sorted(found, key=lambda pair: max(pair[1].st_atime, pair[1].st_mtime)):
            if left <= MOST_BYTES and count <= MOST_FILES:
                return
            file.unlink(missing_ok=True)
            left, count = left - about.st_size, count - 1
    except OSError:
        # Another process removed a file meanwhile, or it belongs to another user: neither is an
        # error.
        return
