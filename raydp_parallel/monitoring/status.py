"""The text of `raydp-parallel status`: the running executors of a cluster, from the entries that
their drivers write once per second.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from raydp_parallel.monitoring.stats import ExecutorStats, Values, printable, table

_EVENTS = 6
"""Events that are shown."""

_OLD = 5.0
"""Seconds after which the text says that an entry is old."""

NOBODY = (
    "No executor is running in this cluster: none was started, the program has ended, or it runs "
    "with Options(metrics=False)."
)


class Found(NamedTuple):
    """An entry that was read."""

    title: str  # the executor and its process
    span: str  # the time that the figures of the window are about
    stats: ExecutorStats
    window: ExecutorStats  # the work of the last seconds

    @property
    def events(self) -> list[str]:
        """The last events, with their times."""
        events = self.stats.events[-_EVENTS:]
        return [f"{time.strftime('%H:%M:%S', time.localtime(at))}  {text}" for at, text in events]


def entry(stats: ExecutorStats, window: ExecutorStats, host: str, pid: int) -> Values:
    """Return the entry that a driver writes for an executor, in plain values."""
    return {
        "posted": time.time(),
        "host": host,
        "pid": pid,
        "stats": stats.to_dict(),
        "window": window.to_dict(),
    }


def read(entry: Values) -> Found:
    """Read an entry."""
    stats, window = map(ExecutorStats.from_dict, (entry["stats"], entry["window"]))
    age = time.time() - entry["posted"]
    seconds = max((replica.seconds for replica in window.replicas), default=0.0)
    title = f"{stats.name}, pid {entry['pid']} on {entry['host']}, link: {stats.link}"
    late = f"; last heard of {age:.0f} s ago" if age > _OLD else ""
    return Found(title, f"the last {seconds:.0f} s{late}", stats, window)


def render(entries: Sequence[Values]) -> str:
    """Return the text about all executors, of their drivers' entries."""
    parts = []
    for found in map(read, entries):
        lines = [found.title, f"{found.span}: {found.window.summary()}"]
        lines += table(found.window.cells())
        lines += [f"since the start: {found.stats.summary()}", *found.events]
        parts.append("\n".join(map(printable, lines)))
    return "\n\n".join(parts) or NOBODY
