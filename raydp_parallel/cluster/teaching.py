"""Which modules replicas were sent; each gets what it lacks before its next call, and no other waits for it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any

from raydp_parallel.cluster import session
from raydp_parallel.cluster.door import RemoteDoor
from raydp_parallel.messages import Package

log = logging.getLogger("raydp_parallel")


class Teaching:
    """The modules that the replicas of one crew were sent.

    Attributes:
        lessons: Counts what was sent to any of them.
    """

    def __init__(self) -> None:
        self.lessons = 0
        self._taught: dict[str, tuple[str, Any]] = {}
        self._lock = threading.Lock()

    def add(self, package: Package, doors: Sequence[RemoteDoor]) -> bool:
        """Give a module to all, each before its next call; False if all of these have it already."""
        with self._lock:
            if self._taught.get(package.name, ("",))[0] != package.digest:
                self._taught[package.name] = package.digest, session.put(package)
                self.lessons += 1
                log.info("replicas cannot import the driver's %s: its files are sent to them", package.name)
                return True
        return any(door.learned.get(package.name) != package.digest for door in doors)

    def catch_up(self, door: RemoteDoor, timeout: float | None) -> None:
        """Send a replica what it lacks."""
        if door.lessons == self.lessons:
            return
        with self._lock:
            lessons, taught = self.lessons, dict(self._taught)
        missing = {name: entry for name, entry in taught.items() if door.learned.get(name) != entry[0]}
        session.get([door.actor.learn.remote(ref) for _, ref in missing.values()], timeout=timeout)
        door.learned.update((name, digest) for name, (digest, _) in missing.items())
        door.lessons = lessons
