"""Replicas: several meshes, each in a process of its own, on Ray (the extra `ray`)."""

from jax_longctx.replicas.cluster import cluster, devices_of
from jax_longctx.replicas.pool import SHARES, Replicas, Share

__all__ = ["SHARES", "Replicas", "Share", "cluster", "devices_of"]
