import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from jax_longctx.errors import InputError
from jax_longctx.locks import lock
from jax_longctx.replicas import cluster
from jax_longctx.replicas.cluster import FOLDERS
from tests.jax_longctx.replicas.ray import environment, needs_ray
from tests.patience import patience

USE = """
import os, sys
from jax_longctx.errors import InputError
from jax_longctx.replicas import cluster, devices_of

def kept():
    return [name for name in os.listdir("/tmp") if name.startswith(f"longctx-ray-{os.getpid()}-")]

try:
    with cluster(sys.argv[1] or None, 3) as ray:
        for mesh in (None, "data=2,tensor=2"):
            print(devices_of(ray, mesh))
        if sys.argv[2:]:
            print(*kept(), flush=True)
            os.kill(os.getpid(), int(sys.argv[2]))
        print(ray.cluster_resources()["CPU"] >= 3, kept() != [])
except InputError as error:
    print(error)
print(kept())
"""


def used(address="", *kill, code=0):
    """What a process that uses a cluster prints; stderr stays empty."""
    done = subprocess.run(
        [sys.executable, "-c", USE, address, *kill],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=patience(120),
    )
    assert (done.returncode, done.stderr) == (code, ""), done.stdout
    return done.stdout


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_the_extra_is_named():
    with pytest.raises(InputError, match=r"pip install 'jax-longctx\[ray\]'"), cluster(None, 2):
        pass


def test_there_is_a_replica_at_least():
    with pytest.raises(InputError, match="--replicas must be at least 1, got 0"), cluster(None, 0):
        pass


@needs_ray
@pytest.mark.slow
def test_this_machine_has_room_and_the_folder_of_a_killed_process_goes_with_the_next():
    assert not (Path("/tmp") / used("", "15", code=143).split()[-1]).exists()
    folder = Path("/tmp") / used("", "9", code=-9).split()[-1]
    with tempfile.TemporaryDirectory(None, FOLDERS, "/tmp") as other:
        held = os.open(other, os.O_RDONLY)
        assert lock(held) and folder.is_dir()
        own = "{'num_cpus': 1}\n"
        assert used() == f"{own}{own}True True\n[]\n"
        os.close(held)
        assert Path(other).is_dir() and not folder.exists()


@needs_ray
@pytest.mark.slow
@pytest.mark.parametrize(
    "address, said",
    [
        ("127.0.0.1:1", "no Ray cluster answers at 127.0.0.1:1: "),
        ("127.0.0.1:x", "--address is '127.0.0.1:x'; expected HOST:PORT"),
        ("ray://127.0.0.1:1", "--address is 'ray://127.0.0.1:1'; expected HOST:PORT"),
    ],
)
def test_a_cluster_that_is_not_there_is_one_clear_error(address, said):
    found = used(address)
    assert found.startswith(said) and found.endswith("\n[]\n") and found.count("\n") == 2
