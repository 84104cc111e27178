"""`convert` passes its options on and shows where the result is."""

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
    result = run("convert", source, tmp_path / "new", "--dtype", "bfloat16")
    assert result.exit_code == 0, result.output
    assert f"written to {tmp_path / 'new'}" in result.stderr
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "manifest.json").touch()
    assert run("convert", tmp_path / "new", tmp_path / "hf", "--to-hf").exit_code == 0
    assert calls == [
        ("convert", str(source), tmp_path / "new", {"dtype": "bfloat16"}),
        ("export", str(tmp_path / "new"), tmp_path / "hf", {}),
    ]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--dtype", "int8"], "--dtype 'int8' is not one of"),
        (["--to-hf", "--dtype", "float32"], "leave out --dtype"),
    ],
)
def test_bad_options(run, calls, tmp_path, args, message):
    result = run("convert", "source", tmp_path / "new", *args)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ") and message in result.stderr
    assert calls == []
