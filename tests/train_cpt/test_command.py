"""`jax-longctx train` from a checkpoint and texts to a checkpoint that the other commands load."""

import json
import logging

import jax
import numpy as np
import pytest
from typer.testing import CliRunner

import checkpoints_convert
from jax_longctx.cli.main import app
from jax_longctx.locks import only_writer
from jax_longctx.models.storage import load_params, read_manifest
from jax_longctx.sharding import make_mesh
from tests.checkpoints_convert.tiny import full_disk
from tests.train_cpt.tiny_files import write_tiny
from train_cpt import loop
from train_cpt.metrics import read_metrics


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A converted checkpoint, texts, and a run's configuration."""
    folder = tmp_path_factory.mktemp("command")
    write_tiny(folder)
    return folder


@pytest.fixture(scope="module")
def trained(folder):
    """The same after the run, and what the run said."""
    code, said = train(folder / "run.toml")
    assert code == 0, said
    return folder, said


def train(config):
    """Exit code, and what was said in one line."""
    logging.disable(logging.WARNING)
    try:
        result = CliRunner().invoke(app, ["train", "--config", str(config)])
    finally:
        logging.disable(logging.NOTSET)
    return result.exit_code, " ".join(result.stderr.split())


def changed(folder, old, new):
    text = (folder / "run.toml").read_text()
    assert old in text
    (folder / "changed.toml").write_text(text.replace(old, new))
    return folder / "changed.toml"


