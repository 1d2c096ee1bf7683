"""Ray: joining a cluster, placing replicas on it, calling them, seeing their end."""

from raydp_parallel.cluster.client import Pending, ReplicaClient, await_each
from raydp_parallel.cluster.joining import connect, disconnect
from raydp_parallel.cluster.placement import all_gpus, check_gpus
from raydp_parallel.cluster.ray_api import Session
from raydp_parallel.cluster.ray_backend import RayBackend

__all__ = [
    "Pending",
    "RayBackend",
    "ReplicaClient",
    "Session",
    "all_gpus",
    "await_each",
    "check_gpus",
    "connect",
    "disconnect",
]
