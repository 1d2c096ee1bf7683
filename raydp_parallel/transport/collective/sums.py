"""Sums of one tensor of each member that have begun."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from raydp_parallel import devices
from raydp_parallel.transport.collective.backends import GroupBackend, Operation


class Summation(Protocol):
    """A sum that has begun."""

    def advance(self) -> bool:
        """Do what can be done without waiting; returns whether all additions have begun, so that
        the next sum may advance.
        """

    def finish(self, until: float) -> Tensor:
        """Wait for the result, which is the sum in the root, or in all. Raises `RuntimeError` if it
        fails.
        """


class Pair:
    """A sum of two members: one sends its tensor, and the root adds it to its own; without a root
    both send theirs, and both add.

    Args:
        backend: Sends tensors to the other member.
        own: This member's tensor. It is read until the sum is finished, and not written to.
        into: In the root, the memory for the sum; it may be ``own``.
        rank: Which of the two members this is.
        root: The member that adds; None if both do.
        patience: Seconds that the other member may take.
    """

    def __init__(
        self,
        backend: GroupBackend,
        own: Tensor,
        into: Tensor,
        rank: int,
        root: int | None,
        patience: float,
    ) -> None:
        self._backend = backend
        self._own = own
        self._into = into
        self._added = False
        self._sent: Operation | None = None
        with backend.aside(own):
            # A broadcast and an addition: torch's reduce takes twice as long. Two tensors can be
            # added in one order only.
            if root is None:
                self._other = self._into = devices.scratch(own)
                both = [own, self._other] if rank == 0 else [self._other, own]
                begun = [backend.broadcast(both[k], k, patience) for k in (0, 1)]
                self._sent, self._received = begun[rank], begun[1 - rank]
            else:
                self._other = own if rank != root else devices.scratch(own)
                self._received = backend.broadcast(self._other, 1 - root, patience)

    def advance(self) -> bool:
        """Add, if the other member's tensor is there."""
        if not self._added and self._received.ready():
            self._add(time.monotonic())
        return self._added

    def finish(self, until: float) -> Tensor:
        """Wait for the sum."""
        if not self._added:
            self._add(until)
        self._received.finish(until)
        if self._sent is not None:
            self._sent.finish(until)
        self._backend.rejoin(self._into)
        return self._into

    def _add(self, until: float) -> None:
        with self._backend.aside(self._own):
            self._received.follow(until)
            if self._other is not self._own:
                torch.add(self._own, self._other, out=self._into)
        self._added = True


class Exchange:
    """A sum of many members: each gets one part of all tensors, adds these parts in order, and
    sends the result to the root, or to all.

    As many bytes are sent as in the ring that backends use. In a ring the order of additions
    depends on the number of members and their ranks; here it is ``order``, so the sum equals the
    driver's, to the bit.

    Args:
        backend: Sends parts to the other members.
        whole: This member's tensor; the root's, or that of all, becomes the sum.
        order: The members in the order of the sum.
        root: The member that gets the sum; None if all do.
        patience: Seconds that the other members may take.
    """

    def __init__(
        self,
        backend: GroupBackend,
        whole: Tensor,
        order: Sequence[int],
        root: int | None,
        patience: float,
    ) -> None:
        self._backend = backend
        self._whole = whole
        self._order = order
        self._root = root
        self._patience = patience
        self._gathered: Operation | None = None
        with backend.aside(whole):
            self._parts = torch.empty_like(whole)
            self._exchanged = backend.exchange(self._parts, whole, patience)

    def advance(self) -> bool:
        """Add, if all parts are there."""
        if self._gathered is None and self._exchanged.ready():
            self._add(time.monotonic())
        return self._gathered is not None

    def finish(self, until: float) -> Tensor:
        """Wait for the sum."""
        gathered = self._gathered or self._add(until)
        gathered.finish(until)
        self._backend.rejoin(self._whole)
        return self._whole

    def _add(self, until: float) -> Operation:
        with self._backend.aside(self._whole):
            self._exchanged.follow(until)
            parts = self._parts.chunk(len(self._order))
            total = parts[self._order[0]]
            for rank in self._order[1:]:
                total += parts[rank]
            self._gathered = self._backend.gather(self._whole, total, self._root, self._patience)
        return self._gathered
