"""The thread that reports on an executor once per second: Ray's metrics, the entry that
`raydp-parallel status` reads, and short named tasks in Ray's dashboard. Calls never wait for it.
"""

from __future__ import annotations

import atexit
import json
import logging
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from raydp_parallel.cluster import ray_api
from raydp_parallel.errors import log
from raydp_parallel.monitoring import status
from raydp_parallel.monitoring.metrics import INFO, increments, process_tags, summary
from raydp_parallel.monitoring.stats import ExecutorStats

if TYPE_CHECKING:
    from raydp_parallel.driver.executor import Executor

EVERY = 1.0
"""Seconds between two reports."""

_SUMMARY = 5
"""Reports between two tasks of a replica."""


class Reporter:
    """The thread. It ends with `close`, or when nobody has the executor any more."""

    def __init__(self, executor: Executor) -> None:
        self._stop = threading.Event()
        self._executor = weakref.ref(executor)
        self._last = ExecutorStats(executor.replica_set.recorder.name, (), "none")  # reported
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
                self._thread.join(2.0)  # a cluster may not answer

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
        ray_api.put_entry(stats.name, json.dumps(status.entry(stats)))
        self._reports += 1
        if self._reports % _SUMMARY == 0 and stats.recent is not None:
            slots = [*executor.replica_set.slots.values()]
            for replica in stats.recent.replicas:
                if replica.busy and replica.state == "ready":
                    slots[replica.index].client.show(summary(replica))

    def _count(self, stats: ExecutorStats) -> None:
        """Add what is new to the metrics."""
        for more in increments(stats.since(self._last)):
            ray_api.count(*more)
        pids = {replica.pid for replica in stats.replicas}
        gone = [replica for replica in self._last.replicas if replica.pid not in pids]
        for replica in (*gone, *stats.replicas):
            there = replica.pid in pids and replica.state == "ready"
            ray_api.gauge(*INFO, process_tags(replica, stats.name), float(there))
        self._last = stats

    def _end(self) -> None:
        executor = self._executor()
        if executor is not None:
            self._count(executor.stats())
        self._count(replace(self._last, replicas=()))
        ray_api.delete_entry(self._last.name)
