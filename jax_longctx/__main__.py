"""The command line's entry point: it handles Ctrl-C before it imports anything slow."""

import os

try:
    from jax_longctx.cli import process

    process.install()
except KeyboardInterrupt:
    # The handler that prints this was not installed yet.
    os.write(2, b"interrupted\n")
    os._exit(130)

from jax_longctx.cli.main import main

if __name__ == "__main__":
    main()
