"""A part of an executor, for tests that ask for a number of replicas of one that has more."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from raydp_parallel import Executor
from raydp_parallel.monitoring.stats import ExecutorStats, ReplicaInfo


class PartOfExecutor(Executor):
    """The first CPU replicas of an executor: it runs on those, and tells of no others. All else,
    as its totals and the models that replicas have, is that of the whole.

    Args:
        whole: The executor, which has that many.
        count: How many.
    """

    __slots__ = ("_count",)

    def __init__(self, whole: Executor, count: int) -> None:
        self.__dict__ = whole.__dict__
        self._count = count

    @property
    def device_ids(self) -> list[Any]:  # type: ignore[override]
        """One entry for each replica."""
        return ["cpu"] * self._count

    def is_of(self, whole: Executor) -> bool:
        """Whether it is a part of this one."""
        return self.__dict__ is whole.__dict__

    def replicas(self) -> tuple[ReplicaInfo, ...]:
        return tuple(info for info in super().replicas() if info.index in self._indices())

    def stats(self, model: nn.Module | None = None) -> ExecutorStats:
        found = super().stats(model)
        own = tuple(tally for tally in found.replicas if tally.index in self._indices())
        return replace(found, replicas=own)

    def flush(self) -> list[tuple[int, int]]:
        ready = [slot.index for slot in self.replica_set.ready()]
        return [
            left
            for index, left in zip(ready, super().flush(), strict=True)
            if index in self._indices()
        ]

    def _indices(self) -> list[int]:
        slots = self.replica_set.slots.values()
        return [slot.index for slot in slots if slot.place.kind == "cpu"][: self._count]
