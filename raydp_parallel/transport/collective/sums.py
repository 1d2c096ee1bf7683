"""Sums of tensors, one of each member, on their way."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from raydp_parallel import devices
from raydp_parallel.transport.collective.backends import GroupBackend, Operation


class Summation(Protocol):
    """A sum on its way."""

    def advance(self) -> bool:
        """Do what can be done without waiting; whether that was all, so that it may be the next
        one's turn.
        """

    def finish(self, until: float) -> Tensor:
        """Wait for it. In the root this is the sum. Raises `RuntimeError` if it did not come."""


class Pair:
    """A sum of two: one gives, the root adds.

    Args:
        backend: What brings the other's tensor to the root.
        own: This member's tensor. It is read until this is over, and not written to.
        into: In the root, where the sum is to be; it may be ``own`` after all.
        rank: Which of the two this is.
        root: Who adds.
        patience: Seconds that the other may take.
    """

    def __init__(
        self,
        backend: GroupBackend,
        own: Tensor,
        into: Tensor,
        rank: int,
        root: int,
        patience: float,
    ) -> None:
        self._backend = backend
        self._own = own
        self._into = into
        self._added = False
        with backend.aside(own):
            # Two can be added in one way only; torch's own way for it takes twice as long.
            self._other = own if rank != root else devices.scratch(own)
            self._brought = backend.broadcast(self._other, 1 - root, patience)

    def advance(self) -> bool:
        """Add, if the other's is there."""
        if not self._added and self._brought.ready():
            self._add(time.monotonic())
        return self._added

    def finish(self, until: float) -> Tensor:
        """Wait for it."""
        if not self._added:
            self._add(until)
        self._brought.finish(until)
        self._backend.rejoin()
        return self._into

    def _add(self, until: float) -> None:
        with self._backend.aside(self._own):
            self._brought.follow(until)
            if self._other is not self._own:
                torch.add(self._own, self._other, out=self._into)
        self._added = True


class Exchange:
    """A sum of many: each member gets one part of all tensors, adds them in order, and gives its
    part to the root.

    As many bytes travel as in the ring that backends use, whose order of additions depends on how
    many members there are and on who they are. This one is the driver's own, to the bit.

    Args:
        backend: What brings parts to others.
        whole: This member's tensor; the root's becomes the sum.
        order: The members in the order of the sum.
        root: Who gets the sum.
        patience: Seconds that others may take.
    """

    def __init__(
        self, backend: GroupBackend, whole: Tensor, order: Sequence[int], root: int, patience: float
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
        """Wait for it."""
        gathered = self._gathered or self._add(until)
        gathered.finish(until)
        self._backend.rejoin()
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
