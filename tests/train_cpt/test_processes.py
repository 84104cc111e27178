"""The same run in one process and in two."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jax_longctx.errors import ConfigError, InputError
from jax_longctx.sharding import make_mesh
from tests.train_cpt.tiny_run import STEPS, lines_of, prepare_tiny, run_distributed
from train_cpt.processes import on_first, own_part, own_rows, part_of

ROOT = Path(__file__).parents[2]


PROCESSES = 2


def run_in_processes(folder):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tests.train_cpt.distributed_run", folder, PROCESSES, port]
    started = [
        subprocess.Popen(
            [*map(str, command), str(process)], cwd=ROOT, stderr=subprocess.PIPE, text=True
        )
        for process in range(PROCESSES)
    ]
    for child in started:
        _, said = child.communicate(timeout=300)
        assert child.returncode == 0, said[-3000:]


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path):
    found = []
    for name, run in (("one", run_distributed), ("two", run_in_processes)):
        prepare_tiny(tmp_path / name / "data")
        run(tmp_path / name)
        found.append([json.loads(line) for line in lines_of(tmp_path / name / "run")])
        assert (tmp_path / name / "run" / "checkpoints" / str(STEPS)).is_dir()
    assert [line["step"] for line in found[1]] == [*range(1, STEPS + 1)]
    for name in ("loss", "gradient_norm", "dev_loss"):
        curves = [[line[name] for line in lines if name in line] for lines in found]
        np.testing.assert_allclose(*curves, rtol=1e-5)


def test_one_process_holds_all_texts_and_fails_as_itself():
    mesh = make_mesh(2, 1, 2)
    assert own_part(mesh) == (0, 1) and own_rows(mesh, 6) == slice(0, 6)

    def fails():
        raise InputError("mine")

    with pytest.raises(InputError, match="mine"):
        on_first(fails)


@pytest.mark.parametrize(
    ("owners", "expected"),
    [
        ([[0], [0], [1], [1]], (0, 2)),
        ([[1], [1], [0], [0]], (1, 2)),
        ([[1], [0], [2], [3]], (1, 4)),
        # Both hold every text, and one half of the heads each.
        ([[0, 1], [0, 1]], (0, 1)),
        ([[0], [1], [0], [1]], None),
        ([[1], [0], [0], [1]], None),
    ],
)
def test_a_process_reads_the_texts_of_its_shards(owners, expected):
    grid = np.array(owners)[:, None]
    if expected is None:
        with pytest.raises(ConfigError, match="give each process the same number"):
            part_of(0, grid)
    else:
        assert part_of(0, grid) == expected
