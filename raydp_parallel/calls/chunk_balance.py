"""`ChunkBalance`: chunks in proportion to what each device was measured to compute per second
(``Options(chunk_weights="auto")``).

A split is changed rarely, because dropout masks and batch norm's statistics follow from it: only
where the slowest chunk would take noticeably less time, by the median of some calls: three at
first, and each time twice as many. After the first change each is half of what the measurements ask
for, so that a cost that is not linear in the rows makes no oscillation.

Chunks of one device run one after the other, and share what the device can compute. A device that
ran out of memory gets less from the next call on, and never as much again.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Iterable, Sequence
from typing import Any

from raydp_parallel.cluster.backend import DeviceId, places
from raydp_parallel.cluster.replica_slots import ChunkAnswer, ReplicaSlot
from raydp_parallel.devices import forks
from raydp_parallel.transport.messages import Failure

_FIRST, _MOST = 3, 48
"""Calls that are measured before the first decision on a split, and before later ones at most."""

_FIRST_GAIN, _GAIN = 0.1, 0.05
"""The part of the slowest chunk's time that a change has to save: by few calls, and by more."""

_SHRUNK = 0.75
"""The part of its share that a device gets after it ran out of memory."""

_ALLOCATOR = "can't allocate memory"
"""What torch says where a CPU's memory is at its end."""

_METHODS = ("forward", "backward")


class ChunkBalance:
    """The weights of a wrapper's chunks, by what was measured so far. A copy begins anew.

    Args:
        device_ids: The devices of the chunks.
    """

    def __init__(self, device_ids: Sequence[DeviceId]) -> None:
        self.device_ids = tuple(device_ids)
        found = places(device_ids)
        self._together = [[at for at, one in enumerate(found) if one == place] for place in found]
        self._weights = [1.0 / len(device_ids)] * len(device_ids)
        self._most = [1.0] * len(device_ids)
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
            device: Which of the chunks' devices it was.
            seconds_per_row: What a row took there.
        """
        with self._guard:
            found = self._seconds[method][device]
            if len(found) < _MOST:
                found.append(seconds_per_row)

    def note_shortage(self, device: int) -> None:
        """Take into account that a device ran out of memory with what it was given."""
        with self._guard:
            for at in self._together[device]:
                self._most[at] = min(self._most[at], _SHRUNK * self._weights[at])
            self._set(self._weights)
            self._forget()

    def _set(self, weights: Sequence[float]) -> None:
        """Set the weights. What is too much for one device goes to the others, as long as one of
        them has room.
        """
        shares = [weight / sum(weights) for weight in weights]
        full: set[int] = set()
        while len(full) < len(shares):
            over = {at for at, share in enumerate(shares) if share > self._most[at]} - full
            if not over:
                break
            full |= over
            free = [at for at in range(len(shares)) if at not in full]
            left = 1 - sum(self._most[at] for at in full)
            total = sum(shares[at] for at in free)
            shares = [
                self._most[at] if at in full else left * shares[at] / total
                for at in range(len(shares))
            ]
        self._weights = [share / sum(shares) for share in shares]

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
        before = self._weights
        slowest = self._slowest(costs)
        rates = [1 / cost / len(self._together[at]) for at, cost in enumerate(costs)]
        self._set(rates)
        wanted, best = self._weights, self._slowest(costs)
        self._weights = before
        if best > (1 - gain) * slowest:
            return
        step, self._step = self._step, 0.5
        self._set([w ** (1 - step) * to**step for w, to in zip(before, wanted, strict=True)])

    def _slowest(self, costs: Sequence[float]) -> float:
        """What the device takes that takes longest."""
        return max(sum(self._weights[at] * costs[at] for at in own) for own in self._together)


class ChunkTimes:
    """Takes the times of one call's chunks, for a balance.

    Args:
        balance: The balance.
        chunks: The slot of each chunk, and its rows.
    """

    def __init__(self, balance: ChunkBalance, chunks: Sequence[tuple[ReplicaSlot, int]]) -> None:
        self._balance = balance
        self._chunks = chunks

    def note(self, method: str, numbers: Iterable[int], answers: Sequence[ChunkAnswer]) -> None:
        """Take the answers of a forward or a backward. Those of a replica that stood in for another
        one say nothing about the device.

        Args:
            method: ``"forward"`` or ``"backward"``.
            numbers: The number of the chunk of each answer.
            answers: The answers.
        """
        for chunk, (reply, _, answered) in zip(numbers, answers, strict=True):
            slot, rows = self._chunks[chunk]
            if answered is not slot or not rows:
                continue
            if reply.failure is not None:
                if _is_shortage(reply.failure):
                    self._balance.note_shortage(chunk)
            elif len(reply.laps) >= 4:
                self._balance.note(method, chunk, (reply.laps[3] - reply.laps[2]) / rows)


def _is_shortage(failure: Failure) -> bool:
    """Whether a module failed for want of memory."""
    return failure.name.endswith(("OutOfMemoryError", "MemoryError")) or _ALLOCATOR in failure.text
