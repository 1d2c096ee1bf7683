"""The page of `raydp-parallel report`: tables with bars, from the entries that executors' drivers
write. It needs no network and no script.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from html import escape
from pathlib import Path

from raydp_parallel.monitoring import status
from raydp_parallel.monitoring.stats import PlainValues

# No script runs and nothing is fetched there, whatever an entry contains.
_HEAD = Path(__file__).with_name("report.html")


def page(entries: Sequence[PlainValues]) -> str:
    """Return the page about all executors, of their drivers' entries."""
    parts = [_HEAD.read_text(), f"<p>{escape(time.strftime('%Y-%m-%d %H:%M:%S %Z'))}</p>"]
    for about, stats in map(status.read, entries):
        parts += [f"<h2>{escape(stats.name)}, {escape(about)}</h2>", stats._repr_html_()]
    return "\n".join([*(parts if entries else (*parts, status.NOBODY)), "</body></html>\n"])
