"""One writer at a time: a lock file beside the output; the kernel releases it with its holder."""

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from jax_longctx.errors import InputError

# Errors of file systems without locks, where writers go on without one.
UNLOCKED = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)


@contextlib.contextmanager
def only_writer(path: Path) -> Iterator[None]:
    """Holds the right to write `path`, with a lock on the file `PATH.lock`.

    A killed process leaves the file but not the lock, so the next writer is not refused.

    Raises:
      InputError: another process is writing `path`, or its folder cannot be written.
    """
    lock = path.with_name(path.name + ".lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        held = _acquire(lock)
    except BlockingIOError:
        raise InputError(
            f"another process is writing {path}; wait for it, or choose another name"
        ) from None
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}") from error
    try:
        yield
    finally:
        # Deleted before the lock is released, so that no other holder's file is deleted.
        lock.unlink(missing_ok=True)
        os.close(held)


def _acquire(lock: Path) -> int:
    while True:
        held = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in UNLOCKED:
                    raise
            # The previous holder may have deleted this file, and another process made a new one.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.stat(lock), os.fstat(held)):
                    return held
        except BaseException:
            os.close(held)
            raise
        os.close(held)
