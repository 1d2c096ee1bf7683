"""Counters of an executor's work. The core updates them at calls, deaths and starts; statistics,
metrics and the status are made from them.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from types import SimpleNamespace

from raydp_parallel.monitoring.stats import (
    DEATHS,
    ExecutorStats,
    PlainValues,
    ReplicaInfo,
    ReplicaStats,
    counters,
)

_names: Counter[str] = Counter()


class Recorder:
    """The record of one executor. Threads may share it.

    Args:
        name: The executor's; a second one of the same name in this process gets a number.
        clock: The time, in seconds.
    """

    def __init__(self, name: str, clock: Callable[[], float] = time.perf_counter) -> None:
        _names[name] += 1
        self.name = name if _names[name] == 1 else f"{name}/{_names[name]}"
        # The counters of all replicas together, as `ExecutorStats` names them.
        self.totals = SimpleNamespace(**dict.fromkeys(counters(ExecutorStats), 0))
        self.events: deque[tuple[float, str]] = deque(maxlen=50)
        # Earlier looks, a second apart; the first is about ten seconds old.
        self._looks = deque([(clock(), ExecutorStats(self.name, (), "none"))])
        # By the replica's number: its counters, as `ReplicaStats` names them, the names of the
        # modules that it ran, in order, the time of its first start, and since when it waits.
        self._counts: defaultdict[int, PlainValues] = defaultdict(Counter)
        self._models: defaultdict[int, dict[str, None]] = defaultdict(dict)
        self._began: dict[int, float] = {}
        self._free: dict[int, float] = {}
        self._clock = clock
        self._lock = threading.Lock()

    def event(self, text: str) -> None:
        """Note a rare event."""
        self.events.append((time.time(), text))

    def started(self, info: ReplicaInfo) -> None:
        """Note that a replica has a process; one after the first replaces another."""
        self.called(info.index)  # the last one, whose cluster may have been left, waits no longer
        with self._lock:
            replaces = info.index in self._began
            self._free[info.index] = self._clock()
            self._began.setdefault(info.index, self._free[info.index])
            self._counts[info.index]["respawns"] += replaces
        what = f"replica {info.index} {'was replaced' if replaces else 'started'}: {info.device}"
        self.event(f"{what}, node {info.node[:8]}, pid {info.pid}")

    def died(self, index: int, text: str) -> None:
        """Note the death of a replica."""
        self.called(index)  # it waits no longer
        self.count(index, "deaths")
        self.event(text)

    def count(self, index: int, counter: str) -> None:
        """Count one more of what happened to a replica, as `ReplicaStats` names it."""
        with self._lock:
            self._counts[index][counter] += 1

    def called(self, index: int) -> None:
        """Note that a call was sent: the replica waits no longer."""
        with self._lock:
            now = self._clock()
            self._counts[index]["waiting"] += now - self._free.pop(index, now)

    def answered(self, index: int, busy: float, traffic: list[int], work: tuple[int, str]) -> None:
        """Count a call that ended: the seconds of its work, and bytes to and from the replica. A
        forward has rows, and the name of its module.
        """
        (sent, received), (rows, model) = traffic, work
        with self._lock:
            self._free[index] = self._clock()
            new = {"calls": bool(rows or model), "rows": rows, "busy": busy}
            new |= {"bytes_in": sent, "bytes_out": received}
            for name, more in new.items():  # a Counter's own way is long
                self._counts[index][name] += more
            if model:
                self._models[index][model] = None

    def stats(self, replicas: Iterable[ReplicaInfo], link: str) -> ExecutorStats:
        """Return a frozen copy of all counters, and of their growth in the last ten seconds."""
        found = []
        with self._lock:
            now = self._clock()
            for info in replicas:
                counts = self._counts[info.index].copy()
                counts["waiting"] += now - self._free.get(info.index, now)
                counts["seconds"] = now - self._began.get(info.index, now)
                models = tuple(self._models[info.index])
                found.append(ReplicaStats(**asdict(info), models=models, **counts))
            deaths = {name: sum(getattr(replica, name) for replica in found) for name in DEATHS}
            totals = {**vars(self.totals), **deaths, "events": tuple(self.events)}
            stats = ExecutorStats(self.name, tuple(found), link, **totals)
            # The reporter looks each second, so that ten seconds are recent.
            while len(self._looks) > 1 and self._looks[1][0] <= now - 10:
                self._looks.popleft()
            recent = stats.since(self._looks[0][1])
            if self._looks[-1][0] <= now - 1:
                self._looks.append((now, stats))
        return replace(stats, recent=replace(recent, events=()))
