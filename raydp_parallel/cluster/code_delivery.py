"""The source files that replicas are sent: each replica gets those that it lacks before its next
call, and no other waits for it.
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


class CodeDelivery:
    """The modules that the replicas of one backend were sent.

    Attributes:
        version: The number of modules that were added; a replica with this number has all of them.
    """

    def __init__(self) -> None:
        self.version = 0
        self._packages: dict[str, tuple[str, Any]] = {}
        self._lock = threading.Lock()

    def add(self, package: Package, clients: Sequence[ReplicaClient]) -> bool:
        """Send a module to all replicas, to each before its next call; False if all of these have
        it already.
        """
        with self._lock:
            if self._packages.get(package.name, ("",))[0] != package.digest:
                self._packages[package.name] = package.digest, ray_api.put(package)
                self.version += 1
                log.info(
                    "replicas cannot import the driver's %s: its files are sent to them",
                    package.name,
                )
                return True
        return any(client.modules.get(package.name) != package.digest for client in clients)

    def catch_up(self, client: ReplicaClient, timeout: float | None) -> None:
        """Send a replica the modules that it lacks."""
        if client.code_version == self.version:
            return
        with self._lock:
            version, packages = self.version, dict(self._packages)
        missing = {
            name: entry for name, entry in packages.items() if client.modules.get(name) != entry[0]
        }
        ray_api.get(
            [client.actor.learn.remote(ref) for _, ref in missing.values()], timeout=timeout
        )
        client.modules.update((name, digest) for name, (digest, _) in missing.items())
        client.code_version = version
