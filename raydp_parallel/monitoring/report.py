"""The page of `raydp-parallel report`: tables and bars, from the entries that executors' drivers
write. It needs no network and no script.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from html import escape
from types import SimpleNamespace

from raydp_parallel.monitoring import status
from raydp_parallel.monitoring.stats import NOTE, ReplicaStats, Values, html_table

_STYLE = """
:root { color-scheme: light dark; --rule: #8884; --busy: #1b9e77; --waiting: #7b9fc7; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 1rem auto; padding: 0 1rem; }
h2 { overflow-wrap: anywhere; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; width: 100%; }
th, td { padding: .2rem .5rem; text-align: right; border-bottom: 1px solid var(--rule); }
.bar { display: flex; height: 1rem; margin: .1rem 0 .6rem; background: var(--rule); }
.busy { background: var(--busy); } .waiting { background: var(--waiting); }
.key span { display: inline-block; width: .8rem; height: .8rem; margin: 0 .3rem 0 1rem; }
.idle { background: var(--rule); }
"""

# No script runs and nothing is fetched, whatever an entry contains.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"

_HEAD = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>raydp_parallel report</title><style>{_STYLE}</style></head><body>
<h1>raydp_parallel</h1>"""

_KEY = "".join(f'<span class="{name}"></span>{name}' for name in ("busy", "waiting", "idle"))


def page(entries: Sequence[Values]) -> str:
    """Return the page about all executors, of their drivers' entries."""
    parts = [f"{_HEAD}<p>{escape(time.strftime('%Y-%m-%d %H:%M:%S %Z'))}</p>"]
    parts += map(_section, map(status.read, entries))
    if not entries:
        parts.append(f"<p>{status.NOBODY}</p>")
    return "\n".join([*parts, "</body></html>\n"])


def _section(found: SimpleNamespace) -> str:
    bars = "".join(map(_bar, found.window.replicas))
    events = "".join(f"<li>{escape(event)}</li>" for event in found.events)
    return (
        f"<h2>{escape(found.title)}</h2><h3>{escape(found.span.capitalize())}</h3>"
        f'<p class="key">{_KEY}</p>{bars}<p>{escape(found.window.summary())}</p>'
        f"{html_table(found.window.cells())}<p>{NOTE}</p>"
        f"<h3>Since the start</h3><p>{escape(found.stats.summary())}</p>"
        f"{html_table(found.stats.cells())}<ul>{events}</ul>"
    )


def _bar(replica: ReplicaStats) -> str:
    busy, waiting, _ = replica.shares
    return (
        f"<div>{replica.index} on {escape(replica.device)}: {busy:.0%} busy, "
        f'{replica.rate:,.0f} rows/s</div><div class="bar">'
        f'<div class="busy" style="width:{busy:.1%}"></div>'
        f'<div class="waiting" style="width:{waiting:.1%}"></div></div>'
    )
