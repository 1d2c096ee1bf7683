"""The thread that reports on an executor once per second: Ray's metrics, the entry that
`raydp-parallel status` reads, and short named tasks in Ray's dashboard. Calls never wait for it.
"""

from __future__ import annotations

import atexit
import json
import logging
import threading
from collections.abc import Callable
from dataclasses import replace

from raydp_parallel.cluster import ray_api
from raydp_parallel.cluster.replica_set import ReplicaSet
from raydp_parallel.errors import log
from raydp_parallel.monitoring import status
from raydp_parallel.monitoring.metrics import INFO, increments, process_labels, summary
from raydp_parallel.monitoring.stats import ExecutorStats

EVERY = 1.0
"""Seconds between two reports."""

_SUMMARY = 5
"""Reports between two tasks of a replica."""


class Reporter:
    """The thread. It ends with `close`, or when nobody has the executor any more.

    Args:
        replica_set: The executor's replicas.
        stats: Gives the executor's method that says what to report; None after its end.
    """

    def __init__(
        self, replica_set: ReplicaSet, stats: Callable[[], Callable[[], ExecutorStats] | None]
    ) -> None:
        self._stop = threading.Event()
        self._set, self._stats = replica_set, stats
        self._last = ExecutorStats(replica_set.recorder.name, (), "none")  # reported
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
        while not self._stop.wait(EVERY) and self._stats() is not None:
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
        self._count()
        ray_api.put_entry(self._last.name, json.dumps(status.entry(self._last)))
        self._reports += 1
        if self._reports % _SUMMARY == 0 and self._last.recent is not None:
            slots = [*self._set.slots.values()]
            for replica in self._last.recent.replicas:
                if replica.busy and replica.state == "ready":
                    slots[replica.index].client.show(summary(replica))

    def _count(self) -> None:
        """Add what is new to the metrics; without an executor, all replicas are gone."""
        look = self._stats()
        stats = replace(self._last, replicas=()) if look is None else look()
        for more in increments(stats.since(self._last)):
            ray_api.add_to_counter(*more)
        pids = {replica.pid for replica in stats.replicas}
        gone = [replica for replica in self._last.replicas if replica.pid not in pids]
        for replica in (*gone, *stats.replicas):
            there = replica.pid in pids and replica.state == "ready"
            ray_api.set_gauge(*INFO, process_labels(replica, stats.name), float(there))
        self._last = stats

    def _end(self) -> None:
        self._count()
        self._stats = lambda: None
        self._count()
        ray_api.delete_entry(self._last.name)
