"""One member's side of groups of replicas: joining, summing, copying and leaving."""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from raydp_parallel.transport.collective.backends import (
    Gloo,
    GroupBackend,
    Left,
    Nccl,
    Operation,
    dist,
)
from raydp_parallel.transport.collective.sums import Exchange, Pair, Summation
from raydp_parallel.transport.group_messages import GroupKind, JoinGroup

_GRACE = 2.0
"""Seconds beyond its patience after which an attempt to make a group is given up."""

_MEMORY = 100
"""The number of left groups that are remembered, so that a late request does not join one again."""


class Group:
    """A group that this process is a member of.

    Args:
        join: The driver's request.
        backend: This process's end of the group.
    """

    def __init__(self, join: JoinGroup, backend: GroupBackend) -> None:
        self.rank, self.size = join.rank, join.size
        self._backend = backend

    def sum(
        self,
        tensor: Tensor,
        root: int,
        order: Sequence[int],
        patience: float,
        into: Tensor | None = None,
    ) -> Summation:
        """Begin to sum a tensor of each member for the root. `padded` gives its length.

        Args:
            tensor: The tensor. Its values are lost, unless the group `spares` it.
            root: The member that gets the sum.
            order: The members in the order in which their tensors are added.
            patience: Seconds that the other members may take.
            into: In the root, the memory for the sum, used if the group `spares` tensors; by
                default ``tensor``.
        """
        tensor = self._backend.near(tensor)
        if self.spares:
            return Pair(
                self._backend,
                own=tensor,
                into=tensor if into is None else into,
                rank=self.rank,
                root=root,
                patience=patience,
            )
        return Exchange(self._backend, tensor, order, root, patience)

    @property
    def spares(self) -> bool:
        """Whether `sum` does not write to the members' tensors, if the root gives other memory for
        the sum.
        """
        return self.size == 2

    def padded(self, length: int) -> int:
        """The least length, from ``length`` on, that `sum` accepts."""
        return -(-length // self.size) * self.size

    def probe(self, device: torch.device, patience: float) -> None:
        """Sum a number of each member, to open the connections and to see that the group works."""
        mine = torch.full((self.padded(1),), self.rank + 1.0, device=device)
        total = self.sum(mine, 0, range(self.size), patience).finish(time.monotonic() + patience)
        expected = self.size * (self.size + 1) / 2
        if self.rank == 0 and float(total[0]) != expected:
            raise RuntimeError(f"the members' sum was {float(total[0])}, and not {expected}")

    def broadcast(self, tensor: Tensor, root: int, patience: float) -> Operation:
        """Begin to copy the root's tensor to the tensors of the other members."""
        return self._backend.broadcast(tensor, root, patience)

    def leave(self) -> None:
        """Leave the group, from any thread. Threads of this process that wait for members stop."""
        self._backend.leave()


def wait(operations: Sequence[Operation], until: float) -> None:
    """Wait for operations; raises `RuntimeError` if one failed, or is not done by ``until``."""
    for operation in operations:
        operation.finish(until)


def _hosted(address: str, patience: float) -> Any:
    """A new store that listens at one address. Torch's own would listen at all addresses of this
    machine.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listening = socket.create_server((address, 0), family=family)
    port = listening.getsockname()[1]
    return _store((address, port), patience, is_master=True, master_listen_fd=listening.detach())


def _store(where: tuple[str, int], patience: float, **how: Any) -> Any:
    return dist.TCPStore(*where, timeout=timedelta(seconds=patience), wait_for_workers=False, **how)


class _Attempt:
    """An attempt to make a group, in a thread of its own, because other members may never come.

    Args:
        join: The driver's request.
        address: This process's address in the network of the other members.
        store: The store, if this process hosts it.
        device: The device of this process.
    """

    def __init__(self, join: JoinGroup, address: str, store: Any, device: torch.device) -> None:
        self.group: Group | None = None
        self.trouble = "no answer from the others"
        self.over = threading.Event()
        self._guard = threading.Lock()
        self._given_up = False
        self._backend: GroupBackend | None = None
        arguments = join, address, store, device
        # A new thread has torch's original default device, which a user may have changed elsewhere.
        threading.Thread(
            target=self._run, args=arguments, name="raydp-joining", daemon=True
        ).start()

    def _run(self, join: JoinGroup, address: str, store: Any, device: torch.device) -> None:
        try:
            store = store or _store(join.store, join.patience)
            backend: GroupBackend
            if join.kind is GroupKind.NCCL:
                backend = Nccl(join, device, store)
            else:
                backend = Gloo(join, address, store)
            with self._guard:
                self._backend = backend
                if self._given_up:
                    return backend.leave()
            backend.connect()
            group = Group(join, backend)
            group.probe(device, join.patience)
            self.group = group
        except (RuntimeError, OSError, AttributeError) as error:
            self.trouble = f"{type(error).__name__}: {error}"
        finally:
            self.over.set()

    def give_up(self) -> None:
        """Abandon the attempt: its group is left, also if it is made later."""
        with self._guard:
            self._given_up = True
            if self._backend is not None:
                self._backend.leave()
        self.group = None
        self.over.set()


class Groups:
    """The groups that this process is a member of.

    Args:
        address: This process's address in the network of the other members.
        device: The device of this process.
    """

    def __init__(self, address: str = "127.0.0.1", device: torch.device | None = None) -> None:
        self.address = address
        self._device = device or torch.device("cpu")
        self._host: Any = None
        self._guard = threading.Lock()
        self._groups: dict[str, Group] = {}
        self._attempts: dict[str, _Attempt] = {}
        self._gone: deque[str] = deque(maxlen=_MEMORY)

    def host(self, patience: float) -> tuple[str, int]:
        """Host the store by which members of groups find each other; returns its address."""
        if self._host is None:
            self._host = _hosted(self.address, patience)
        return self.address, self._host.port

    def join(self, request: JoinGroup) -> str:
        """Become a member, as soon as all other members are there; returns the error's text, empty
        on success.
        """
        hosted = self._host is not None and request.store == (self.address, self._host.port)
        with self._guard:
            if request.group in self._gone:
                return str(Left("it was left before this process had joined"))
            attempt = _Attempt(request, self.address, self._host if hosted else None, self._device)
            self._attempts[request.group] = attempt
        over = attempt.over.wait(request.patience + _GRACE)
        with self._guard:
            del self._attempts[request.group]
            group = attempt.group
            if over and group is not None and request.group not in self._gone:
                self._groups[request.group] = group
                return ""
        attempt.give_up()
        return attempt.trouble

    def find(self, name: str) -> Group | None:
        """A group by its name, None if this process has left it."""
        return self._groups.get(name)

    def leave(self, name: str) -> None:
        """Leave a group, if this process is in it or is joining it. From any thread, also while
        another one waits in it.
        """
        with self._guard:
            self._gone.append(name)
            group, attempt = self._groups.pop(name, None), self._attempts.get(name)
        if attempt is not None:
            attempt.give_up()
        if group is not None:
            group.leave()
