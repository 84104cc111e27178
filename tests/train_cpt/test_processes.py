"""The same run in one process and in two."""

import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jax_longctx.models.storage import load_params
from jax_longctx.sharding import make_mesh
from tests.patience import patience
from tests.train_cpt.tiny_files import write_tiny
from train_cpt.metrics import read_metrics
from train_cpt.run import read_config, run_config
from train_cpt.step import place_texts

ROOT = Path(__file__).parents[2]
PROCESSES, STEPS = 2, 4


def run_in_processes(folder):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tests.train_cpt.tiny_files", folder, PROCESSES, port]
    started = [
        subprocess.Popen(
            [*map(str, command), str(process)], cwd=ROOT, stderr=subprocess.PIPE, text=True
        )
        for process in range(PROCESSES)
    ]
    for child in started:
        _, said = child.communicate(timeout=patience(300))
        assert child.returncode == 0, said[-3000:]


@pytest.mark.long
@pytest.mark.thorough
def test_two_processes_that_are_interrupted_train_as_one_that_is_not(tmp_path):
    write_tiny(tmp_path)
    text = (tmp_path / "run.toml").read_text().replace('"float32"', '"float32"\nmesh = "{mesh}"')
    text = text.replace("steps = 2", f"steps = {STEPS}").replace("[1, 0, 0]", "[0.85, 0.15, 0]")
    text += "evaluate_every = 2\n"
    runs = []
    for name, run in (
        ("one", lambda folder: run_config(read_config(folder / "run.toml"), note=print)),
        ("two", run_in_processes),
    ):
        folder = tmp_path / name
        folder.mkdir()
        changed = text.replace("{mesh}", "data=2,tensor=2")
        for made in ("run", "data"):
            changed = changed.replace(f'"{tmp_path}/{made}"', f'"{folder}/{made}"')
        (folder / "run.toml").write_text(changed)
        run(folder)
        runs.append(folder / "run")
    lines = [read_metrics(run) for run in runs]
    assert [line["step"] for line in lines[1]] == [*range(1, STEPS + 1)]
    for name in ("loss", "gradient_norm", "dev_loss"):
        curves = [[line[name] for line in found if name in line] for found in lines]
        np.testing.assert_allclose(*curves, rtol=1e-5)
        assert curves[0]
    weights = [load_params(run / "model", make_mesh()) for run in runs]
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
