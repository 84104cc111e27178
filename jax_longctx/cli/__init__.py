"""The command line: one module a subcommand, each importing what it needs when it runs."""
