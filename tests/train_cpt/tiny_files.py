"""A tiny checkpoint, texts and a run's configuration on disk; and a run of it that is interrupted.

`python -m tests.train_cpt.tiny_files FOLDER PROCESSES PORT PROCESS` runs it in one of several
processes, with four CPU devices together.
"""

import os
import signal
import sys
from pathlib import Path

import jax

CONFIG = """
[run]
checkpoint = "{folder}/model"
output = "{folder}/run"
dtype = "float32"
[data]
directory = "{folder}/data"
sources = ["{folder}/texts"]
length = 16
shares = [1, 0, 0]
[pattern]
tail = 4
budget = 3
[optimizer]
steps = 2
warmup = 0
learning_rate = 0.01
[loop]
rows = 2
"""


def write_tiny(folder):
    import checkpoints_convert
    from tests.checkpoints_convert.tiny import hf_config, random_state, write_checkpoint

    config = hf_config("llama-tied-biased", num_hidden_layers=1)
    write_checkpoint(folder / "hf", config, random_state(config))
    checkpoints_convert.convert(str(folder / "hf"), folder / "model")
    (folder / "texts").mkdir()
    for number in range(4):
        (folder / "texts" / f"{number}.txt").write_text(f"text {number} " * 5)
    (folder / "texts" / "short.md").write_text("short")
    (folder / "run.toml").write_text(CONFIG.format(folder=folder))


def main(folder, processes, port, process):
    """The run of a configuration, ended by a SIGTERM to the last process alone, and taken up."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4 // processes)
    jax.config.update("jax_disable_most_optimizations", True)
    jax.config.update("jax_default_matmul_precision", "highest")
    jax.distributed.initialize(f"localhost:{port}", processes, process)
    from train_cpt.run import read_config, run_config

    config, stopped = read_config(folder / "run.toml"), []

    def progress(step, steps, line):
        if step == 2 and process == processes - 1 and not stopped:
            stopped.append(step)
            os.kill(os.getpid(), signal.SIGTERM)

    for ended, steps in (("terminated", 2), ("done", config.optimizer.steps)):
        outcome = run_config(config, note=print, progress=progress)
        assert (outcome.ended, outcome.step) == (ended, steps)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
