"""The command line in this process."""

from tests.jax_longctx.cli.conftest import run

__all__ = ["run"]
