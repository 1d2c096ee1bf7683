"""Ways to train the same net: each makes steps when told, times itself, and says at the end what
its weights are.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

from benchmarks.peers import by_hand, here, naive_ray, processes, ray_train
from benchmarks.peers.base import Peer, Weights

__all__ = ["BY_HAND", "IN_REPLICAS", "PEERS", "Peer", "Weights", "missing"]

IN_REPLICAS = "raydp_parallel, optimizer in the replicas"
"""The loop in the driver, and the weights with their optimizer where the replicas are."""

BY_HAND = "two processes by hand"
"""The floor of a loop in the driver."""

PEERS: dict[str, Callable[[int], Peer]] = {
    "DDP gloo": processes.ddp,
    "raydp_parallel": here.ours,
    IN_REPLICAS: here.ours_in_replicas,
    BY_HAND: by_hand.by_hand,
    "one process": here.plain,
    "Accelerate": processes.accelerate,
    "Ray Train": ray_train.ray_train,
    "naive Ray": naive_ray.NaiveRay,
}
"""By name: what starts it, given the number of workers. The first is what the others are compared
with.
"""

_NEEDS = {"Accelerate": ("accelerate",), "Ray Train": ("pandas", "pyarrow")}


def missing(name: str) -> list[str]:
    """The packages that a peer needs and that are not installed."""
    return [
        package for package in _NEEDS.get(name, ()) if importlib.util.find_spec(package) is None
    ]
