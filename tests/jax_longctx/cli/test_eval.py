"""`eval passkey` end to end on a tiny random model, and what it refuses."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from jax_longctx.cli.options import parse_specs
from jax_longctx.methods import make_method


@pytest.mark.slow
def test_passkey_scores_every_method_on_the_same_prompts(run, loads, tmp_path):
    out, png, text = tmp_path / "runs.json", tmp_path / "map.png", tmp_path / "text.txt"
    text.write_text("Rain falls. " * 40)
    args = ["eval", "passkey", "-c", "model", "--length", "160", "--length", "192", "--trials", "3"]
    args += [
        "--depths",
        "3",
        "--batch",
        "2",
        "-m",
        "full",
        "-m",
        "streaming-llm:budget=64,chunk=16",
    ]
    result = run(*args, "--text", text, "--out", out, "--heatmap", png)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("| method | 160 | 192 |\n")
    assert "`streaming-llm budget=64 chunk=16`" in result.stdout
    full, streaming = json.loads(out.read_text())["runs"]
    assert [row["key"] for row in full["rows"]] == [row["key"] for row in streaming["rows"]]
    assert len(full["rows"]) == 6 and {row["length"] for row in full["rows"]} == {160, 192}
    assert all(row["tokens"] <= row["length"] for row in full["rows"])
    assert streaming["settings"]["budget"] == 64
    assert png.read_bytes()[:4] == b"\x89PNG"
    again = run("eval", "table", out, out)
    assert again.stdout.count("`full`") == 2


def test_what_was_answered_before_an_interruption_is_in_the_file(run, loads, tmp_path, monkeypatch):
    def batches(engine, tokenizer, trials, *, batch, progress):
        yield [{"length": 160, "depth": 0.0, "right": True}] * batch
        raise KeyboardInterrupt

    monkeypatch.setattr("jax_longctx.evaluation.passkey_trials.run_trials", batches)
    out, text = tmp_path / "runs.json", tmp_path / "text.txt"
    text.write_text("Rain falls. " * 40)
    args = ["eval", "passkey", "-c", "model", "--length", "160", "--batch", "2", "--text", text]
    assert run(*args, "--by-layer", "--out", out).exit_code == 130
    assert loads[0][1]["by_layer"]
    assert run("eval", "table", out).stdout.count("n=2") == 1


@pytest.mark.parametrize(
    ("options", "depths"),
    [
        (["--depth", "0.1", "--depth", "0.9"], [0.1, 0.9]),
        (["--depths", "3"], [0.0, 0.5, 1.0]),
        ([], [i / 9 for i in range(10)]),
    ],
)
def test_trials_take_the_depths_in_turn(run, loads, tmp_path, monkeypatch, options, depths):
    def batches(engine, tokenizer, trials, *, batch, progress):
        yield [{"length": 160, "depth": trial.depth, "right": True} for trial in trials]

    monkeypatch.setattr("jax_longctx.evaluation.passkey_trials.run_trials", batches)
    out = tmp_path / "runs.json"
    args = ["eval", "passkey", "-c", "model", "--length", "160", "--trials", len(depths) + 1]
    assert run(*args, "--noise", "--out", out, *options).exit_code == 0
    (found,) = json.loads(out.read_text())["runs"]
    assert [row["depth"] for row in found["rows"]] == pytest.approx([*depths, depths[0]])


def test_the_ablations_of_the_readme_have_one_scope():
    readme = Path(__file__).parents[3].joinpath("README.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"jax-longctx eval passkey[^`]*ablations\.json[^`]*", readme)
    specs = re.findall(r"-m (\S+)", command)
    methods = [make_method(spec.name, dict(spec.settings)) for spec in parse_specs(specs)]
    assert len(set(methods)) == len(methods) == 12
    assert {method.scope_size for method in methods} == {8192}
    changed = {
        field.name
        for method in methods
        for field in dataclasses.fields(method)
        if getattr(method, field.name) != field.default
    }
    assert changed == {"global_size", "span", "kept", "count", "local_size", "chunk"}


def test_mistakes_are_named_before_anything_is_loaded_or_run(run, loads, tmp_path):
    passkey = ("eval", "passkey", "-c", "model")
    for args, message in [
        ((*passkey, "-m", "nothing"), "unknown method 'nothing'"),
        ((*passkey, "-m", "full", "-m", "streaming-llm:budget=x"), "expected a whole number"),
        ((*passkey, "--depths", "2", "--depth", "0.5"), "--depths and --depth are two ways"),
        ((*passkey, "--length", "8"), "--length must be at least 64 tokens, got 8"),
        (("eval", "table", tmp_path / "none.json"), "none.json"),
    ]:
        result = run(*args)
        assert result.exit_code == 2
        assert result.stderr.count("\n") == 1 and message in result.stderr


@pytest.mark.slow
def test_resa_errors_fall_with_the_estimate(run, loads, tmp_path):
    text, out = tmp_path / "text.txt", tmp_path / "errors.json"
    text.write_text("Rain falls on the roof. Leaves turn. " * 60)
    args = ["eval", "resa-errors", "-c", "model", "--selector", "ideal", "--ratio", "0.1"]
    args += ["--texts", "2", "--tokens", "200", "--queries", "3", "--text", text]
    result = run(*args, "--out", out)
    assert result.exit_code == 0, result.output
    records = json.loads(out.read_text())
    assert [record["settings"]["lam"] for record in records] == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert {record["queries"] for record in records} == {6}
    assert result.stdout.count("ideal") == 5
    layers = len(records[0]["by_layer"])
    below = sum(
        a[0] < b[0] for a, b in zip(records[2]["by_layer"], records[0]["by_layer"], strict=True)
    )
    assert f"{below}/{layers}" in result.stdout
    short = run(*args[:-4], "--queries", "3", "--tokens", "100000", "--text", text)
    assert short.exit_code == 2 and "ask for fewer" in short.stderr
