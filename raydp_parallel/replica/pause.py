"""The graphs that a replica keeps, and what it does between two calls.

While the driver gathers, sums or steps, a replica on a machine with a core to spare has nothing to
do. It frees the graphs that nothing can ask for any more, which takes a quarter of a millisecond
for a GPT-2 of six layers, and looks whether the last forward left attributes to restore. Where the
next call comes at once, nothing is lost: it would have begun with the same work.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TypeVar

from raydp_parallel.state.replica_module import ReplicaModule

T = TypeVar("T")


class KeptGraphs(dict[int, T]):
    """The graphs by key, and the work of the next pause. Without a pause, as where Ray carries the
    calls, it stays undone.
    """

    def __init__(self) -> None:
        super().__init__()
        self._spent: set[int] = set()
        self._module: ReplicaModule | None = None

    def free(self, keys: Iterable[int]) -> None:
        """Free some graphs in the next pause: the driver's nodes of them are gone."""
        self._spent.update(keys)

    def look_at(self, module: ReplicaModule | None) -> None:
        """Look in the next pause whether this model is to be restored; None for no model."""
        self._module = module

    def forget(self, keys: Collection[int], models: Collection[int]) -> None:
        """Free some graphs now, and note that some models are gone."""
        for key in keys:
            self.pop(key, None)
        self._spent.difference_update(keys)
        if models:
            self._module = None

    def use_pause(self) -> None:
        """Do the work."""
        module, self._module = self._module, None
        while self._spent:
            self.pop(self._spent.pop(), None)
        if module is not None:
            module.look_ahead()
