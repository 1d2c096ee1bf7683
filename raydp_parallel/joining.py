"""Joining a Ray cluster, and what it has."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import ray
import torch
from ray._private.utils import read_ray_address

from raydp_parallel.errors import ClusterError, PlacementError

_CLIENT = (
    "a ray:// client connection cannot run replicas: it has no object store and adds a proxy to every call. "
    "Start the driver on a machine of the cluster (ray.init(address='auto')), or submit it as a Ray job"
)
_started_here = False


def connect(start: bool = True) -> bool:
    """Join the cluster: the one that is connected, ``RAY_ADDRESS``, one running here, else start one.

    Args:
        start: Whether to start a local cluster if there is none.

    Returns:
        Whether there is a cluster.
    """
    global _started_here
    if ray.util.client.ray.is_connected():
        raise ClusterError(_CLIENT)
    if ray.is_initialized():
        return True
    if os.environ.get("RAY_ADDRESS", "").startswith("ray://"):
        raise ClusterError(_CLIENT)
    # Ray's own rule. Not address="auto", which also finds the private cluster of somebody else's ray.init().
    running = bool(os.environ.get("RAY_ADDRESS") or read_ray_address())
    if not running and not start:
        return False
    ray.init()
    _started_here = not running
    return True


def disconnect() -> None:
    """Leave a cluster that `connect` started; any other is its user's."""
    global _started_here
    if _started_here and ray.is_initialized():
        ray.shutdown()
    _started_here = False


def gpus() -> list[str]:
    """The node of each logical GPU: the driver's node first, then by node id."""
    return [node["NodeID"] for node in nodes() for _ in range(int(node["Resources"].get("GPU", 0)))]


def all_gpus() -> list[int]:
    """Every GPU of the cluster. On a machine without a GPU no cluster is started just to find none."""
    return list(range(len(gpus()))) if connect(start=torch.cuda.is_available()) else []


def check_gpus(ids: Sequence[int]) -> None:
    """Raise `PlacementError` for ids that the cluster has not got."""
    connect()
    count = len(gpus())
    missing = [i for i in ids if i >= count]
    if missing:
        has = "no GPU" if not count else "GPU 0 alone" if count == 1 else f"GPUs 0 to {count - 1}"
        raise PlacementError(
            f"device_ids: {missing} not in the cluster, which has {has} on {len(nodes())} node(s). "
            "Use those, or 'cpu' entries for CPU replicas"
        )


def nodes() -> list[dict[str, Any]]:
    """The living nodes, the driver's first."""
    here = ray.get_runtime_context().get_node_id()
    alive = [node for node in ray.nodes() if node["Alive"]]
    return sorted(alive, key=lambda node: (node["NodeID"] != here, node["NodeID"]))
