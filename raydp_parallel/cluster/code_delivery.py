"""Which modules replicas were sent; each gets what it lacks before its next call, and no other
waits for it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any

from raydp_parallel.cluster import ray_api
from raydp_parallel.cluster.client import ReplicaClient
from raydp_parallel.transport.messages import Package

log = logging.getLogger("raydp_parallel")


class Teaching:
    """The modules that the replicas of one backend were sent.

    Attributes:
        lessons: Counts what was sent to any of them.
    """

    def __init__(self) -> None:
        self.lessons = 0
        self._taught: dict[str, tuple[str, Any]] = {}
        self._lock = threading.Lock()

    def add(self, package: Package, clients: Sequence[ReplicaClient]) -> bool:
        """Give a module to all, each before its next call; False if all of these have it
        already.
        """
        with self._lock:
            if self._taught.get(package.name, ("",))[0] != package.digest:
                self._taught[package.name] = package.digest, ray_api.put(package)
                self.lessons += 1
                log.info(
                    "replicas cannot import the driver's %s: its files are sent to them",
                    package.name,
                )
                return True
        return any(client.learned.get(package.name) != package.digest for client in clients)

    def catch_up(self, client: ReplicaClient, timeout: float | None) -> None:
        """Send a replica what it lacks."""
        if client.lessons == self.lessons:
            return
        with self._lock:
            lessons, taught = self.lessons, dict(self._taught)
        missing = {
            name: entry for name, entry in taught.items() if client.learned.get(name) != entry[0]
        }
        ray_api.get(
            [client.actor.learn.remote(ref) for _, ref in missing.values()], timeout=timeout
        )
        client.learned.update((name, digest) for name, (digest, _) in missing.items())
        client.lessons = lessons
