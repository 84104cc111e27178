"""Ray for tests: its packages are beside those of the environment (`.ci/ray.txt`)."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
RAY = ROOT / ".cache/ray"
MADE = ".venv/bin/pip install --no-deps --target .cache/ray --requirement .ci/ray.txt"
needs_ray = pytest.mark.skipif(not (RAY / "ray").is_dir(), reason=f"no Ray for tests: {MADE}")


def environment(**variables):
    """The variables of a process that finds Ray."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, RAY))), **variables}
