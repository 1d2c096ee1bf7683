"""Counters of an executor's work. The core updates them at calls, deaths and starts; statistics,
metrics and the status are made from them.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import asdict
from types import SimpleNamespace

from raydp_parallel.monitoring.stats import (
    OF_EXECUTOR,
    OF_REPLICA,
    ExecutorStats,
    ReplicaInfo,
    ReplicaStats,
)

_names: Counter[str] = Counter()


class _Tally:
    """The work of one replica, in counters as `ReplicaStats` names them."""

    def __init__(self) -> None:
        self.counts = SimpleNamespace(**dict.fromkeys(OF_REPLICA, 0))
        self.models: dict[str, None] = {}  # names of the modules that it ran, in order
        self.began: float | None = None  # time of its first start
        self.free: float | None = None  # waiting is counted until then; None if it is not ready
        self.pending = 0  # calls that it has not answered

    def wait_until(self, now: float, busy: float = 0.0) -> None:
        """Count the time since the last look as waiting, but for what was work."""
        if self.free is not None:
            if not self.pending:
                self.counts.waiting += max(0.0, now - self.free - busy)
            self.free = now

    def stats(self, info: ReplicaInfo, now: float) -> ReplicaStats:
        """Return a frozen copy."""
        self.wait_until(now)
        seconds = 0.0 if self.began is None else now - self.began
        known = {**asdict(info), **vars(self.counts)}
        return ReplicaStats(**known, models=tuple(self.models), seconds=seconds)


class Recorder:
    """The record of one executor. Threads may share it.

    Args:
        name: The executor's; a second one of the same name in this process gets a number.
        clock: The time, in seconds.

    Attributes:
        totals: The counters of all replicas together, as `ExecutorStats` names them.
    """

    def __init__(self, name: str, clock: Callable[[], float] = time.perf_counter) -> None:
        _names[name] += 1
        self.name = name if _names[name] == 1 else f"{name}/{_names[name]}"
        self.totals = SimpleNamespace(**dict.fromkeys(OF_EXECUTOR, 0))
        self.events: deque[tuple[float, str]] = deque(maxlen=50)
        self._tallies: defaultdict[int, _Tally] = defaultdict(_Tally)
        self._clock = clock
        self._lock = threading.Lock()

    def event(self, text: str) -> None:
        """Note a rare event."""
        self.events.append((time.time(), text))

    def started(self, info: ReplicaInfo) -> None:
        """Note that a replica has a process; one after the first replaces another."""
        with self._lock:
            tally, now = self._tallies[info.index], self._clock()
            again = tally.began is not None
            if again:
                tally.counts.respawns += 1
            else:
                tally.began = now
            tally.free, tally.pending = now, 0
        verb = "was replaced" if again else "started"
        where = f"{info.device}, node {info.node[:8]}, pid {info.pid}"
        self.event(f"replica {info.index} {verb}: {where}")

    def died(self, index: int, text: str) -> None:
        """Note the death of a replica."""
        with self._lock:
            tally = self._tallies[index]
            tally.wait_until(self._clock())
            tally.counts.deaths += 1
            tally.free, tally.pending = None, 0
        self.event(text)

    def replayed(self, index: int) -> None:
        """Count a chunk that a replica got because another one died."""
        with self._lock:
            self._tallies[index].counts.replays += 1

    def called(self, index: int) -> None:
        """Note that a call was sent: the replica waits no longer."""
        with self._lock:
            tally = self._tallies[index]
            tally.wait_until(self._clock())
            tally.pending += 1

    def answered(
        self, index: int, rows: int, busy: float, sent: int, received: int, model: str = ""
    ) -> None:
        """Count a call that ended: the seconds of its work, and bytes to and from the replica. A
        forward has rows, and the name of its module.
        """
        with self._lock:
            tally = self._tallies[index]
            tally.wait_until(self._clock(), busy)
            tally.pending = max(0, tally.pending - 1)
            tally.counts.calls += bool(rows or model)
            tally.counts.rows += rows
            tally.counts.busy += busy
            tally.counts.bytes_in += sent
            tally.counts.bytes_out += received
            if model:
                tally.models[model] = None

    def stats(self, replicas: Iterable[ReplicaInfo], link: str) -> ExecutorStats:
        """Return a frozen copy of all counters."""
        with self._lock:
            now = self._clock()
            found = tuple(self._tallies[info.index].stats(info, now) for info in replicas)
        totals = {**vars(self.totals)}
        return ExecutorStats(self.name, found, link, **totals, events=tuple(self.events))
