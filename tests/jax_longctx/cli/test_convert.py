"""`convert` passes its options on and shows where the result is."""

import json
from pathlib import Path

import pytest

import checkpoints_convert


@pytest.fixture
def calls(monkeypatch):
    made = []

    def record(name):
        def call(source, destination, **options):
            options.pop("progress")(1, 2)
            made.append((name, str(source), Path(destination), options))

        return call

    for name in ("convert", "export"):
        monkeypatch.setattr(checkpoints_convert, name, record(name), raising=False)
    return made


def test_directions(run, calls, tmp_path):
    source = tmp_path / "model.gguf"
    source.touch()
    forms = ("--dtype", "bfloat16", "--weights", "int8")
    result = run("convert", source, tmp_path / "new", *forms)
    assert result.exit_code == 0, result.output
    assert f"written to {tmp_path / 'new'}" in result.stderr
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "manifest.json").touch()
    assert run("convert", tmp_path / "new", tmp_path / "hf", "--to-hf").exit_code == 0
    assert calls == [
        ("convert", str(source), tmp_path / "new", {"dtype": "bfloat16", "weights": "int8"}),
        ("export", str(tmp_path / "new"), tmp_path / "hf", {}),
    ]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--dtype", "int8"], "--dtype 'int8' is not one of"),
        (["--to-hf", "--dtype", "float32"], "leave out --dtype"),
        (["--to-hf", "--weights", "int8"], "leave out --weights"),
        (["--weights", "bfloat16"], "--weights 'bfloat16' is not one of fp8, int8"),
    ],
)
def test_bad_options(run, calls, tmp_path, args, message):
    result = run("convert", "source", tmp_path / "new", *args)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ") and message in result.stderr
    assert calls == []


@pytest.mark.slow
def test_commands_take_a_checkpoint_in_8_bits(run, source, book, tmp_path):
    """`ask` as with `--weights`, `plan`, `methods` and `warm` by what it holds; `--to-hf` not."""
    folder, floats = tmp_path / "eight", tmp_path / "floats"
    assert run("convert", source, folder, "--weights", "int8").exit_code == 0
    assert run("convert", source, floats).exit_code == 0
    ask = ("ask", book, "What is the pass key?", "--max-tokens", 8, "--json", "-m", "full")
    answers = [
        json.loads(run(*ask, *options).stdout)
        for options in (("-c", folder), ("-c", floats, "--weights", "int8"))
    ]
    assert answers[0]["answer"] == answers[1]["answer"] and answers[0]["weights"] == "int8"
    plan = ("plan", "--target", "h200x1", "--context", 64, "--json", "--model")
    made = json.loads(run(*plan, folder).stdout), json.loads(run(*plan, floats).stdout)
    assert (made[0]["weights"], made[1]["weights"]) == ("int8", None)
    assert made[0]["memory_bytes"]["weights"] < made[1]["memory_bytes"]["weights"]
    assert run("methods", "full", "-c", folder, "--context", 64).exit_code == 0
    warmed = run("warm", folder, "--length", 20, "--question", 4, "--answer", 4)
    assert warmed.exit_code == 0, warmed.output
    for refused in ((*plan, folder), ("warm", folder), (*ask, "-c", folder)):
        result = run(*refused, "--weights", "fp8")
        assert result.exit_code == 2 and "converted with weights int8" in result.stderr, refused
    back = run("convert", folder, tmp_path / "hf", "--to-hf")
    assert back.exit_code == 2 and "holds its matrices in int8" in back.stderr
