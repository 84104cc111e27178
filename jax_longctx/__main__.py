"""The command line's entry point: it hears Ctrl-C before anything heavy is imported."""

from jax_longctx.cli import ending

__all__ = ["main"]


def main() -> None:
    """The console script."""
    ending.install()
    from jax_longctx.cli.main import main as command_line

    command_line()


if __name__ == "__main__":
    main()
