"""Programs stored on the disk, for tests that start anew within one process."""

import contextlib

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jax_longctx.engine import ahead, stored
from jax_longctx.engine.compiling import forget


@contextlib.contextmanager
def storing(folder):
    """Programs are stored in the folder, on a CPU too.

    Without JAX's own cache: what XLA for CPUs has read from it cannot be stored again.
    """
    enabled = jax.config.jax_enable_compilation_cache
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored, "folder", lambda mesh: folder)
        jax.config.update("jax_enable_compilation_cache", False)
        # JAX asks once in a process whether it has a cache.
        compilation_cache.reset_cache()
        forget()
        try:
            yield folder
        finally:
            jax.config.update("jax_enable_compilation_cache", enabled)
            compilation_cache.reset_cache()
            forget()


@contextlib.contextmanager
def lowerings():
    """The names of the programs that are lowered meanwhile."""
    names, lower = [], ahead.lower

    def record(program, args):
        names.append(program.__name__)
        return lower(program, args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ahead, "lower", record)
        yield names
