"""Replicas: several meshes, each in a process of its own, on Ray (the extra `ray`)."""

from jax_longctx.replicas.cluster import cluster, devices_of

__all__ = ["cluster", "devices_of"]
