"""The tiny training run in one of several processes, with four CPU devices together.

`python -m tests.train_cpt.distributed_run FOLDER PROCESSES PORT PROCESS`
"""

import os
import sys
from pathlib import Path

import jax


def main(folder: Path, processes: int, port: int, process: int) -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4 // processes)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_disable_most_optimizations", True)
    jax.config.update("jax_compilation_cache_dir", str(folder / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    jax.distributed.initialize(f"localhost:{port}", processes, process)
    # JAX must know of the other processes before anything of it is used.
    from tests.train_cpt.tiny_run import run_distributed

    run_distributed(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
