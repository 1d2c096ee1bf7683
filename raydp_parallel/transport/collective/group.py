"""One member's side of groups of replicas: joining, summing, copying and leaving."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from raydp_parallel import devices
from raydp_parallel.devices import trials
from raydp_parallel.transport import handshake
from raydp_parallel.transport.collective.backends import (
    Gloo,
    GroupBackend,
    Left,
    Nccl,
    Operation,
)
from raydp_parallel.transport.collective.store import StoreClient, StoreServer
from raydp_parallel.transport.collective.sums import Exchange, Pair, Summation
from raydp_parallel.transport.group_messages import GroupKind, JoinGroup

_GRACE = 2.0
"""Seconds beyond its patience after which an attempt to make a group is given up."""

_MEMORY = 100
"""The number of left groups that are remembered, so that a late request does not join one again."""

_LEFT = "it was left before this process had joined"


class Group:
    """A group that this process is a member of.

    Args:
        join: The driver's request.
        backend: This process's end of the group.
        store: This process's end of the group's store, which torch may ask as long as the group
            exists.
    """

    def __init__(self, join: JoinGroup, backend: GroupBackend, store: StoreClient) -> None:
        self.rank, self.size = join.rank, join.size
        self._backend = backend
        self._store = store

    def sum(
        self,
        tensor: Tensor,
        root: int | None,
        order: Sequence[int],
        patience: float,
        into: Tensor | None = None,
    ) -> Summation:
        """Begin to sum a tensor of each member for the root, or for all. `padded` gives its length.

        Args:
            tensor: The tensor. Its values are lost, unless the group `spares` it.
            root: The member that gets the sum; None if all do.
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
        """Sum numbers of each member, twice, to open the connections and to see that the group
        works. A GPU is busy before it has them.
        """
        for number in range(1, trials.ROUNDS + 1):
            if devices.is_cpu(device):
                ones = torch.ones(self.padded(1), device=device)
            else:
                ones = trials.late_ones(device)[: self.padded(trials.SIZE // 4)]
            mine = ones * number * (self.rank + 1)
            until = time.monotonic() + patience
            total = self.sum(mine, 0, range(self.size), patience).finish(until)
            expected = number * self.size * (self.size + 1) / 2
            if self.rank == 0 and not bool((total == expected).all()):
                raise RuntimeError(f"the members' sum was {float(total[0])}, and not {expected}")

    def broadcast(self, tensor: Tensor, root: int, patience: float) -> Operation:
        """Begin to copy the root's tensor to the tensors of the other members."""
        return self._backend.broadcast(tensor, root, patience)

    def swap(self, whole: Tensor, patience: float, until: float) -> Tensor:
        """Give each member its part of a tensor, in the order of ranks; returns the parts that the
        members gave to this one. Waits until ``until``.
        """
        whole = self._backend.near(whole)
        with self._backend.aside(whole):
            parts = torch.empty_like(whole)
            self._backend.exchange(parts, whole, patience).finish(until)
        self._backend.rejoin(parts)
        return parts

    def leave(self) -> None:
        """Leave the group, from any thread. Threads of this process that wait for members stop."""
        self._backend.leave()
        self._store.close()


def wait(operations: Sequence[Operation], until: float) -> None:
    """Wait for operations; raises `RuntimeError` if one failed, or is not done by ``until``."""
    for operation in operations:
        operation.finish(until)


class _Attempt:
    """An attempt to make a group, in a thread of its own, because other members may never come.

    Args:
        join: The driver's request.
        address: This process's address in the network of the other members.
        secret: What members have to know.
        device: The device of this process.
    """

    def __init__(self, join: JoinGroup, address: str, secret: str, device: torch.device) -> None:
        self.group: Group | None = None
        self.trouble = "no answer from the others"
        self.over = threading.Event()
        self._guard = threading.Lock()
        self._given_up = False
        self._backend: GroupBackend | None = None
        self._store: StoreClient | None = None
        arguments = join, address, secret, device
        # A new thread has torch's original default device, which a user may have changed elsewhere.
        threading.Thread(
            target=self._run, args=arguments, name="raydp-joining", daemon=True
        ).start()

    def _run(self, join: JoinGroup, address: str, secret: str, device: torch.device) -> None:
        try:
            store = StoreClient(join.store, secret, join.patience)
            with self._guard:
                self._store = store
                if self._given_up:
                    store.close()  # what follows fails at once
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
            group = Group(join, backend, store)
            group.probe(device, join.patience)
            store.rest()
            self.group = group
        except (RuntimeError, OSError, AttributeError) as error:
            if not self._given_up:
                self.trouble = f"{type(error).__name__}: {error}"
        finally:
            self.over.set()

    def give_up(self) -> None:
        """Abandon the attempt: its group is left, also if it is made later."""
        with self._guard:
            self._given_up = True
            if self._backend is not None:
                self._backend.leave()
            if self._store is not None:
                self._store.close()
        self.group = None
        self.over.set()


class Groups:
    """The groups that this process is a member of.

    Args:
        device: The device of this process.
        secret: What the members of a group have to know: the same in all replicas of an executor.
            By default no other process knows it.

    Attributes:
        address: This process's address in the network of the other members.
    """

    def __init__(self, device: torch.device | None = None, secret: str | None = None) -> None:
        self.address = "127.0.0.1"
        self.secret = secret or handshake.new_secret()
        self._device = device or torch.device("cpu")
        self._hosted: dict[str, StoreServer] = {}
        self._guard = threading.Lock()
        self._groups: dict[str, Group] = {}
        self._attempts: dict[str, _Attempt] = {}
        self._gone: deque[str] = deque(maxlen=_MEMORY)

    def host(self, name: str) -> tuple[str, int]:
        """Host the store by which the members of a group find each other, until the group is left;
        returns its address.
        """
        with self._guard:
            if name in self._gone:
                raise Left(_LEFT)
            self._hosted[name] = StoreServer(self.address, self.secret)
            return self.address, self._hosted[name].port

    def join(self, request: JoinGroup) -> str:
        """Become a member, as soon as all other members are there; returns the error's text, empty
        on success.
        """
        with self._guard:
            if request.group in self._gone:
                return _LEFT
            attempt = _Attempt(request, self.address, self.secret, self._device)
            self._attempts[request.group] = attempt
        over = attempt.over.wait(request.patience + _GRACE)
        with self._guard:
            del self._attempts[request.group]
            group = attempt.group
            if over and group is not None and request.group not in self._gone:
                self._groups[request.group] = group
                return ""
            store = self._hosted.pop(request.group, None)
        attempt.give_up()
        if store is not None:
            store.close()
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
            store = self._hosted.pop(name, None)
        if attempt is not None:
            attempt.give_up()
        if group is not None:
            group.leave()
        if store is not None:
            store.close()
