"""One writer at a time: a lock file beside the output; the kernel releases it with its holder."""

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from jax_longctx.errors import InputError
from jax_longctx.files import file_errors, folder_made, no_link

# Errors of file systems without locks, where writers go on without one.
UNLOCKED = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)


@contextlib.contextmanager
def only_writer(path: Path, taken: str | None = None) -> Iterator[None]:
    """Holds the right to write `path`, with a lock on the file `PATH.lock`.

    A killed process leaves the file but not the lock, so the next writer is not refused.

    Args:
      taken: the error where another process has the lock.

    Raises:
      InputError: another process is writing `path`, its folder cannot be written, or what is named
        `PATH.lock` is a link or no lock.
    """
    name = path.with_name(path.name + ".lock")
    with contextlib.ExitStack() as made:
        with file_errors(f"{path} cannot be written"):
            made.enter_context(folder_made(path.parent))
            held = _acquire(name)
        if held is None:
            said = f"another process is writing {path}; wait for it, or choose another name"
            raise InputError(taken or said)
        try:
            yield
        finally:
            # Deleted before the lock is released, so that no other holder's file is deleted.
            name.unlink(missing_ok=True)
            os.close(held)


def lock(held: int) -> bool:
    """Locks an open file until it is closed; False where somebody else has locked it."""
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in UNLOCKED:
            raise
    return True


def _acquire(name: Path) -> int | None:
    while True:
        held = no_link(str(name), os.O_RDWR | os.O_CREAT)
        try:
            found = os.fstat(held)
            if not stat.S_ISREG(found.st_mode) or found.st_size:
                raise InputError(f"{name} is in the way: it is no lock of a writer; move it")
            locked = lock(held)
            # The previous holder may have deleted this file, and another process made a new one.
            with contextlib.suppress(FileNotFoundError):
                if locked and os.path.samestat(os.stat(name), os.fstat(held)):
                    return held
        except BaseException:
            os.close(held)
            raise
        os.close(held)
        if not locked:
            return None
