"""Groups of replicas, as one of them sees them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed

from raydp_parallel.exchange import Join

dist: Any = distributed  # torch's stubs leave out most of what it takes to make a group of one's own

_LEAST = 0.001
"""Seconds that the last of a row of operations is waited for, however late it is."""


class Group:
    """One group that this process is a member of.

    Args:
        join: What the driver said of it.
        address: This process's address, for the network that the others are on.
        store: The store, if this process hosts it.
    """

    def __init__(self, join: Join, address: str, store: Any = None) -> None:
        self.rank, self.size = join.rank, join.size
        self._store = store or _store(join.store, host=False, patience=join.patience)
        patience = timedelta(seconds=join.patience)
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = patience
        options._threads = 2
        prefix = dist.PrefixStore(join.group, self._store)
        self._backend: Any = dist.ProcessGroupGloo(prefix, join.rank, join.size, options)

    def reduce(self, tensor: Tensor, root: int, patience: float) -> Any:
        """Begin to sum a tensor of each member into the root's. The others' are of no use afterwards."""
        options = dist.ReduceOptions()
        options.rootRank = root
        options.timeout = timedelta(seconds=patience)
        return self._backend.reduce([tensor], options)

    def broadcast(self, tensor: Tensor, root: int, patience: float) -> Any:
        """Begin to copy the root's tensor into those of the others."""
        options = dist.BroadcastOptions()
        options.rootRank = root
        options.timeout = timedelta(seconds=patience)
        return self._backend.broadcast([tensor], options)

    def close(self) -> None:
        """Leave. Others that still wait for this process see at once that they wait in vain."""
        self._backend = None


def wait(works: Sequence[Any], until: float) -> None:
    """Wait for operations; raises `RuntimeError` if one failed, or is not done by then."""
    for work in works:
        work.wait(timedelta(seconds=max(_LEAST, until - time.monotonic())))


def _store(where: tuple[str, int], host: bool, patience: float) -> Any:
    return dist.TCPStore(where[0], where[1], None, host, timedelta(seconds=patience), wait_for_workers=False)


class Groups:
    """The groups that this process is a member of.

    Args:
        address: This process's address, for the network that the others are on.
    """

    def __init__(self, address: str = "127.0.0.1") -> None:
        self.address = address
        self._host: Any = None
        self._groups: dict[str, Group] = {}

    def host(self, patience: float) -> tuple[str, int]:
        """Let members of groups find each other here; returns where."""
        if self._host is None:
            self._host = _store((self.address, 0), host=True, patience=patience)
        return self.address, self._host.port

    def join(self, request: Join) -> str:
        """Become a member, as soon as all others are there; returns what went wrong, empty if nothing did."""
        for name in request.left:
            self.leave(name)
        try:
            hosted = self._host is not None and request.store == (self.address, self._host.port)
            # Not on the GPU that a user made the default.
            with torch.device("cpu"):
                self._groups[request.group] = Group(request, self.address, self._host if hosted else None)
        except (RuntimeError, OSError, AttributeError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def find(self, name: str) -> Group | None:
        """A group, None if this process left it."""
        return self._groups.get(name)

    def leave(self, name: str) -> None:
        """Leave a group, if this process is in it."""
        group = self._groups.pop(name, None)
        if group is not None:
            group.close()
