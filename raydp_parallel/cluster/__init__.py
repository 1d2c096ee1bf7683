"""Ray: joining a cluster, placing replicas on it, calling them, seeing their end."""

from raydp_parallel.cluster.answers import Pending, await_each
from raydp_parallel.cluster.crew import RayCrew
from raydp_parallel.cluster.door import RemoteDoor
from raydp_parallel.cluster.joining import connect, disconnect
from raydp_parallel.cluster.nodes import all_gpus, check_gpus
from raydp_parallel.cluster.session import Session

__all__ = [
    "Pending",
    "RayCrew",
    "RemoteDoor",
    "Session",
    "all_gpus",
    "await_each",
    "check_gpus",
    "connect",
    "disconnect",
]
