"""A tiny training run, the same in tests and in processes that are killed.

`python -m tests.train_cpt.tiny_run FOLDER KILLS SEED` runs it once uninterrupted, and once more
killed at random moments, and fails unless both end the same to the last bit. Python starts and
imports once: each attempt is a fork of a process in which JAX has not begun.
"""

import hashlib
import json
import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path

import jax
import numpy as np

from jax_longctx.models.params import init_params
from jax_longctx.sharding import make_mesh
from tests.support import tiny_config
from train_cpt.attention import Pattern
from train_cpt.data import open_windows, prepare
from train_cpt.loop import LoopConfig, train
from train_cpt.step import OptimizerConfig, TrainSetup

LENGTH, STEPS = 16, 12
LOOP = LoopConfig(rows=4, micro_batches=2, save_every=2, keep=2)
FACTS = {"config": {"tiny": True}}


def tiny_setup(mesh=(1, 1, 1)):
    return TrainSetup(
        config=tiny_config(num_layers=1),
        mesh=make_mesh(*mesh),
        optimizer=OptimizerConfig(steps=STEPS, warmup=2, learning_rate=0.01),
        pattern=Pattern(tail=4, budget=3, kernel=3),
        dtype="float32",
        remat="none",
        loss_chunk=64,
    )


def prepare_tiny(folder):
    rows = np.random.default_rng(0).integers(0, 64, (60, LENGTH))
    texts = [(str(number), bytes(row.tolist()).decode()) for number, row in enumerate(rows)]
    how = {"length": LENGTH, "vocab_size": 64, "tokenizer": "letters"}
    prepare(texts, lambda text: list(text.encode()), folder, **how)


def tiny_params():
    return init_params(tiny_config(num_layers=1))


def run_tiny(folder, data, *, loop=LOOP, facts=FACTS, progress=None, make_params=tiny_params):
    setup = tiny_setup()
    windows, dev = (
        open_windows(data, split, length=LENGTH, tokenizer="letters") for split in ("train", "dev")
    )
    return train(loop, setup, make_params, windows, dev, folder, facts=facts, progress=progress)


def digest(state):
    leaves = jax.tree.leaves(jax.device_get((state.params, state.moments, state.step)))
    return hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in leaves)).hexdigest()


def lines_of(folder):
    metrics = folder / "metrics.jsonl"
    return metrics.read_text().splitlines() if metrics.exists() else []


def losses_of(folder):
    return [(line["step"], line["loss"]) for line in map(json.loads, lines_of(folder))]


def begin(folder, data, pause=0.0):
    """Starts the run in a process of its own; where it ends, it writes `end`."""
    child = os.fork()
    if child:
        return child
    try:
        outcome = run_tiny(folder, data, progress=lambda *_: time.sleep(pause))
        # Every bit of the state, and every loss.
        (folder / "end").write_text(f"{digest(outcome.state)} {losses_of(folder)}")
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def await_steps(child, folder, steps):
    """Waits until the run has written a line for that many steps, or has ended."""
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if len(lines_of(folder)) >= steps:
            return True
        time.sleep(0.002)
    return False


def main(folder, kills, seed):
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_disable_most_optimizations", True)
    jax.config.update("jax_compilation_cache_dir", str(folder / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    os.environ["JAX_PLATFORMS"] = "cpu"
    data, straight, broken = folder / "data", folder / "straight", folder / "broken"
    prepare_tiny(data)
    os.waitpid(begin(straight, data), 0)
    expected = (straight / "end").read_text()
    assert len(losses_of(straight)) == STEPS
    rng, killed = random.Random(seed), 0
    while killed < kills:
        # Steps take longer here, so that most kills meet one, or the checkpoint behind it.
        target = len(lines_of(broken)) + rng.randint(0, 2)
        child = begin(broken, data, pause=0.03)
        if await_steps(child, broken, target):
            time.sleep(rng.random() * 0.1)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        if (broken / "end").exists():
            # It was quicker: the next kills meet another run.
            assert (broken / "end").read_text() == expected
            broken = broken.with_name(f"{broken.name}-again")
        else:
            killed += 1
    os.waitpid(begin(broken, data), 0)
    assert (broken / "end").read_text() == expected
    print(json.dumps({"killed": killed}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
