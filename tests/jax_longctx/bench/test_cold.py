"""`bench cold` on a tiny shape: processes of their own, whose second finds what the first left."""

import json
from unittest.mock import create_autospec

import pytest

from jax_longctx.bench import cold
from tests.jax_longctx.bench.conftest import bench


def bench_cold(folder, *methods):
    """The rows of methods, and what the command prints."""
    out = folder / "found.json"
    args = ["cold", "--preset", "tiny", "--length", 100, "--answer", 4, "--dtype", "float32"]
    args += [word for method in methods for word in ("-m", method)]
    result = bench(*args, "--out", out)
    found = json.loads(out.read_text())
    assert found["model"] == "tiny" and found["device"] == "cpu" and found["context"] == 100
    return found["rows"], result.stdout


@pytest.mark.slow
def test_the_second_process_finds_what_the_first_compiled(tiny_shape, tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    (row,), printed = bench_cold(tmp_path, "full")
    empty, full = row["empty"], row["full"]
    assert empty["from_cache"] == 0 and full["from_cache"] == full["programs"] > 0
    for state in (empty, full):
        assert 0 < state["first_token"] < state["last_token"]
        assert 0 < state["warm_first_token"] < state["warm_last_token"]
        assert 0 < state["compile"] < state["last_token"]
    # Seconds of compiling are a hundred times what the few tokens take, however busy the machine.
    assert empty["warm_first_token"] < empty["first_token"]
    assert f"of {full['programs']}" in printed


def test_each_method_has_an_empty_and_then_a_full_cache(tiny_shape, tmp_path, monkeypatch):
    """Nothing runs: processes give what they are told to; what fails is in its row."""
    times = ("first_token", "last_token", "warm_first_token", "warm_last_token", "compile")
    facts, folders = {"device": "cpu", "jax": "1.2.3"}, []

    def process(case, folder):
        if case["method"] == "star":
            return {"failed": "ConfigError: star: block must be at least 1"}
        assert (case["length"], case["answer"], case["dtype"]) == (100, 4, "float32")
        folders.append(folder)
        held = 7 * (len(folders) - 1)
        return dict.fromkeys(times, 0.25) | {"programs": 7, "from_cache": held, "facts": facts}

    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(cold, "_in_process", create_autospec(cold._in_process, side_effect=process))
    (row, failed), printed = bench_cold(tmp_path, "tova", "star:block=0")
    assert folders == [folders[0]] * 2 and not folders[0].exists()
    assert (row["empty"]["from_cache"], row["full"]["from_cache"]) == (0, 7)
    assert failed["failed"].endswith("at least 1") and "empty" not in failed
    assert "tova" in printed and "7 of 7" in printed and "block must be" in printed


def test_a_case_that_fails_ends_its_process_with_one_line(tiny_shape, tmp_path, monkeypatch):
    case = {"model": tiny_shape, "checkpoint": None, "method": "star", "settings": {"block": "0"}}
    case |= {"length": 100, "answer": 4, "chunk": 512, "dtype": "float32", "mesh": {}}
    monkeypatch.setattr(cold.sys, "argv", ["cold", json.dumps(case | {"ahead": None})])
    with pytest.raises(SystemExit) as ended:
        cold.main()
    assert ended.value.code.startswith("ConfigError: ") and "block" in ended.value.code
    # Of what a process says as it ends, the error is told.
    script = tmp_path / "fails"
    script.write_text(f"#!/bin/sh\necho a warning >&2; echo '{ended.value.code}' >&2; exit 1\n")
    script.chmod(0o700)
    monkeypatch.setattr(cold.sys, "executable", str(script))
    assert cold._in_process(case, tmp_path) == {"failed": f"{ended.value.code:.300}"}
