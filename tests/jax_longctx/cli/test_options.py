import dataclasses
import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from jax_longctx import api, memory
from jax_longctx.cli import options
from jax_longctx.cli.main import app
from jax_longctx.cli.options import ModelChoice, argument, only, option
from jax_longctx.cli.terminal import Terminal
from jax_longctx.errors import InputError
from jax_longctx.planning.plan import on_best_mesh
from jax_longctx.planning.targets import CHIPS
from jax_longctx.run_spec import RunSpec
from tests.jax_longctx.cli.conftest import refused


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cooked:
    PANEL = "Kitchen"

    dish: str = option("What it is.", "--dish", "-d", default=...)
    minutes: int = option("How long.", default=5, min=1)
    salted: bool = option("With salt.", default=True)
    sides: list[str] | None = option("Beside it; may be repeated.", "--side")

    def __post_init__(self):
        if self.dish == "stone":
            raise InputError("a stone is no dish")


@options.command
def cook(
    cooked: Cooked,
    guests: list[str] = argument("Who eats.", default=...),
    table: int = option("Its number.", default=1),
):
    """Cook for guests."""
    print(json.dumps([dataclasses.asdict(cooked), guests, table]))


@options.command
def serve(cooked: Cooked = only("dish")):
    print(json.dumps(dataclasses.asdict(cooked)))


@pytest.fixture
def invoke():
    app = typer.Typer()
    app.command()(cook)
    app.command()(serve)
    return lambda *args: CliRunner().invoke(app, list(args))


def test_fields_are_options_below_their_heading_and_the_dataclass_comes_whole(invoke):
    found = invoke("cook", "-d", "soup", "Ann", "Bob", "--no-salted", "--side", "a", "--side", "b")
    cooked = {"dish": "soup", "minutes": 5, "salted": False, "sides": ["a", "b"]}
    assert json.loads(found.stdout) == [cooked, ["Ann", "Bob"], 1]
    # Only some fields may be options.
    assert json.loads(invoke("serve", "-d", "soup").stdout)["minutes"] == 5
    assert invoke("serve", "-d", "soup", "--minutes", "3").exit_code == 2
    shown = invoke("cook", "--help").stdout
    assert "Cook for guests." in shown
    kitchen = shown[shown.index("Kitchen") :]
    for text in ("--dish", "-d", "What it is.", "--minutes", "--no-salted", "--side"):
        assert text in kitchen
    assert "--table" in shown[: shown.index("Kitchen")] and "Who eats." in shown
    assert "--minutes" not in invoke("serve", "--help").stdout


def test_names_types_bounds_and_what_fields_allow_together_are_checked(invoke):
    for args, message in [
        ("cook Ann", "Missing option '--dish' / '-d'"),
        ("cook Ann -d soup --minutes 0", "greater than or equal to 1"),
        ("cook Ann -d soup --minutes few", "a valid integer"),
        ("cook -d soup", "Missing argument"),
    ]:
        result = invoke(*args.split())
        said = " ".join(result.output.replace("│", " ").split())
        assert result.exit_code == 2 and message in said, said
    assert isinstance(invoke("cook", "Ann", "-d", "stone").exception, InputError)


def test_a_file_to_write_is_named_alike_everywhere():
    def commands(group):
        for each in group.commands.values():
            yield from commands(each) if hasattr(each, "commands") else [each]

    named = [
        parameter.opts
        for command in commands(typer.main.get_command(app))
        for parameter in command.params
        if {"--out", "--output"} & set(parameter.opts)
    ]
    assert len(named) >= 9 and all("-o" in names for names in named), named


@pytest.mark.parametrize("offload", [None, "host"])
@pytest.mark.parametrize("mesh", [None, "tensor=1"])
def test_the_hosts_memory_is_pinned_for_engines_that_a_command_makes(
    loads, monkeypatch, mesh, offload
):
    """The loaded model of an evaluation has its own contexts on the devices, and no offload."""
    told, load = [], api.load
    monkeypatch.setattr(memory, "allow_pinned", lambda: told.append("pinned"))
    monkeypatch.setattr(
        api, "load", lambda *given, **how: (told.append("load"), load(*given, **how))
    )
    choice = ModelChoice(checkpoint=Path("m"), run=RunSpec(mesh=mesh, offload=offload))
    choice.open(Terminal(), resident=True)
    assert told == (["load"] if offload is None else ["pinned", "load"])
    assert loads[0][1]["offload"] is None


def test_auto_divides_no_text_of_engines_that_a_command_makes_and_offloads(
    loads, tiny, monkeypatch
):
    chip = dataclasses.replace(CHIPS["cpu"], latency=0.0, link=1e15)
    monkeypatch.setitem(CHIPS, "cpu", chip)
    for offload, mesh in [(None, "seq=4,tensor=2"), ("host", "tensor=2")]:
        choice = ModelChoice(checkpoint=Path("m"), run=RunSpec(mesh="auto", offload=offload))
        choice.open(Terminal(), resident=True)
        spec, sizes = RunSpec(mesh="auto", dtype="float32"), loads[-1][1]["sizes"](tiny)
        assert on_best_mesh(spec, tiny.config, **sizes).mesh == mesh


@pytest.mark.parametrize("words", ["batch in out", "eval run -t passkey --length 64 -o o", "serve"])
def test_replicas_have_no_mesh_of_all_devices(run, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").write_text('{"prompt": "The"}')
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "manifest.json").write_text("{}")
    result = run(*words.split(), "-c", "m", "--replicas", 2, "--mesh", "auto")
    refused(result, "--mesh auto takes all devices, and each replica needs its own; name the axes")
