import contextlib
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import numpy as np
import pytest
from typer.testing import CliRunner

import checkpoints_convert
from jax_longctx.cli.main import app
from jax_longctx.cli.terminal import Terminal
from jax_longctx.errors import ConfigError, InputError
from jax_longctx.locks import only_writer
from jax_longctx.models.storage import load_params, read_manifest
from jax_longctx.settings import from_toml
from jax_longctx.sharding import make_mesh
from tests.checkpoints_convert.tiny import full_disk
from tests.patience import patience
from tests.train_cpt.tiny_files import write_tiny
from train_cpt import loop
from train_cpt.metrics import read_metrics
from train_cpt.run import RunConfig, read_config, run_config, setup_of
from train_cpt.step import abstract_state, place_texts

ROOT = Path(__file__).parents[2]
PROCESSES, STEPS = 2, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("command")
    write_tiny(folder)
    return folder


@pytest.fixture(scope="module")
def trained(folder):
    code, said = train(folder / "run.toml")
    assert code == 0, said
    return folder, said


def train(config):
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
    before = load_params(folder / "model")
    after = load_params(folder / "run" / "model")
    moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), before, after)
    # Adam moves every weight by about the learning rate a step.
    assert all(0 < change < 0.05 for change in jax.tree.leaves(moved))
    manifest = read_manifest(folder / "run" / "model")
    assert "after 2 steps of continued pretraining" in manifest.source
    checkpoints_convert.export(str(folder / "run" / "model"), folder / "exported")
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
    one, two = (load_params(folder / "two" / name) for name in ("best", "model"))
    assert np.abs(one["embed"]["table"] - two["embed"]["table"]).max() > 1e-3


