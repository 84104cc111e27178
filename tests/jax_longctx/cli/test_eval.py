import dataclasses
import importlib
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from jax_longctx.cli.eval import eval_app
from jax_longctx.cli.options import parse_specs
from jax_longctx.engine.scoring import loglikelihoods
from jax_longctx.evaluation import agreement, perplexity
from jax_longctx.methods import Full, make_method
from tests.jax_longctx.cli.conftest import last_of_each, refused
from tests.support import engine_over


def test_the_ablations_of_the_guide_have_one_scope():
    page = Path(__file__).parents[3] / "docs/guides/evaluate.md"
    (command,) = re.findall(r"jax-longctx eval run[^`]*-o ablations [^`]*", page.read_text())
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


def test_mistakes_are_named_before_anything_is_loaded_or_run(run, loads, text, tmp_path):
    scored = ("eval", "perplexity", "-c", "model", "--text", text)
    for command, args, message in [
        (
            ("eval", "passkey"),
            "-c model",
            "eval passkey is gone; type: jax-longctx eval run -t pass",
        ),
        (("eval", "table"), "a.json", "eval table is gone; type: jax-longctx eval report DIR"),
        (scored, "--protocol P3 -m citrus:chunk=16,budget=64", "citrus reads a text for a"),
        (scored, "-m full -m snapkv:budget=x", "expected a whole number"),
        (scored, "--length 0", "should be greater than or equal to 1"),
        (scored, "--score 0", "should be greater than or equal to 1"),
        (scored, "--length 100000", "hold 0: ask for fewer or shorter ones"),
    ]:
        refused(run(*command, *args.split()), message)


def test_a_file_of_something_else_is_not_replaced(run, loads, text, tmp_path):
    out = tmp_path / "out.json"
    args = ["eval", "perplexity", "-c", "model", "--text", text, "--length", 90, "--out", out]
    for content, message in (
        ("[1]", f"{out} exists, and it does not say what it was made from"),
        ('{"made_from": {"command": "other"}}', f"{out} was made with command 'other', now it is"),
    ):
        out.write_text(content)
        refused(run(*args), message)
        assert out.read_text() == content


def test_results_are_bound_to_texts_method_and_options(
    run, loads, tiny, text, tmp_path, monkeypatch
):
    scored = {"through": "decode", "read": 1.0, "scored": 1.0, "fetched": None}
    scored["losses"] = [[1.0, 2.0]]
    monkeypatch.setattr(perplexity, "score_piece", lambda *_, **how: scored)
    words = ["-c", "model", "--text", text, "--out", tmp_path / "out.json"]
    words += ["--length", 90, "--texts", 2, "--score", 8]

    def said(*more, code=2):
        result = run("eval", "perplexity", *last_of_each([*words, *more]), code=code)
        return " ".join(result.stderr.split())

    said(code=0)
    # Options that change no answer.
    said("--batch", 2, "--chunk", 32, "-m", "full", code=0)
    for more, named in (
        (("--score", 9), "score 8, now it is 9"),
        (("-m", "snapkv"), "methods ['full'], now it is ['snapkv']"),
        (("--protocol", "P2"), "protocol 'P1', now it is 'P2'"),
        (("--texts", 1), "texts ["),
    ):
        assert named in said(*more)
    monkeypatch.setattr(type(tiny), "tokenizer_digest", "other")
    assert "tokenizer None, now it is 'other'" in said()
    text.write_text(text.read_text().replace("Rain", "Snow"))
    assert "texts ['" in said()
    said("--overwrite", code=0)
    said(code=0)


