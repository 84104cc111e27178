"""Devices that need not be there, for programs that are compiled ahead of time."""

import pytest


def tpu(name="v5e:2x2"):
    """The chips of a TPU; skips the test without libtpu."""
    pytest.importorskip("libtpu")
    from jax.experimental import topologies

    return topologies.get_topology_desc(platform="tpu", topology_name=name).devices