@pytest.mark.slow
def test_a_trained_checkpoint_is_compared_under_methods(trained):
    folder, _ = trained
    out = folder / "table.json"
    methods = ["-m", "full", "-m", "streaming-llm:budget=6,chunk=8", "--tail", "4", "--batch", "2"]
    models = ["-c", str(folder / "model"), "-c", str(folder / "run" / "model")]
    words = ["train", "evaluate", *models, *methods, "--data", str(folder / "data")]
    split = ["--split", "train"]
    result = CliRunner().invoke(app, [*words, *split, "--texts", "3", "--out", str(out)])
    assert result.exit_code == 0, result.stderr
    found = json.loads(out.read_text())
    assert [len(run["losses"]) for run in found["runs"]] == [3] * 4
    means = [np.mean(run["losses"]) for run in found["runs"]]
    rows = result.stdout.splitlines()
    assert f"| `full` | {np.exp(means[0]):.3f} | {np.exp(means[2]):.3f} | " in rows[2]
    assert f"| {means[0] - means[2]:+.4f} [" in rows[2] and rows[2].endswith(" | - |")
    assert f"| {means[1] - means[3] - means[0] + means[2]:+.4f} [" in rows[3]
    for changes, message in [
        ([*split, "--texts", "9"], "the train split has 8 texts, asked for 9"),
        (["--split", "last"], "--split must be one of train, dev, test, got 'last'"),
        ([*split, "-c", str(folder / "gone")], "gone is not a converted checkpoint"),
    ]:
        result = CliRunner().invoke(app, [*words, *changes])
        assert result.exit_code == 2 and message in result.stderr


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("rows", "rose", "error: unknown [loop] key 'rose'; known: rows, "),
        ("/model", "/gone", "is not a converted checkpoint"),
        ("length = 16", "length = 17", "holds windows of 16 tokens, the run asks for 17"),
        ("/data", "/other", "no training text: of 5 documents 0 have the 99 tokens"),
        ("tail = 4", "tail = 16", "tail=16 leaves none of a text's 16 tokens"),
        ("rows = 2", "rows = 1", "{}/run was made with loop.rows 2, now it is 1; "),
        ("0.01", "0.02", "made with optimizer.learning_rate 0.01, now it is 0.02; "),
        ("[1, 0, 0]", "[0, 1, 0]", "{}/data was made with shares [1.0, 0.0, 0.0], now it is [0.0,"),
        ("length", 'field = "body"\nlength', "data was made with field 'text', now it is 'body'"),
        ('/texts"', '/texts/0.txt"', "{}/data was made with sources.{}/texts/1.txt '"),
        ("/model", "/eight", "eight holds its matrices in int8, which cannot be trained; convert "),
        ("/run", "/locked", "another process is writing {}/locked"),
        ("/data", "/locked", "another process is writing {}/locked"),
        ('texts"]', 'none"]', "none does not exist"),
        ("sources", "#", "does not exist; name what to make it of: [data] sources"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_overwritten(trained, old, new, message):
    folder, _ = trained
    config = changed(folder, old, new)
    if new == "/eight":
        checkpoints_convert.convert(folder / "hf", folder / "eight", weights="int8")
    if old in ('texts"]', "sources"):
        config.write_text(config.read_text().replace("/data", "/other"))
    if new == "/other":
        config.write_text(config.read_text().replace("length = 16", "length = 99"))
    # Another process is writing this one.
    with only_writer(folder / "locked"):
        before = written(folder)
        code, said = train(config)
        message = message.replace("{}", str(folder))
        assert code == 2 and said.startswith("error: ") and message in said, said
        assert written(folder) == before


def test_a_run_goes_on_by_any_path_and_where_neither_texts_nor_steps_change(trained, monkeypatch):
    folder, _ = trained
    shutil.copytree(folder / "texts", folder / "moved")
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.chdir(folder / "moved")
    for old, new in (
        ("rows = 2", "rows = 2\nsave_every = 7\nkeep = 1"),
        ("sources", "#"),
        ("/texts", "/moved"),
        ('dtype = "float32"', 'dtype = "float32"\nmesh = "data=2"'),
        (f"{folder}/model", "~/model"),
        (f"{folder}/run", "./../run"),
        (f"{folder}/data", "../data//"),
    ):
        changed(folder, old, new)
        code, said = train("~/changed.toml")
        assert code == 0 and "2 steps done" in said, (new, said)
    assert sorted(os.listdir()) == sorted(os.listdir(folder / "texts"))


def test_a_run_that_sigterm_ends_says_that_it_is_unfinished(folder, monkeypatch):
    ended = contextlib.nullcontext(lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    monkeypatch.setattr(Terminal, "progress", lambda *_: ended)
    code, said = train(changed(folder, "/run", "/ended"))
    assert code == 143 and "ended after step 1, loss " in said, said


@pytest.mark.parametrize(
    ("size", "old", "full"),
    [(30_000, "/run", "full/checkpoints"), (200, "/run", "full/run.json"), (100, "/data", "full")],
)
def test_a_disk_that_fills_up_is_one_line(trained, capfd, size, old, full):
    folder, _ = trained
    shutil.rmtree(folder / "full", ignore_errors=True)
    config = changed(folder, old, "/full")
    with full_disk(size):
        code, said = train(config)
    why = "could not be written: File too large (ulimit -f limits the size of files)"
    assert code == 2 and said.endswith(f"error: {folder / full} {why}"), said
    assert "Traceback" not in said + capfd.readouterr().err


def written(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


LEAST = {
    "run": {"checkpoint": "model", "output": "out"},
    "data": {"directory": "data", "length": 64},
    "optimizer": {"steps": 100},
}


def config_with(section, **fields):
    return {**LEAST, section: {**LEAST.get(section, {}), **fields}}


def test_a_file_becomes_five_sections(tmp_path):
    path = tmp_path / "run.toml"
    with pytest.raises(InputError, match=r"run\.toml cannot be read: No such file"):
        read_config(path)
    for text in ("[run", "a = " + "[" * 5000):
        path.write_text(text)
        with pytest.raises(InputError, match=r"run\.toml is not TOML"):
            read_config(path)
    path.write_text(
        '[run]\ncheckpoint = "model"\noutput = "out"\nremat = "dots"\n'
        '[data]\ndirectory = "data"\nlength = 64\nsources = ["a", "b"]\nshares = [1, 0, 0]\n'
        "[optimizer]\nsteps = 100\nlearning_rate = 1\n"
        "[pattern]\ntail = 8\nforce_self = false\n[loop]\nrows = 2\n"
    )
    config = read_config(path)
    assert config.run.checkpoint == Path("model") and config.run.remat == "dots"
    assert config.data.sources == (Path("a"), Path("b"))
    assert config.data.shares == (1.0, 0.0, 0.0)
    assert repr(config.optimizer.learning_rate) == "1.0" and config.optimizer.warmup == 20
    assert (config.pattern.tail, config.pattern.force_self, config.loop.rows) == (8, False, 2)
    echoed = json.loads(json.dumps(config.to_dict()))
    assert from_toml(RunConfig, echoed) == config
    # Without its section, attention is causal.
    assert from_toml(RunConfig, LEAST).pattern.tail == 0


def test_the_guides_run_is_a_configuration():
    guide = (ROOT / "docs/guides/train.md").read_text()
    config = from_toml(RunConfig, tomllib.loads(guide.split("<<'TOML'\n")[1].split("TOML\n")[0]))
    assert (config.pattern.tail, config.data.sources) == (50, (Path("texts"),))
    assert len(config.loop.evaluate_methods) == 2


@pytest.mark.slow
def test_the_guides_run_trains_on_a_folder_of_texts(folder, tmp_path, monkeypatch):
    """Its command as it stands, but for sizes."""
    monkeypatch.chdir(tmp_path)
    guide = (ROOT / "docs/guides/train.md").read_text()
    known = Path("texts")
    known.mkdir()
    for number in range(8):
        words = f"This is the manual of part {number}, and it is read as the text of a book. "
        text = " ".join(f"{words} In line {n} of it there is more to say." for n in range(500))
        (known / f"{number}.txt").write_text(text)
    text = guide.split("<<'TOML'\n")[1].split("TOML\n")[0]
    checkpoint = tomllib.loads((folder / "run.toml").read_text())["run"]["checkpoint"]
    Path("small").symlink_to(folder / checkpoint)
    for old, new in {
        "length = 8192": "length = 64",
        "tail = 50": "tail = 8",
        "budget = 2048": "budget = 16",
        "steps = 200": "steps = 2\nwarmup = 1",
        "evaluate_every = 50": "evaluate_every = 2",
        '"full", "refreshkv:budget=1024,schedule=fixed,stride=25"': '"full"',
    }.items():
        assert old in text
        text = text.replace(old, new)
    Path("run.toml").write_text(text)
    code, said = train("run.toml")
    assert code == 0 and "2 steps done" in said, said
    assert Path("runs/first/loss.png").exists()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (config_with("optimiser"), "unknown section 'optimiser'; known: run, .*mean 'optimizer'?"),
        (config_with("loop", rose=1), r"unknown \[loop\] key 'rose'; known: rows, .*mean 'rows'?"),
        (config_with("loop", zzz=1), r"unknown \[loop\] key 'zzz'; known: rows, micro_batches"),
        ({**LEAST, "optimizer": {}}, r"\[optimizer\] needs steps"),
        ({**LEAST, "loop": 3}, r"loop must be a section \[loop\], got 3"),
        (config_with("loop", evaluate_methods=["none"]), "unknown method 'none'"),
        (config_with("data", length="8"), r"\[data\] length must be a whole number, got '8'"),
        (config_with("data", length=8.0), r"length must be a whole number, got 8\.0"),
        (config_with("data", sources="a"), "sources must be a list, got 'a'"),
        (config_with("data", sources=[1]), "sources must be a path, got 1"),
        (config_with("data", shares=[1, 0]), "shares must be a list of 3, got"),
        (config_with("data", field=3), "field must be a text, got 3"),
        (config_with("optimizer", clip="1"), r"\[optimizer\] clip must be a number, got '1'"),
        (config_with("optimizer", clip=True), "clip must be a number, got True"),
        (config_with("pattern", force_self=1), "force_self must be true or false, got 1"),
        (config_with("run", remat="some"), r"\[run\] remat must be one of none, dots, full, got"),
    ],
)
def test_wrong_configurations_and_values_of_another_type_are_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        from_toml(RunConfig, fields)


@pytest.mark.long
@pytest.mark.thorough
def test_two_processes_that_are_interrupted_train_as_one_that_is_not(tmp_path):
    for name in ("one", "two"):
        write_tiny(tmp_path / name)
        config = tmp_path / name / "run.toml"
        text = config.read_text().replace('"float32"', '"float32"\nmesh = "data=2,tensor=2"')
        text = text.replace("steps = 2", f"steps = {STEPS}").replace("[1, 0, 0]", "[0.85, 0.15, 0]")
        config.write_text(text + "evaluate_every = 2\n")
    run_config(read_config(tmp_path / "one" / "run.toml"), note=print)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "tests.train_cpt.tiny_files", tmp_path / "two", PROCESSES, port]
    commands = [[str(word) for word in (*words, process)] for process in range(PROCESSES)]
    how = {"cwd": ROOT, "stderr": subprocess.PIPE, "text": True}
    started = [subprocess.Popen(command, **how) for command in commands]
    for child in started:
        _, said = child.communicate(timeout=patience(300))
        assert child.returncode == 0, said[-3000:]
    runs = [tmp_path / name / "run" for name in ("one", "two")]
    lines = [read_metrics(run) for run in runs]
    assert [line["step"] for line in lines[1]] == [*range(1, STEPS + 1)]
    for name in ("loss", "gradient_norm", "dev_loss"):
        curves = [[line[name] for line in found if name in line] for found in lines]
        np.testing.assert_allclose(*curves, rtol=1e-5)
        assert curves[0]
    weights = [load_params(run / "model") for run in runs]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), *weights)
    assert (runs[1] / "loss.png").exists()


