"""The text of `raydp-parallel status`, and the page of `raydp-parallel report`: the running
executors of a cluster, from the entries that their drivers write once per second.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from html import escape
from pathlib import Path

from raydp_parallel.monitoring.stats import ExecutorStats, PlainValues, printable

# No script runs and nothing is fetched there, whatever an entry contains.
_HEAD = Path(__file__).with_name("report.html")
_NOBODY = "No executor runs here: none was started, it has ended, or has Options(metrics=False)."


def entry(stats: ExecutorStats) -> PlainValues:
    """Return the entry that a driver writes for an executor, in plain values."""
    about = {"posted": time.time(), "host": socket.gethostname(), "pid": os.getpid()}
    return {**about, "stats": stats.to_dict()}


def read(entry: PlainValues) -> tuple[str, ExecutorStats]:
    """Read an entry: a text about its process, and the statistics."""
    age = time.time() - entry["posted"]
    late = f", last heard of {age:.0f} s ago" if age > 5 else ""  # it writes once per second
    return f"pid {entry['pid']} on {entry['host']}{late}", ExecutorStats.from_dict(entry["stats"])


def render(entries: Sequence[PlainValues]) -> str:
    """Return the text about all executors, of their drivers' entries."""
    texts = [f"{about}\n{stats}".splitlines() for about, stats in map(read, entries)]
    return "\n\n".join("\n".join(map(printable, lines)) for lines in texts) or _NOBODY


def page(entries: Sequence[PlainValues]) -> str:
    """Return a page with tables and bars about all executors, of their drivers' entries."""
    parts = [_HEAD.read_text(), f"<p>{escape(time.strftime('%Y-%m-%d %H:%M:%S %Z'))}</p>"]
    for about, stats in map(read, entries):
        parts += [f"<h2>{escape(stats.name)}, {escape(about)}</h2>", stats._repr_html_()]
    return "\n".join([*(parts if entries else (*parts, _NOBODY)), "</body></html>\n"])
