"""Counters of an executor's work. The core updates them at calls, deaths and starts; statistics,
metrics and the status are made from them.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field

from raydp_parallel.monitoring.stats import ExecutorStats, ReplicaInfo, ReplicaStats

_names: Counter[str] = Counter()


@dataclass
class Totals:
    """The counters of an executor; `ExecutorStats` explains them."""

    forwards: int = 0
    backwards: int = 0
    state_sends: int = 0
    state_bytes: int = 0
    reruns: int = 0
    deaths: int = 0
    respawns: int = 0
    replays: int = 0


@dataclass
class ReplicaTally:
    """The counters of one replica; `ReplicaStats` explains them.

    Attributes:
        models: Names of the modules that it ran, as keys, in order.
        began: Time of its first start, None before.
        free: Time until which waiting is counted, None while it is not ready.
        pending: Calls that it has not answered.
    """

    calls: int = 0
    rows: int = 0
    busy: float = 0.0
    waiting: float = 0.0
    bytes_in: int = 0
    bytes_out: int = 0
    deaths: int = 0
    respawns: int = 0
    replays: int = 0
    models: dict[str, None] = field(default_factory=dict)
    began: float | None = None
    free: float | None = None
    pending: int = 0

    def wait_until(self, now: float, busy: float = 0.0) -> None:
        """Count the time since the last look as waiting, but for what was work."""
        if self.free is not None:
            if not self.pending:
                self.waiting += max(0.0, now - self.free - busy)
            self.free = now

    def stats(self, info: ReplicaInfo, now: float) -> ReplicaStats:
        """Return a frozen copy."""
        self.wait_until(now)
        counters = asdict(self)
        for name in ("models", "began", "free", "pending"):
            del counters[name]
        seconds = 0.0 if self.began is None else now - self.began
        return ReplicaStats(**asdict(info), **counters, models=tuple(self.models), seconds=seconds)


class Recorder:
    """The record of one executor. Threads may share it.

    Args:
        name: The executor's; a second one of the same name in this process gets a number.
        clock: The time, in seconds.
    """

    def __init__(self, name: str, clock: Callable[[], float] = time.perf_counter) -> None:
        _names[name] += 1
        self.name = name if _names[name] == 1 else f"{name}/{_names[name]}"
        self.totals = Totals()
        self.events: deque[tuple[float, str]] = deque(maxlen=50)
        self._tallies: dict[int, ReplicaTally] = {}
        self._clock = clock
        self._lock = threading.Lock()

    def tally(self, index: int) -> ReplicaTally:
        """Return the counters of a replica."""
        return self._tallies.setdefault(index, ReplicaTally())

    def event(self, text: str) -> None:
        """Note a rare event."""
        self.events.append((time.time(), text))

    def started(self, index: int, device: str, node: str, pid: int) -> None:
        """Note that a replica has a process; one after the first replaces another."""
        with self._lock:
            tally, now = self.tally(index), self._clock()
            again = tally.began is not None
            if again:
                tally.respawns += 1
                self.totals.respawns += 1
            else:
                tally.began = now
            tally.free, tally.pending = now, 0
        verb = "was replaced" if again else "started"
        self.event(f"replica {index} {verb}: {device}, node {node[:8]}, pid {pid}")

    def died(self, index: int, text: str) -> None:
        """Note the death of a replica."""
        with self._lock:
            tally = self.tally(index)
            tally.wait_until(self._clock())
            tally.deaths += 1
            self.totals.deaths += 1
            tally.free, tally.pending = None, 0
        self.event(text)

    def replayed(self, index: int) -> None:
        """Count a chunk that a replica got because another one died."""
        with self._lock:
            self.tally(index).replays += 1
            self.totals.replays += 1

    def called(self, index: int) -> None:
        """Note that a call was sent: the replica waits no longer."""
        with self._lock:
            tally = self.tally(index)
            tally.wait_until(self._clock())
            tally.pending += 1

    def answered(
        self, index: int, rows: int, busy: float, sent: int, received: int, model: str = ""
    ) -> None:
        """Count a call that ended.

        Args:
            index: The replica's number.
            rows: Rows that a forward computed; 0 for other calls.
            busy: Seconds that the replica worked on it.
            sent: Bytes that went to the replica.
            received: Bytes that came from it.
            model: Name of the module that ran forward; empty for other calls.
        """
        with self._lock:
            tally = self.tally(index)
            tally.wait_until(self._clock(), busy)
            tally.pending = max(0, tally.pending - 1)
            tally.calls += bool(rows or model)
            tally.rows += rows
            tally.busy += busy
            tally.bytes_in += sent
            tally.bytes_out += received
            if model:
                tally.models[model] = None

    def stats(self, replicas: Iterable[ReplicaInfo], link: str) -> ExecutorStats:
        """Return a frozen copy of all counters."""
        with self._lock:
            now = self._clock()
            found = [self.tally(info.index).stats(info, now) for info in replicas]
            totals = asdict(self.totals)
        return ExecutorStats(self.name, tuple(found), link, **totals, events=tuple(self.events))