def test_each_device_gets_the_texts_of_its_shard_of_data():
    """No other texts are read, and devices of one `tensor` group hold the same."""
    read = []

    class Watched(np.ndarray):
        def __getitem__(self, index):
            read.append(np.asarray(index).tolist())
            return super().__getitem__(index)

    windows = np.arange(60, dtype=np.uint16).reshape(20, 3)
    numbers = np.array([[3, 19, 0, 7], [5, 5, 2, 11]])
    placed = place_texts(make_mesh(2, 1, 2), windows.view(Watched), numbers)
    assert placed.dtype == np.int32
    np.testing.assert_array_equal(placed, windows[numbers])
    halves = [numbers[:, :2], numbers[:, 2:]]
    assert {str(half) for half in read} == {str(half.tolist()) for half in halves}
    assert len(placed.addressable_shards) == 4
    for shard in placed.addressable_shards:
        np.testing.assert_array_equal(shard.data, windows[numbers[shard.index[:2]]])


def test_the_step_of_a_run_is_planned(folder, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    config = str(folder / "run.toml")
    asked = ["train", "plan", "--config", config, "--target", "cpu", "--json"]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 0, result.stderr
    record, shapes = json.loads(result.stdout), read_manifest(folder / "model").config
    state = abstract_state(setup_of(read_config(folder / "run.toml"), shapes, make_mesh()))
    # Weights and two moments, and the texts; no more.
    kept = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    assert 0 < record["state"] - kept < 64 * 1024 and record["temporaries"] > 0
    assert record["fits"] and record["available"] == 16 * 2**30
    result = CliRunner().invoke(app, [*asked[:-3], "--target", "h100"])
    assert result.exit_code == 2 and "cannot compile for h100 on this machine" in result.stderr
