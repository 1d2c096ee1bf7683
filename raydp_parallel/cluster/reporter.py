"""The thread that reports on an executor once per second: Ray's metrics, the entry that
`raydp-parallel status` reads, and short named tasks in Ray's dashboard. Calls never wait for it.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import socket
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Protocol

from raydp_parallel.cluster import ray_api
from raydp_parallel.monitoring import status
from raydp_parallel.monitoring.metrics import COUNTERS, INFO, increments, summary, tags_of
from raydp_parallel.monitoring.stats import ExecutorStats

log = logging.getLogger("raydp_parallel")

EVERY = 1.0
"""Seconds between two reports."""

_WINDOW = 10
"""Reports that the figures of the status span."""

_SUMMARY = 5
"""Reports between two tasks of a replica, and that such a task is about."""

_FAREWELL = 2.0
"""Seconds that a close waits for the last report: a cluster may not answer."""


class Watched(Protocol):
    """An executor, as the thread uses it."""

    def stats(self) -> ExecutorStats:
        """Describe the work so far."""

    def show(self, replica: int, text: str) -> None:
        """Let the dashboard say what a replica, by its number, is doing."""


class Reporter:
    """The thread. It ends with `close`, or when nobody has the executor any more."""

    def __init__(self, executor: Watched) -> None:
        self._executor = weakref.ref(executor)
        self._counters = {m: ray_api.Counter(*m) for m in COUNTERS}
        self._info = ray_api.Gauge(*INFO)
        self._history: deque[ExecutorStats] = deque(maxlen=_WINDOW + 1)
        self._there: list[dict[str, str]] = []  # the tags of processes that were reported
        self._reports = 0
        self._key = ""
        self._warned = False
        self._stop = threading.Event()
        self._final: ExecutorStats | None = None
        self._thread = threading.Thread(target=self._run, name="raydp-reporter", daemon=True)
        atexit.register(self.close)
        self._thread.start()

    def close(self) -> None:
        """Report a last time. May be called twice."""
        # The thread is not alive in a forked child, which has nothing to report.
        if self._stop.is_set() or not self._thread.is_alive():
            return
        atexit.unregister(self.close)
        # Looked at here: whoever closes may hold a lock that the thread would wait for.
        executor = self._executor()
        self._final = executor.stats() if executor is not None else None
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join(_FAREWELL)

    def _run(self) -> None:
        while not self._stop.wait(EVERY):
            if self._executor() is None:
                atexit.unregister(self.close)
                break
            self._guarded(self._report)
        self._guarded(self._end)

    def _guarded(self, work: Callable[[], None]) -> None:
        """Try something that needs the cluster; failures end neither the training nor the thread,
        since a cluster that was left may be joined anew.
        """
        try:
            if ray_api.connected():
                work()
        except Exception as error:
            level = logging.DEBUG if self._warned or self._stop.is_set() else logging.WARNING
            log.log(level, "no report to Ray: %s: %s", type(error).__name__, error)
            self._warned = True

    def _report(self) -> None:
        executor = self._executor()
        if executor is None:
            return
        stats = executor.stats()
        self._count(stats)
        self._key = f"{ray_api.job()}:{os.getpid()}:{stats.name}"
        window = stats.since(self._history[0] if len(self._history) > 1 else None)
        entry = status.entry(stats, window, socket.gethostname(), os.getpid())
        ray_api.put_entry(self._key, json.dumps(entry))
        self._reports += 1
        if self._reports % _SUMMARY == 0:
            shown = self._history[-1 - _SUMMARY] if len(self._history) > _SUMMARY else None
            for replica in stats.since(shown).replicas:
                if replica.busy and replica.state == "ready":
                    executor.show(replica.index, summary(replica))

    def _count(self, stats: ExecutorStats) -> None:
        """Add what is new to the metrics."""
        new = stats.since(self._history[-1] if self._history else None)
        self._history.append(stats)
        for metric, tags, value in increments(new):
            ray_api.record(self._counters[metric], value, tags)
        there = []
        for replica in stats.replicas:
            tags = {**tags_of(replica, stats.name), "gpu": replica.gpu, "pid": str(replica.pid)}
            there.append(tags)
            ray_api.record(self._info, float(replica.state == "ready"), tags)
        for tags in self._there:
            if tags not in there:  # the process was replaced
                ray_api.record(self._info, 0.0, tags)
        self._there = there

    def _end(self) -> None:
        if self._final is not None:
            self._count(self._final)
        for tags in self._there:
            ray_api.record(self._info, 0.0, tags)
        if self._key:
            ray_api.delete_entry(self._key)
