"""The command line's entry point: it hears Ctrl-C before anything heavy is imported."""

import os


def main() -> None:
    """The console script."""
    try:
        from jax_longctx.cli import process

        process.install()
    except KeyboardInterrupt:
        # The handler that says so was not there yet.
        os.write(2, b"interrupted\n")
        os._exit(130)
    from jax_longctx.cli.main import main as command_line

    command_line()


if __name__ == "__main__":
    main()