@pytest.mark.parametrize(
    ("module", "function", "more"),
    [(perplexity, "score_piece", ()), (agreement, "compare", ("--no-attention",))],
)
def test_an_interrupted_run_goes_on(
    run, loads, text, tmp_path, monkeypatch, module, function, more
):
    compute, asked = getattr(module, function), []

    def interrupted(*given, **how):
        asked.append(1)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return compute(*given, **how)

    monkeypatch.setattr(module, function, interrupted)
    command, journal = module.__name__.rpartition(".")[-1], tmp_path / "out.json.journal"
    words = ["eval", command, "-c", "model", "--text", text, "--texts", 2, "--batch", 1, *more]
    words += ["-m", "full", "-m", "snapkv:budget=32,window=8", "--length", 60, "--score", 4]
    run(*words, "--out", tmp_path / "out.json", code=130)
    assert journal.exists() and not (tmp_path / "out.json").exists()
    for name, value, named in (("--score", 5, "score 4, n"), ("--batch", 2, "batch 1, now it is")):
        other, at = list(words), words.index(name) + 1
        other[at] = value
        refused(run(*other, "--out", tmp_path / "out.json"), f"journal was made with {named}")
    run(*words, "--out", tmp_path / "out.json", code=0)
    # Perplexity is of one method at a time.
    assert len(asked) == (5 if command == "perplexity" else 3) and not journal.exists()
    run(*words, "--out", tmp_path / "whole.json", code=0)
    one, other = (json.loads((tmp_path / f"{each}.json").read_text()) for each in ("out", "whole"))
    times = ("read_seconds", "score_seconds")
    for found in (*one["runs"], *other["runs"]):
        assert [len(found.pop(name)) for name in times if name in found] in ([2, 2], [])
    assert one == other and len(one["runs"]) == 2


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("Rain falls on the roof. Leaves turn. " * 60)
    return path


@pytest.mark.thorough
def test_every_method_reads_the_same_texts(run, loads, tiny, text, tmp_path):
    out, png = tmp_path / "runs.json", tmp_path / "curve.png"
    args = ["eval", "perplexity", "-c", "model", "--text", text, "--length", "150"]
    args += ["--texts", "3", "--batch", "2", "--out", out, "--plot", png, "--score", "20"]
    result = run(*args, "-m", "full", "-m", "snapkv:budget=300", "-m", "snapkv:budget=32,window=8")
    assert result.exit_code == 0, result.output
    full, whole, part = json.loads(out.read_text())["runs"]
    assert whole["given"] == {"budget": "300"}
    assert part["given"] == {"budget": "32", "window": "8"}
    np.testing.assert_allclose(whole["means"], full["means"], atol=1e-4)
    assert np.abs(np.array(part["means"]) - full["means"]).max() > 1e-3
    said = (full["length"], full["score"], full["texts"], full["through"])
    assert said == (150, 20, 3, "decode")
    assert [window[:2] for window in full["windows"]] == [[130, 145], [146, 149]]
    # The first text begins with the beginning-of-text token and the file's first words.
    tokens = tiny.tokenizer.encode(text.read_text(), bos=True)[:150]
    engine = engine_over(tiny.config, tiny.engine.params, Full(), tiny.engine.mesh, chunk=64)
    scores = loglikelihoods(engine, [tokens[:130]], [tokens[130:]])[0]
    assert full["means"][0] == pytest.approx(-scores.total / 20, abs=1e-4)
    assert "`snapkv budget=32 window=8` |" in result.stdout
    assert "P1: 20 of 150 tokens scored, n = 3 texts" in result.stdout
    assert png.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
def test_contexts_in_the_hosts_memory_score_alike(run, loads, text):
    found = []
    for place in ((), ("--offload", "host", "--working-set", 64)):
        args = ["eval", "perplexity", "-c", "model", "--text", text, "--length", "150"]
        args += ["--texts", "1", "--score", "20", "--json", *place]
        result = run(*args, "-m", "full", "-m", "quest:budget=32,local=16", code=0)
        found.append([json.loads(line) for line in result.stdout.splitlines()])
    here, there = ([run["means"] for run in runs] for runs in found)
    assert here == there and len(here) == 2
    assert not any("fetched" in run for run in (*found[0], found[1][0]))
    fetched = found[1][1]["fetched"]
    # In each of two layers 19 tokens are decoded, each of which chooses pages.
    assert fetched["steps"] == 2 * 19 and fetched["hits"] + fetched["misses"] > fetched["steps"]
    assert fetched["hit_rate"] == fetched["hits"] / (fetched["hits"] + fetched["misses"])


