"""The text of `raydp-parallel status`: the running executors of a cluster, from the entries that
their drivers write once per second.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import SimpleNamespace

from raydp_parallel.monitoring.stats import ExecutorStats, Values, printable, table

_EVENTS = 6
"""Events that are shown."""

_OLD = 5.0
"""Seconds after which the text says that an entry is old."""

NOBODY = (
    "No executor is running in this cluster: none was started, the program has ended, or it runs "
    "with Options(metrics=False)."
)


def entry(stats: ExecutorStats, window: ExecutorStats, host: str, pid: int) -> Values:
    """Return the entry that a driver writes for an executor, in plain values."""
    return {
        "posted": time.time(),
        "host": host,
        "pid": pid,
        "stats": stats.to_dict(),
        "window": window.to_dict(),
    }


def read(entry: Values) -> SimpleNamespace:
    """Read an entry: a title for the executor and its process, its statistics, those of a window
    with the time that this spans, and the last events.
    """
    stats, window = map(ExecutorStats.from_dict, (entry["stats"], entry["window"]))
    age = time.time() - entry["posted"]
    seconds = max((replica.seconds for replica in window.replicas), default=0.0)
    title = f"{stats.name}, pid {entry['pid']} on {entry['host']}, link: {stats.link}"
    late = f"; last heard of {age:.0f} s ago" if age > _OLD else ""
    span, last = f"the last {seconds:.0f} s{late}", stats.events[-_EVENTS:]
    events = [f"{time.strftime('%H:%M:%S', time.localtime(at))}  {text}" for at, text in last]
    return SimpleNamespace(title=title, span=span, stats=stats, window=window, events=events)


def render(entries: Sequence[Values]) -> str:
    """Return the text about all executors, of their drivers' entries."""
    parts = []
    for found in map(read, entries):
        lines = [found.title, f"{found.span}: {found.window.summary()}"]
        lines += table(found.window.cells())
        lines += [f"since the start: {found.stats.summary()}", *found.events]
        parts.append("\n".join(map(printable, lines)))
    return "\n\n".join(parts) or NOBODY
