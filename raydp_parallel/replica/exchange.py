"""Tensors that the chunks of one call exchange while they run, each in a replica of its own: what
synchronised batch norm needs.

An exchange is an operation of all chunks, so that all must come to the same exchanges in the same
order, in forward and in backward. That is so for chunks that run the same layers. If one of them
fails, it leaves the group of replicas, and the others get `GroupBroken` instead of waiting.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from raydp_parallel.errors import GroupBroken
from raydp_parallel.transport import collective
from raydp_parallel.transport.group_messages import TakePart


class ChunkExchange:
    """What the replica of one chunk gives to those of the others, and gets, in one call.

    Args:
        part: The driver's request.
        group: The group of replicas; None if this replica has left it.
        played: What was gathered in the forward that runs again for its graph alone, without the
            others; None if the others take part.

    Attributes:
        gathered: What was gathered so far, the same for all chunks; None if that is not all that
            was exchanged.
    """

    def __init__(
        self,
        part: TakePart,
        group: collective.Group | None,
        played: Sequence[Tensor] | None = None,
    ) -> None:
        self._part = part
        self._group = group
        self._played = None if played is None else iter(played)
        self.gathered: list[Tensor] | None = []

    def gather(self, own: Tensor) -> Tensor:
        """The rows of all chunks, in their order; each gives one, of the same length."""
        if self._played is not None:
            found = next(self._played, None)
            if found is None:
                raise GroupBroken("batch norm ran more often than in the forward that is run again")
            return found.to(own.device)
        rows = self._swapped(own.expand(len(self._part.order), -1))
        if self.gathered is not None:
            self.gathered.append(rows)
        return rows

    def swap(self, rows: Tensor) -> Tensor:
        """Give each chunk one row; returns what each chunk gave to this one."""
        self.gathered = None
        if self._played is not None:
            raise GroupBroken("a forward that differentiates inside cannot be run again alone")
        return self._swapped(rows)

    def _swapped(self, rows: Tensor) -> Tensor:
        if self._group is None:
            raise GroupBroken("this replica has left the group")
        order, patience = self._part.order, self._part.patience
        by_rank = sorted(range(len(order)), key=order.__getitem__)
        given = rows.detach()[by_rank].contiguous()
        try:
            got = self._group.swap(given.view(-1), patience, time.monotonic() + patience)
        except RuntimeError as error:
            raise GroupBroken(f"the replicas of the other chunks did not answer: {error}") from None
        return got.view(len(order), -1)[[*order]].to(rows.device)


_current: ChunkExchange | None = None


def current() -> ChunkExchange | None:
    """The exchange of the chunk that this process runs just now; None if it runs without others."""
    return _current


@contextlib.contextmanager
def taking_part(
    groups: collective.Groups, part: TakePart, played: Sequence[Tensor] | None = None
) -> Iterator[ChunkExchange]:
    """Run a block as one of several chunks; if it fails, the others do not wait for this one.

    Args:
        groups: The groups of this process.
        part: The driver's request.
        played: See `ChunkExchange`.
    """
    global _current
    before = _current
    _current = made = ChunkExchange(part, groups.find(part.group), played)
    try:
        yield made
    except BaseException:
        groups.leave(part.group)
        raise
    finally:
        _current = before


def gather(own: Tensor) -> Tensor:
    """The rows of all chunks, in their order, differentiable to any order."""
    rows: Tensor = GatherRows.apply(own)
    return rows


def _needed() -> ChunkExchange:
    if _current is None:
        raise GroupBroken(
            "synchronised batch norm was differentiated outside of the call that ran it"
        )
    return _current


class GatherRows(Function):
    """One row of each chunk in, all rows out."""

    @staticmethod
    def forward(ctx: Any, own: Tensor) -> Tensor:
        return _needed().gather(own)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        total: Tensor = CollectRow.apply(grads[0])
        return total


class CollectRow(Function):
    """The sum of what each chunk has for this one."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        return torch.sum(_needed().swap(rows), 0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        rows: Tensor = GatherRows.apply(grads[0])
        return rows
