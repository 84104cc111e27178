"""`eval passkey` end to end on a tiny random model, and what it refuses."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from jax_longctx.cli.options import parse_specs
from jax_longctx.evaluation import runner
from jax_longctx.methods import make_method

STREAMING = "streaming-llm"


@pytest.mark.slow
def test_passkey_scores_every_method_on_the_same_prompts(run, loads, tmp_path):
    out, png, text = tmp_path / "runs.json", tmp_path / "map.png", tmp_path / "text.txt"
    text.write_text("Rain falls. " * 40)
    args = ["eval", "passkey", "-c", "model", "--length", "512", "--length", "640", "--trials", "3"]
    args += ["--depths", "3", "--batch", "2", "-m", "full"]
    args += ["-m", "streaming-llm:budget=64,chunk=16"]
    result = run(*args, "--text", text, "--out", out, "--heatmap", png)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("| method | 512 | 640 |\n")
    assert "| streaming-llm budget=64 chunk=16 |" in result.stdout
    rows = json.loads(out.read_text())["rows"]
    full, streaming = ([r for r in rows if r["method"]["name"] == n] for n in ("full", STREAMING))
    keys = [{(r["length"], r["index"]): r["outputs"] for r in of} for of in (full, streaming)]
    assert keys[0] == keys[1]
    assert len(full) == 6 and {row["length"] for row in full} == {512, 640}
    assert all(sum(row["tokens"].values()) <= row["length"] for row in full)
    assert {row["method"]["settings"]["budget"] for row in streaming} == {64}
    assert {row["meta"]["depth"] for row in full} == {0.0, 0.5, 1.0}
    assert png.read_bytes()[:4] == b"\x89PNG"
    copy = out.rename(tmp_path / "first.json")
    out.write_text(copy.read_text())
    again = run("eval", "table", copy, out)
    assert "| full |" in again.stdout and "| full (runs) |" in again.stdout


def answered(work):
    """What `answer_batch` gives of a batch, in no time."""
    return [
        {
            "answer": " 1",
            "finish": "length",
            "tokens": {},
            "seconds": {"first_token": 1.0, "token": 0.1},
            "compiled": False,
            "rows": work.rows,
            "bytes": {"resident": 1, "read": 1},
        }
        for _ in work.contexts
    ]


def test_what_was_answered_before_an_interruption_is_in_the_file(run, loads, tmp_path, monkeypatch):
    batches = []

    def answer(model, engine, work):
        batches.append(work)
        if len(batches) == 2:
            raise KeyboardInterrupt
        return answered(work)

    monkeypatch.setattr(runner, "answer_batch", answer)
    out, text = tmp_path / "runs.json", tmp_path / "text.txt"
    text.write_text("Rain falls. " * 40)
    args = ["eval", "passkey", "-c", "model", "--length", "512", "--batch", "2", "--text", text]
    assert run(*args, "--out", out).exit_code == 130
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
    monkeypatch.setattr(runner, "answer_batch", lambda model, engine, work: answered(work))
    args = ["eval", "passkey", "-c", "model", "--length", "512", "--trials", len(depths) + 1]
    result = run(*args, "--noise", "--json", *options)
    assert result.exit_code == 0, result.output
    rows = sorted(map(json.loads, result.stdout.splitlines()), key=lambda row: row["index"])
    found = [row["meta"]["depth"] for row in rows]
    assert found == pytest.approx([*depths, depths[0]])


def test_a_text_may_come_from_stdin_and_a_prompt_be_refused(run, loads, monkeypatch):
    monkeypatch.setattr(runner, "answer_batch", lambda model, engine, work: answered(work))
    args = ["eval", "passkey", "-c", "model", "--trials", 1, "--text", "-", "--length"]
    result = run(*args, 512, stdin="Ducks swim. Geese fly. " * 9)
    assert result.exit_code == 0 and "n=1" in result.stdout
    result = run(*args, 64, stdin="Ducks swim. " * 9)
    assert result.exit_code == 2 and "1 of 1 prompts were refused, the first: " in result.stderr


def test_the_ablations_of_the_guide_have_one_scope():
    page = Path(__file__).parents[3] / "docs/guides/evaluate.md"
    (command,) = re.findall(r"jax-longctx eval passkey[^`]*ablations\.json[^`]*", page.read_text())
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
