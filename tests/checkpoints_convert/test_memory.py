"""Peak memory of a conversion and of an export, on a checkpoint of 700 MB."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from tests.checkpoints_convert.tiny import hf_config, hf_shapes, write_checkpoint

ROOT = Path(__file__).parents[2]
SIZES = {"vocab_size": 65536, "hidden_size": 1024, "intermediate_size": 4096}
HEADS = {"num_attention_heads": 16, "num_key_value_heads": 16}
CONFIG = hf_config("llama", num_hidden_layers=13, **SIZES, **HEADS)
LARGEST = 65536 * 1024

# VmHWM is this program's own peak; ru_maxrss would begin at that of the process that started it.
# VmRSS is what it holds, between two tensors.
CODE = """
import re, sys
import jax
def memory(key):
    return int(re.search(key + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
jax.devices()
before = memory("VmHWM")
import checkpoints_convert
for action, paths, options in eval(sys.argv[1]):
    held = []
    options["progress"] = lambda done, total: held.append(memory("VmRSS"))
    getattr(checkpoints_convert, action)(*paths, **options)
    print(memory("VmHWM") - before, max(held) - before)
"""

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Random bfloat16 in shards of about 400 MB; the bits are drawn, with small exponents."""
    rng = np.random.default_rng(0)
    bits = {
        name: rng.integers(0, 1 << 16, shape, dtype=np.uint16) & 0xBFFF
        for name, shape in hf_shapes(CONFIG).items()
    }
    state = {name: array.view(ml_dtypes.bfloat16) for name, array in bits.items()}
    folder = tmp_path_factory.mktemp("large") / "hf"
    yield write_checkpoint(folder, CONFIG, state, shards=3)
    # Gigabytes that pytest would keep for three runs.
    shutil.rmtree(folder)


def memory_of(actions):
    command = [sys.executable, "-W", "error", "-c", CODE, repr(actions)]
    # Freed arrays go back to the system at once: what glibc would keep of them differs by chance.
    told = {"JAX_PLATFORMS": "cpu", "MALLOC_MMAP_THRESHOLD_": "1000000"}
    how = {"cwd": ROOT, "env": os.environ | told, "text": True}
    done = subprocess.run(command, capture_output=True, **how)
    assert done.returncode == 0, done.stderr
    return [[int(number) for number in line.split()] for line in done.stdout.splitlines()]


# What is called, from, to, its options.
BACK = ("export", "ours", "back", {})


@pytest.mark.parametrize(
    ("actions", "item"),
    [
        ([("convert", "hf", "ours", {"dtype": "source"}), BACK], 2),
        # The embedding, the largest tensor, stays in two bytes.
        ([("convert", "hf", "ours", {"weights": "int8"})], 2),
        pytest.param(
            [("convert", "hf", "ours", {"dtype": "float32"}), BACK], 4, marks=pytest.mark.thorough
        ),
    ],
    ids=["two bytes", "eight bits", "four bytes"],
)
def test_peak_memory_is_a_few_tensors(tmp_path, large, actions, item):
    largest, rest = LARGEST * item, 150e6
    whole = sum(np.prod(shape) for shape in hf_shapes(CONFIG).values()) * item
    assert 2 * largest + rest < whole * 0.6
    folder = {"hf": str(large)} | {to: str(tmp_path / to) for _, _, to, _ in actions}
    calls = [(name, (folder[a], folder[b]), how) for name, a, b, how in actions]
    found = dict(zip(map(str, actions), memory_of(calls), strict=True))
    shutil.rmtree(tmp_path)
    for peak, held in found.values():
        assert peak <= 2 * largest + rest and held <= largest + rest, found