def test_train_writes_a_checkpoint_and_goes_on_with_nothing(trained):
    folder, said = trained
    assert "8 train, 0 dev, 0 test texts of 16 tokens from 4 documents; 1 too short" in said
    assert "2 steps done, loss" in said
    before = load_params(folder / "model", make_mesh())
    after = load_params(folder / "run" / "model", make_mesh())
    moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), before, after)
    # Adam moves every weight by about the learning rate a step.
    assert all(0 < change < 0.05 for change in jax.tree.leaves(moved))
    manifest = read_manifest(folder / "run" / "model")
    assert "after 2 steps of continued pretraining" in manifest.source
    checkpoints_convert.export(str(folder / "run" / "model"), folder / "exported")
    assert (folder / "exported" / "model.safetensors").exists()
    facts = json.loads((folder / "run" / "run.json").read_text())
    assert facts["pattern"]["tail"] == 4 and facts["versions"]["jax"] == jax.__version__
    assert train(folder / "run.toml")[0] == 0
    assert [line["step"] for line in read_metrics(folder / "run")] == [1, 2]
    assert (folder / "run" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert not (folder / "run" / "best").exists()


@pytest.mark.slow
def test_the_weights_of_the_lowest_dev_loss_are_written_beside_the_last(folder, monkeypatch):
    losses = iter([1.0, 2.0])
    monkeypatch.setattr(loop, "dev_losses", lambda *_, **__: {"dev_loss": next(losses)})
    text = (folder / "run.toml").read_text().replace("/run", "/two").replace("/data", "/halves")
    text = text.replace("[1, 0, 0]", "[0.85, 0.15, 0]")
    (folder / "two.toml").write_text(text + "evaluate_every = 1\n")
    code, said = train(folder / "two.toml")
    assert code == 0 and "step 1 had the lowest dev loss" in said, said
    best, last = (read_manifest(folder / "two" / name).source for name in ("best", "model"))
    assert "after 1 steps" in best and "after 2 steps" in last
    one, two = (load_params(folder / "two" / name, make_mesh()) for name in ("best", "model"))
    assert np.abs(one["embed"]["table"] - two["embed"]["table"]).max() > 1e-3


def test_plots_are_drawn_and_what_is_no_run_is_one_line(trained, tmp_path):
    run, other = trained[0] / "run", tmp_path / "other"
    other.mkdir()
    lines = [{"step": step, "loss": 1 / step, "dev_loss": 2.0} for step in (1, 2)]
    (other / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def plot(out, *runs):
        words = ["train", "plot", *map(str, runs), "--out", str(tmp_path / out)]
        return CliRunner().invoke(app, words)

    assert plot("one.png", run).exit_code == plot("both.png", run, other).exit_code == 0
    one, both = ((tmp_path / name).read_bytes() for name in ("one.png", "both.png"))
    assert one != both and one[:4] == both[:4] == b"\x89PNG"
    result = plot("none.png", run, tmp_path)
    assert result.exit_code == 2 and "holds no metrics of a training run" in result.stderr
    assert not (tmp_path / "none.png").exists()


@pytest.mark.slow
def test_a_trained_checkpoint_is_compared_under_methods(trained):
    folder, _ = trained
    out = folder / "table.json"
    methods = ["-m", "full", "-m", "streaming-llm:budget=6,chunk=8", "--tail", "4", "--batch", "2"]
    models = ["-c", str(folder / "model"), "-c", str(folder / "run" / "model")]
    split = ["--data", str(folder / "data"), "--split", "train"]
    words = ["train", "evaluate", *models, *methods, *split]
    result = CliRunner().invoke(app, [*words, "--texts", "3", "--out", str(out)])
    assert result.exit_code == 0, result.stderr
    found = json.loads(out.read_text())
    assert [len(run["losses"]) for run in found["runs"]] == [3] * 4
    means = [np.mean(run["losses"]) for run in found["runs"]]
    rows = result.stdout.splitlines()
    assert f"| `full` | {np.exp(means[0]):.3f} | {np.exp(means[2]):.3f} | " in rows[2]
    assert f"| {means[0] - means[2]:+.4f} [" in rows[2] and rows[2].endswith(" | - |")
    assert f"| {means[1] - means[3] - means[0] + means[2]:+.4f} [" in rows[3]
    for changes, message in [
        (["--texts", "9"], "the train split has 8 texts, asked for 9"),
        (["--split", "last"], "--split must be one of train, dev, test, got 'last'"),
        (["-m", "full:x"], "'full:x' is not understood; expected NAME:KEY=VALUE,..."),
        (["-c", str(folder / "gone")], "gone is not a converted checkpoint"),
    ]:
        result = CliRunner().invoke(app, [*words, *changes])
        assert result.exit_code == 2 and message in result.stderr


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("rows", "rose", r"error: unknown [loop] key 'rose'; known: rows, "),
        ("/model", "/gone", "is not a converted checkpoint"),
        ("length = 16", "length = 17", "holds windows of 16 tokens, the run asks for 17"),
        ("/data", "/other", "no training text: of 5 documents 0 have the 99 tokens"),
        ("tail = 4", "tail = 16", "tail=16 leaves none of a text's 16 tokens"),
        ("rows = 2", "rows = 1", "holds another run (its 'loop' differs)"),
        ('texts"]', 'none"]', "none does not exist"),
        ("sources", "#", "does not exist; name what to make it of: [data] sources"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_overwritten(trained, old, new, message):
    folder, _ = trained
    config = changed(folder, old, new)
    if old in ('texts"]', "sources"):
        config.write_text(config.read_text().replace("/data", "/other"))
    if old == "/data":
        config.write_text(config.read_text().replace("length = 16", "length = 99"))
    before = written(folder)
    code, said = train(config)
    assert code == 2 and said.startswith("error: ") and message in said, said
    assert written(folder) == before


@pytest.mark.parametrize("locked", ["run", "data"])
def test_two_runs_into_one_folder_or_of_one_data_set(folder, locked):
    """The second is refused at once, and writes nothing."""
    config = changed(folder, f"/{locked}", f"/new-{locked}")
    with only_writer(folder / f"new-{locked}"):
        before = written(folder)
        code, said = train(config)
        assert written(folder) == before
    assert code == 2 and "another process is writing" in said and f"new-{locked}" in said, said


def test_a_disk_that_fills_up_is_one_line(trained, capfd):
    folder, _ = trained
    with full_disk():
        code, said = train(changed(folder, "/run", "/full"))
    full = folder / "full" / "checkpoints"
    assert code == 2 and said.endswith(f"error: {full} could not be written: File too large"), said
    assert "Traceback" not in said + capfd.readouterr().err


def written(folder):
    """When every file was last written."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_weights_in_8_bits_are_not_trained(folder):
    checkpoints_convert.convert(folder / "hf", folder / "eight", weights="int8")
    config = changed(folder, f'checkpoint = "{folder}/model"', f'checkpoint = "{folder}/eight"')
    code, said = train(config)
    assert code == 2
    assert "eight holds its matrices in int8, which cannot be trained; convert the source" in said
