"""`bench cold` on a tiny shape: processes of their own, whose second finds what the first left."""

import json

from typer.testing import CliRunner

from jax_longctx.cli.main import app
from jax_longctx.models import presets


def test_the_second_process_finds_what_the_first_compiled(monkeypatch, tmp_path):
    shape = dict(
        presets.PRESETS["llama-3.1-8b"],
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
    )
    monkeypatch.setitem(presets.PRESETS, "tiny", shape)
    out = tmp_path / "found.json"
    args = ["--preset", "tiny", "--length", "100", "--answer", "4", "--dtype", "float32"]
    args += ["-m", "tova", "-m", "star:block=0", "--out", str(out)]
    result = CliRunner().invoke(app, ["bench", "cold", *args])
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_text())
    assert found["model"] == "tiny" and found["device"] == "cpu" and found["context"] == 100
    row, failed = found["rows"]
    empty, full = row["empty"], row["full"]
    assert empty["from_cache"] == 0 and full["from_cache"] == full["programs"] > 0
    for state in (empty, full):
        assert 0 < state["warm_first_token"] < state["first_token"] < state["last_token"]
        assert 0 < state["compile"] < state["last_token"]
    # What does not run is reported in its row, and the others are measured.
    assert "block" in failed["failed"] and "empty" not in failed
    assert "tova" in result.stdout and f"of {full['programs']}" in result.stdout
