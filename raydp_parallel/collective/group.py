"""Groups of replicas, as one of them sees them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor, distributed

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
        self._backend: Any = self._make(join, "", options)
        # Parts of one sum go to the root while those of the next are exchanged, here sooner and there later.
        self._second: Any = self._make(join, "+", options) if join.size > 2 else None

    def _make(self, join: Join, which: str, options: Any) -> Any:
        prefix = dist.PrefixStore(join.group + which, self._store)
        return dist.ProcessGroupGloo(prefix, join.rank, join.size, options)

    def sum(self, tensor: Tensor, root: int, order: Sequence[int], patience: float) -> Summation:
        """Begin to sum a tensor of each member, whose length `padded` gives, for the root.

        Args:
            tensor: The tensor; of no use afterwards.
            root: Who gets the sum.
            order: The members in the order in which their tensors are added.
            patience: Seconds that the others may take.
        """
        if self.size == 2:
            # Two can be added in one way only; torch's own way for it takes twice as long.
            other = tensor if self.rank != root else torch.empty_like(tensor)
            return Pair(self.broadcast(other, 1 - root, patience), tensor, other)
        options = dist.AllToAllOptions()
        options.timeout = timedelta(seconds=patience)
        parts = torch.empty_like(tensor)
        work = self._backend.alltoall_base(parts, tensor, [], [], options)
        return Exchange(work, tensor, parts, order, lambda mine: self._gather(tensor, mine, root, patience))

    def padded(self, length: int) -> int:
        """The least length that `sum` can work with."""
        return -(-length // self.size) * self.size

    def _gather(self, whole: Tensor, part: Tensor, root: int, patience: float) -> Any:
        options = dist.GatherOptions()
        options.rootRank = root
        options.timeout = timedelta(seconds=patience)
        into = [[*whole.chunk(self.size)]] if self.rank == root else []
        return self._second.gather(into, [part], options)

    def broadcast(self, tensor: Tensor, root: int, patience: float) -> Any:
        """Begin to copy the root's tensor into those of the others."""
        options = dist.BroadcastOptions()
        options.rootRank = root
        options.timeout = timedelta(seconds=patience)
        return self._backend.broadcast([tensor], options)

    def close(self) -> None:
        """Leave. Others that still wait for this process see at once that they wait in vain."""
        self._backend = self._second = None


class Summation(Protocol):
    """A sum on its way."""

    def advance(self) -> bool:
        """Do what can be done without waiting; whether that was all, so that it may be the next one's turn."""

    def finish(self, until: float) -> Tensor:
        """Wait for it. In the root this is the sum. Raises `RuntimeError` if it did not come."""


class Pair:
    """A sum of two: one gives, the root adds.

    Args:
        work: Brings the other's tensor to the root.
        own: This member's tensor; the root's becomes the sum.
        other: In the root, the other's.
    """

    def __init__(self, work: Any, own: Tensor, other: Tensor) -> None:
        self._works = [work]
        self._own = own
        self._other = other

    def advance(self) -> bool:
        """Add, if the other's is there."""
        if self._works and self._works[0].is_completed():
            self.finish(time.monotonic())
        return not self._works

    def finish(self, until: float) -> Tensor:
        """Wait for it."""
        wait(self._works, until)
        if self._works and self._other is not self._own:
            self._own += self._other
        self._works.clear()
        return self._own


class Exchange:
    """A sum of many: each member gets one part of all tensors, adds them in order, and gives its part to the root.

    As many bytes travel as in the ring that backends use, whose order of additions depends on how many members there
    are and on who they are. This one is the driver's own, to the bit.

    Args:
        work: The exchange of the parts.
        whole: This member's tensor; the root's becomes the sum.
        parts: One part of each member's tensor, once the work is done.
        order: The members in the order of the sum.
        gather: Begins to bring a part to the root.
    """

    def __init__(
        self, work: Any, whole: Tensor, parts: Tensor, order: Sequence[int], gather: Callable[[Tensor], Any]
    ) -> None:
        self._works = [work]
        self._whole = whole
        self._parts = parts
        self._order = order
        self._gather = gather

    def advance(self) -> bool:
        """Add, if all parts are there."""
        if len(self._works) == 1 and self._works[0].is_completed():
            self._add(time.monotonic())
        return len(self._works) > 1

    def finish(self, until: float) -> Tensor:
        """Wait for it."""
        if len(self._works) == 1:
            self._add(until)
        wait(self._works[1:], until)
        return self._whole

    def _add(self, until: float) -> None:
        wait(self._works, until)
        parts = self._parts.chunk(len(self._order))
        total = parts[self._order[0]]
        for rank in self._order[1:]:
            total += parts[rank]
        self._works.append(self._gather(total))


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
