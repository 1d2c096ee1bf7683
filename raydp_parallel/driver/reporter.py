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
from typing import TYPE_CHECKING

from raydp_parallel.cluster import ray_api
from raydp_parallel.monitoring import status
from raydp_parallel.monitoring.metrics import INFO, increments, summary, tags_of
from raydp_parallel.monitoring.stats import ExecutorStats

if TYPE_CHECKING:
    from raydp_parallel.driver.executor import Executor

log = logging.getLogger("raydp_parallel")

EVERY = 1.0
"""Seconds between two reports."""

_WINDOW = 10
"""Reports that the figures of the status span."""

_SUMMARY = 5
"""Reports between two tasks of a replica, and that such a task is about."""

_FAREWELL = 2.0
"""Seconds that a close waits for the last report: a cluster may not answer."""


class Reporter:
    """The thread. It ends with `close`, or when nobody has the executor any more."""

    def __init__(self, executor: Executor) -> None:
        self._stop = threading.Event()
        self._executor = weakref.ref(executor)
        # The last reports, the first of which counts what came after None.
        self._history: deque[ExecutorStats | None] = deque([None], maxlen=_WINDOW + 1)
        self._there: list[dict[str, str]] = []  # the tags of processes that were reported
        self._reports = 0
        self._warned = False
        self._thread = threading.Thread(target=self._run, name="raydp-reporter", daemon=True)
        atexit.register(self.close)
        self._thread.start()

    def close(self) -> None:
        """Report a last time. May be called twice."""
        if self._thread.is_alive():  # not in a forked child, which has nothing to report
            self._stop.set()
            if self._thread is not threading.current_thread():
                self._thread.join(_FAREWELL)

    def _run(self) -> None:
        # No callback of the reference sets the event: it may come while this thread holds its lock.
        while not self._stop.wait(EVERY) and self._executor() is not None:
            self._guarded(self._report)
        self._guarded(self._end)
        atexit.unregister(self.close)

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
        window = stats.since(self._history[0])
        entry = status.entry(stats, window, socket.gethostname(), os.getpid())
        ray_api.put_entry(stats.name, json.dumps(entry))
        self._reports += 1
        if self._reports % _SUMMARY == 0:
            slots = [*executor.replica_set.slots.values()]
            for replica in stats.since(self._history[-1 - _SUMMARY]).replicas:
                if replica.busy and replica.state == "ready":
                    slots[replica.index].client.show(summary(replica))

    def _count(self, stats: ExecutorStats) -> None:
        """Add what is new to the metrics."""
        for more in increments(stats.since(self._history[-1])):
            ray_api.count(*more)
        self._history.append(stats)
        there = []
        for replica in stats.replicas:
            tags = {**tags_of(replica, stats.name), "gpu": replica.gpu, "pid": str(replica.pid)}
            there.append(tags)
            ray_api.gauge(*INFO, tags, float(replica.state == "ready"))
        for tags in self._there:
            if tags not in there:  # the process was replaced
                ray_api.gauge(*INFO, tags, 0.0)
        self._there = there

    def _end(self) -> None:
        executor = self._executor()
        if executor is not None:
            self._count(executor.stats())
        for tags in self._there:
            ray_api.gauge(*INFO, tags, 0.0)
        if self._history[-1] is not None:
            ray_api.delete_entry(self._history[-1].name)
