"""Peak memory of a conversion and of an export, on a checkpoint of 1 GB."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.checkpoints_convert.tiny import hf_config, hf_shapes, write_tokenizer

ROOT = Path(__file__).parents[2]
CONFIG = hf_config(
    "llama",
    vocab_size=65536,
    hidden_size=1024,
    intermediate_size=4096,
    num_hidden_layers=22,
    num_attention_heads=16,
    num_key_value_heads=16,
)
LARGEST = 65536 * 1024

# VmHWM is this program's own peak; ru_maxrss would begin at that of the process that started it.
CODE = """
import re, sys
import jax
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
jax.devices()
before = peak()
import checkpoints_convert
getattr(checkpoints_convert, sys.argv[1])(sys.argv[2], sys.argv[3], **eval(sys.argv[4]))
print(peak() - before)
"""


def write_large(folder):
    """Random bfloat16 in shards of about 400 MB; the bits are drawn, with small exponents."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    write_tokenizer(folder)
    rng = np.random.default_rng(0)
    placed, shard, held, total = {}, {}, 0, 0

    def flush():
        name = f"model-{len(set(placed.values())) + 1:05d}.safetensors"
        save_file(shard, folder / name)
        placed.update(dict.fromkeys(shard, name))
        shard.clear()

    for tensor, shape in hf_shapes(CONFIG).items():
        bits = rng.integers(0, 1 << 16, shape, dtype=np.uint16) & 0xBFFF
        shard[tensor] = bits.view(ml_dtypes.bfloat16)
        held, total = held + bits.nbytes, total + bits.nbytes
        if held > 400e6:
            flush()
            held = 0
    flush()
    index = {"metadata": {"total_size": total}, "weight_map": placed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def peak_of(action, *paths, **options):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", CODE, action, *map(str, paths), repr(options)],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory_of_8_bits(tmp_path):
    """The embedding, the largest tensor, stays in two bytes."""
    write_large(tmp_path / "hf")
    peak = peak_of("convert", tmp_path / "hf", tmp_path / "ours", weights="int8")
    for folder in tmp_path.iterdir():
        shutil.rmtree(folder)
    print(f"{peak / 1e6:.0f} MB for a largest tensor of {LARGEST * 2 / 1e6:.0f} MB")
    assert peak <= 2 * LARGEST * 2 + 300e6


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("dtype", "item"), [("source", 2), pytest.param("float32", 4, marks=pytest.mark.thorough)]
)
def test_peak_memory_is_a_few_tensors(tmp_path, dtype, item):
    total = write_large(tmp_path / "hf") * item / 2
    most = 2 * LARGEST * item + 300e6
    assert most < total * 0.6
    peak = peak_of("convert", tmp_path / "hf", tmp_path / "ours", dtype=dtype)
    print(f"{dtype}: {peak / 1e6:.0f} MB for a largest tensor of {LARGEST * item / 1e6:.0f} MB")
    assert peak <= most
    peak = peak_of("export", tmp_path / "ours", tmp_path / "back")
    # Gigabytes that pytest would keep for three runs.
    for folder in tmp_path.iterdir():
        shutil.rmtree(folder)
    print(f"export: {peak / 1e6:.0f} MB")
    assert peak <= most
