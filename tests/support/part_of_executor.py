"""A part of an executor, for tests that ask for a number of replicas of one that has more."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import on_gpus

from raydp_parallel import Executor


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
    def device_ids(self) -> list[Any]:
        """One entry for each replica."""
        return ["cpu"] * self._count

    def replicas(self) -> Any:
        """Those of the part."""
        return tuple(info for info in super().replicas() if info.index in self._indices())

    def stats(self) -> Any:
        """The whole's, with the replicas of the part."""
        found = super().stats()
        own = tuple(one for one in found.replicas if one.index in self._indices())
        return replace(found, replicas=own)

    def flush(self) -> list[tuple[int, int]]:
        """Those of the part."""
        ready = [info.index for info in super().replicas() if info.state == "ready"]
        found = zip(ready, super().flush(), strict=True)
        return [held for index, held in found if index in self._indices()]

    def _indices(self) -> list[int]:
        infos = super().replicas()
        return [one.index for one in infos if on_gpus.asked() != "cpu" or one.device_id == "cpu"][
            : self._count
        ]
