"""JAX's CUDA plugin, with which tests compile for an H200 that need not be there.

JAX looks for plugins once, when it begins. So what compiles is a module in a process of its own.
"""

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.experimental import topologies

from tests.patience import patience

REPOSITORY = Path(__file__).parents[1]
PLUGIN = os.environ.get("LONGCTX_GPU_PLUGIN")
needs_plugin = pytest.mark.skipif(
    PLUGIN is None or not (Path(PLUGIN) / "jax_plugins").is_dir(),
    reason="needs JAX's CUDA plugin: LONGCTX_GPU_PLUGIN names no folder that holds it",
)


def output(module: str, *arguments: str, **variables: str) -> str:
    """What `python -m module arguments` prints, compiled as users compile."""
    # Without the flags and the cache of the tests.
    left_out = ("XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    environment |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{PLUGIN}"}
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=REPOSITORY,
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=patience(1800),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def compiler(target: str) -> Callable[..., None]:
    """In such a process: what compiles a function of arrays of these shapes and dtypes."""
    jax.config.update("jax_enable_compilation_cache", False)
    # The plugin is registered with the first backend.
    jax.devices("cpu")
    found = topologies.get_topology_desc(platform="cuda", target_config=target, topology="1x1x1")
    mesh = jax.sharding.Mesh(found.devices[:1], ("x",))
    there = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    on = functools.partial(jax.ShapeDtypeStruct, sharding=there)

    def compiled(run: Callable[..., Any], *shapes: tuple[tuple[int, ...], Any]) -> None:
        given = [on(*each) for each in shapes]
        jax.jit(run).trace(*given).lower(lowering_platforms=("cuda",)).compile()

    return compiled