@pytest.mark.slow
def test_a_stream_runs_over_files_and_is_read_for_each_question(run, loads, text):
    args = ["eval", "perplexity", "-c", "model", "--protocol", "P3", "--text", text, "--text", text]
    args += ["--length", "900", "--window", "300", "--json", "-m", "citrus:budget=64,chunk=16"]
    args += ["-m", "streaming-llm:budget=64,chunk=16"]
    result = run(*args, "--question", "Why?", "--question", "Who was it?", code=0)
    why, who, streaming = map(json.loads, result.stdout.splitlines())
    assert [record["question"] for record in (why, who, streaming)] == ["Why?", "Who was it?", ""]
    assert why["means"] != who["means"]
    assert [window[:2] for window in why["windows"]] == [[1, 300], [301, 600], [601, 899]]
    assert streaming["through"] == "context" and streaming["score"] == 899


@pytest.mark.thorough
def test_agreement_with_full_attention(run, loads, text, tmp_path):
    out = tmp_path / "runs.json"
    args = ["eval", "agreement", "-c", "model", "--text", text, "--length", "90", "--score", "5"]
    args += ["--texts", "2", "--out", out]
    result = run(*args, "-m", "full", "-m", "tova:budget=32,chunk=16", "-m", "ring", code=0)
    full, tova, ring = json.loads(out.read_text())["runs"]
    assert max(map(abs, full["kl"])) < 1e-6 and full["same"] == [1, 1]
    assert min(tova["kl"]) > 1e-6 and len(tova["kl"]) == 2
    assert max(map(abs, ring["kl"])) < 1e-4 and ring["attention"] is None
    # Queries 84 to 88 of 90 tokens; TOVA's budget, and the token itself.
    assert full["attention"][0]["attended"] == [87, 87] and full["queries"] == 5
    assert max(tova["attention"][1]["attended"]) <= 33
    assert "`tova budget=32 chunk=16` |" in result.stdout
    assert "ring reads a text in parts side by side" in result.stderr
    quick = run(*args[:-2], "-m", "ring", "--no-attention", "--json")
    assert json.loads(quick.stdout)["kl"] == pytest.approx(ring["kl"])
    assert "side by side" not in quick.stderr


@pytest.mark.slow
def test_measurements_of_the_papers(run, loads, text, tmp_path, monkeypatch):
    refused(run("eval", "resa-errors"), "resa-errors is gone; type: python -m research eval resa-e")
    commands = list(eval_app.registered_commands)
    monkeypatch.setattr(eval_app, "registered_commands", commands)
    sys.modules.pop("research.__main__", None)
    importlib.import_module("research.__main__")
    out = tmp_path / "found.json"
    papers = ("-c", "model", "--text", text, "--out", out)
    how = ("--texts", "2", "--tokens", "40", "--top", "8", "--top", "40", "--instruction", "Who?")
    result = run("eval", "citrus-overlap", *papers, *how, code=0)
    few, every = json.loads(out.read_text())["by_layer"].values()
    # Two layers, each beside an instruction and another text; all of 40 are in common.
    assert np.shape(few) == (2, 2) and every == [[1, 1], [1, 1]]
    assert f"| 8 | 0-0 | {few[0][0]:.3f} | {few[1][0]:.3f} | 0.200 |" in result.stdout
    result = run("eval", "resa-spectrum", *papers, "--length", "64", "--length", "32", code=0)
    short, long = json.loads(out.read_text())["lengths"]
    assert np.shape(short["share"]) == (2, 4) and long["length"] == 64
    said = f"| 64 | {np.mean(long['first']):,.1f} | {100 * np.mean(long['share']):.1f} |"
    assert said in result.stdout
    # RESA's errors fall with the estimate.
    out = tmp_path / "errors.json"
    args = ["eval", "resa-errors", "-c", "model", "--selector", "ideal", "--ratio", "0.1"]
    args += ["--texts", "2", "--queries", "3", "--text", text, "--tokens"]
    result = run(*args, 200, "--out", out, code=0)
    records = json.loads(out.read_text())
    assert [record["settings"]["lam"] for record in records] == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert {record["queries"] for record in records} == {6}
    assert result.stdout.count("ideal") == 5
    half, none = records[2]["by_layer"], records[0]["by_layer"]
    below = sum(a[0] < b[0] for a, b in zip(half, none, strict=True))
    assert f"{below}/{len(none)}" in result.stdout
    assert "ask for fewer" in run(*args, 100_000, code=2).stderr
