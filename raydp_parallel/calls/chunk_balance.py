"""`ChunkBalance`: chunks in proportion to what each device was measured to compute per second
(``Options(chunk_weights="auto")``).

A split is changed rarely, because dropout masks and batch norm's statistics follow from it: only
where the slowest chunk would take noticeably less time, by the median of some calls: three at
first, and each time twice as many. After the first change each is half of what the measurements ask
for, so that a cost that is not linear in the rows makes no oscillation.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Sequence
from typing import Any

from raydp_parallel.cluster.backend import DeviceId
from raydp_parallel.cluster.chunk_calls import ChunkAnswer
from raydp_parallel.cluster.replica_slots import ReplicaSlot
from raydp_parallel.devices import forks

_FIRST, _MOST = 3, 48
"""Calls that are measured before the first decision on a split, and before later ones at most."""

_FIRST_GAIN, _GAIN = 0.1, 0.05
"""The part of the slowest chunk's time that a change has to save: by few calls, and by more."""

_METHODS = ("forward", "backward")


class ChunkBalance:
    """The weights of a wrapper's chunks, by what was measured so far. A copy begins anew.

    Args:
        device_ids: The devices of the chunks.
    """

    def __init__(self, device_ids: Sequence[DeviceId]) -> None:
        self.device_ids = tuple(device_ids)
        self._weights = [1.0 / len(device_ids)] * len(device_ids)
        self._needed, self._step = _FIRST, 1.0
        self._guard = threading.Lock()
        self._forget()
        forks.tell_child(self)

    def after_fork(self) -> None:
        """Make the lock anew: the thread that held it is not in the child."""
        self._guard = threading.Lock()

    def __reduce__(self) -> Any:
        return ChunkBalance, (self.device_ids,)

    def weights(self) -> list[float]:
        """The weights for the next call."""
        with self._guard:
            if all(len(found) >= self._needed for found in self._seconds["forward"]):
                self._decide()
            return [*self._weights]

    def note(self, method: str, device: int, seconds_per_row: float) -> None:
        """Take a measurement into account.

        Args:
            method: ``"forward"`` or ``"backward"``.
            device: Which of the devices it was.
            seconds_per_row: What a row took there.
        """
        with self._guard:
            found = self._seconds[method][device]
            if len(found) < _MOST:
                found.append(seconds_per_row)

    def _forget(self) -> None:
        self._seconds: dict[str, list[list[float]]] = {
            method: [[] for _ in self.device_ids] for method in _METHODS
        }

    def _decide(self) -> None:
        """Change the weights, if that pays."""
        costs = [statistics.median(found) for found in self._seconds["forward"]]
        if all(self._seconds["backward"]):
            backward = map(statistics.median, self._seconds["backward"])
            costs = [cost + more for cost, more in zip(costs, backward, strict=True)]
        self._forget()
        gain = _FIRST_GAIN if self._needed == _FIRST else _GAIN
        self._needed = min(2 * self._needed, _MOST)
        if min(costs) <= 0:
            return
        slowest = max(w * cost for w, cost in zip(self._weights, costs, strict=True))
        best = 1 / sum(1 / cost for cost in costs)
        if best > (1 - gain) * slowest:
            return
        step, self._step = self._step, 0.5
        wanted = [best / cost for cost in costs]
        moved = [w ** (1 - step) * to**step for w, to in zip(self._weights, wanted, strict=True)]
        self._weights = [weight / sum(moved) for weight in moved]


class ChunkTimes:
    """Takes the times of one call's chunks, for a balance.

    Args:
        balance: The balance.
        chunks: The slot of each chunk, and its rows.
    """

    def __init__(self, balance: ChunkBalance, chunks: Sequence[tuple[ReplicaSlot, int]]) -> None:
        self._balance = balance
        self._chunks = chunks

    def note(self, method: str, answers: Sequence[ChunkAnswer]) -> None:
        """Take the answers of a forward or a backward. Those of a replica that stood in for another
        one say nothing about the device.
        """
        by_slot = {answer.slot: answer.reply for answer in answers}
        for device, (slot, rows) in enumerate(self._chunks):
            reply = by_slot.get(slot)
            if reply is None or reply.failure is not None or len(reply.laps) < 4 or not rows:
                continue
            self._balance.note(method, device, (reply.laps[3] - reply.laps[2]) / rows)
