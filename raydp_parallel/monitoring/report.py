"""The page of `raydp-parallel report`: tables with bars, from the entries that executors' drivers
write. It needs no network and no script.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from html import escape

from raydp_parallel.monitoring import status
from raydp_parallel.monitoring.stats import Values

# No script runs and nothing is fetched, whatever an entry contains.
_HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>raydp_parallel report</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1"><style>
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 1rem auto; padding: 0 1rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; width: 100%; }
th, td { padding: .2rem .5rem; text-align: right; border-bottom: 1px solid #8884; }
</style></head><body><h1>raydp_parallel</h1>"""


def page(entries: Sequence[Values]) -> str:
    """Return the page about all executors, of their drivers' entries."""
    parts = [f"{_HEAD}<p>{escape(time.strftime('%Y-%m-%d %H:%M:%S %Z'))}</p>"]
    for about, stats in map(status.read, entries):
        parts += [f"<h2>{escape(stats.name)}, {escape(about)}</h2>", stats._repr_html_()]
    return "\n".join([*(parts if entries else (*parts, status.NOBODY)), "</body></html>\n"])
