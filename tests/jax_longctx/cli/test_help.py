"""Help is fast and teaches; commands that do not parse say so in one line."""

import pytest
from typer.testing import CliRunner

from jax_longctx.cli.main import app
from jax_longctx.cli.process import CODES

COMMANDS = ["ask", "generate", "batch", "serve", "plan", "warm", "convert", "methods", "demo"]
COMMANDS += ["lm-eval"]


def run(*args):
    return CliRunner().invoke(app, list(args))


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_has_an_example(command):
    result = run(command, "--help")
    assert result.exit_code == 0
    assert f"jax-longctx {command} " in " ".join(result.stdout.split())


def test_every_exit_code_is_in_the_help():
    shown = " ".join(run("--help").stdout.split())
    assert all(f"{code} {what}" in shown for code, what in CODES.items())


def test_no_arguments_shows_every_command():
    result = run()
    for command in COMMANDS:
        assert command in result.output


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["ask"], "error: Missing option '--checkpoint' / '-c'; see 'jax-longctx ask --help'"),
        (["aks"], "error: No such command 'aks'. Did you mean 'ask'?; see 'jax-longctx --help'"),
        (["ask", "a", "--nonsense"], "error: No such option: --nonsense"),
        (["ask", "a", "q", "--top-k", "many", "-c", "x"], "error: Invalid value for '--top-k'"),
        (["demo", "--tokens", "many"], "error: Invalid value for '--tokens'"),
    ],
)
def test_usage_errors_are_one_line(args, message):
    result = run(*args)
    assert result.exit_code == 2
    assert result.stderr.startswith(message)
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""
