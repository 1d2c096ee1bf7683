"""The report: one HTML page with graphs and tables, made from executors' entries alone. It needs no
network. `raydp-parallel report` makes one of what runs, and `ReportFile` one of what has ended.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from raydp_parallel.monitoring.accounts import IN_REPLICA
from raydp_parallel.monitoring.reporter import Report
from raydp_parallel.monitoring.status import (
    UNREADABLE,
    DriverStatus,
    device,
    entry,
    rates,
    shares,
    unreadable,
)

_STYLE = """
:root { color-scheme: light dark; --ground: #fff; --ink: #1b1f24; --faint: #667; --rule: #d5d9de; --soft: #f3f5f7;
  --adopt: #8d99a6; --copy: #c98a1b; --forward: #2f7ed8; --backward: #1b9e77; --wait: #e3e6ea; --reduce: #8e5bb5;
  --idle: #f3f5f7; --bad: #c62828; }
@media (prefers-color-scheme: dark) { :root { --ground: #14171a; --ink: #e6e8ea; --faint: #9aa3ad; --rule: #343a41;
  --soft: #1d2125; --adopt: #7b8794; --copy: #e0a63a; --forward: #5aa2f0; --backward: #35c498; --wait: #33393f;
  --reduce: #b084d8; --idle: #1d2125; --bad: #ff7b72; } }
body { font: 15px/1.5 system-ui, sans-serif; background: var(--ground); color: var(--ink); max-width: 1200px;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin: 2rem 0 .3rem; }
h3 { font-size: 1rem; margin: 1.4rem 0 .4rem; }
p { margin: .3rem 0; } .faint, text.faint { color: var(--faint); fill: var(--faint); }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .45rem; text-align: right; border-bottom: 1px solid var(--rule); white-space: nowrap; }
th { font-weight: 600; color: var(--faint); } td:first-child, th:first-child { text-align: left; }
tr.bad td { color: var(--bad); font-weight: 600; } li.bad { color: var(--bad); }
svg { display: block; width: 100%; height: auto; background: var(--soft); } text { fill: var(--ink); font-size: 12px; }
.adopt { fill: var(--adopt); } .copy-in, .copy-out, .copy { fill: var(--copy); } .forward { fill: var(--forward); }
.backward { fill: var(--backward); } .wait { fill: var(--wait); } .reduce { fill: var(--reduce); }
.idle { fill: var(--idle); } .grid { stroke: var(--rule); } .bad-line { stroke: var(--bad); }
.key span { display: inline-block; width: .8em; height: .8em; margin: 0 .3em 0 1em; vertical-align: -.05em;
  border: 1px solid var(--rule); }
.line0 { stroke: var(--forward); } .line1 { stroke: var(--backward); } .line2 { stroke: var(--copy); }
.line3 { stroke: var(--reduce); } .line4 { stroke: var(--adopt); } path { fill: none; stroke-width: 2; }
"""

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""No script runs and nothing is fetched, whatever an entry contains."""

_KEYS = ("adopt", "copy", "forward", "backward", "wait", "reduce", "idle")
_PHASES = ("adopt", "copy_in", "forward", "backward", "copy_out", "wait", "reduce", "idle")
_WIDTH, _LEFT, _RIGHT, _BAR = 1060, 150, 10, 26
_SHOWN_CALLS = 12
"""Calls in the timeline: few, so that each phase has some width."""


class ReportFile:
    """The report of one executor, written when it ends.

    Args:
        path: Where to write it.
        driver: The process of the executor.
    """

    def __init__(self, path: Path, driver: DriverStatus) -> None:
        self._path = path
        self._driver = driver

    def take(self, found: Report) -> None:
        """Write the page, if this is the last report."""
        if found.last:
            self._path.write_text(report([entry(found, self._driver)]), encoding="utf-8")


def report(entries: Sequence[Mapping[str, Any]], now: float | None = None) -> str:
    """The page.

    Args:
        entries: What executors' drivers wrote.
        now: Seconds since the epoch.
    """
    at = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(time.time() if now is None else now))
    body = "\n".join(_section(entry) for entry in entries) or "<p>No executor is running.</p>"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>raydp_parallel report</title><style>{_STYLE}</style></head><body>\n"
        f'<h1>raydp_parallel</h1><p class="faint">{escape(at)}</p>\n{body}\n</body></html>\n'
    )


def _section(entry: Mapping[str, Any]) -> str:
    try:
        return _executor(entry)
    except UNREADABLE as error:
        return f"<p>{escape(unreadable(entry, error))}</p>"


def _executor(entry: Mapping[str, Any]) -> str:
    stats = entry["stats"]
    about = (
        f"Process {entry['pid']} on {entry['host']}, job {entry['job']}; models "
        f"{', '.join(stats['models']) or 'none yet'}; link {stats['link']}"
    )
    done = (
        f"{stats['forwards']} forwards and {stats['backwards']} backwards in "
        f"{stats['seconds']:.1f} s; lately {sum(rates(entry)):.0f} samples per second."
    )
    if stats["lost_ms"]:
        done += f" Deaths of replicas have cost {stats['lost_ms']:.0f} ms."
    parts = [
        f"<h2>{escape(stats['name'])}</h2><p "
        f"class='faint'>{escape(about)}</p><p>{escape(done)}</p>",
        _advice(stats["advice"]),
        "<h3>Replicas</h3>",
        _replicas(entry),
        "<h3>Where each replica's time went</h3>",
        _key(),
        _shares(stats["replicas"]),
        "<h3>The last calls, on one clock</h3>",
        _timeline(entry),
        "<h3>Samples per second</h3>",
        _history(entry),
        "<h3>The driver's time</h3>",
        _table(
            [
                ["preparing", "verifying", "waiting", "reducing", "outside of calls"],
                [f"{value:.2f} s" for value in stats["driver"].values()],
            ]
        ),
        _events(entry["events"]),
    ]
    return "\n".join(parts)


def _advice(found: Sequence[Mapping[str, Any]]) -> str:
    items = "".join(
        f"<li{'' if advice['topic'] == 'balanced' else ' class=bad'}>{escape(advice['text'])}</li>"
        for advice in found
    )
    return f"<ul>{items}</ul>" if items else ""


def _replicas(entry: Mapping[str, Any]) -> str:
    slow = {
        advice["replica"] for advice in entry["stats"]["advice"] if advice["topic"] == "straggler"
    }
    head = [
        "replica",
        "device",
        "node",
        "pid",
        "state",
        "samples",
        "per second",
        "at work",
        "ms a call",
        "chunk",
        "MB in",
        "MB out",
        "state sent",
        "skipped",
        "deaths",
        "replays",
        "respawns",
        "GPU MB",
        "peak",
    ]
    rows, bad = [head], set()
    for number, (replica, rate, share) in enumerate(
        zip(entry["stats"]["replicas"], rates(entry), shares(entry), strict=True)
    ):
        if replica["index"] in slow or replica["state"] == "dead":
            bad.add(number)
        identity = [
            str(replica["index"]),
            f"{device(replica)} {replica['gpu']}".strip(),
            replica["node_id"][:8],
        ]
        what = [
            str(replica["pid"]),
            replica["state"],
            str(replica["rows"]),
            f"{rate:.0f}",
            f"{share:.0%}",
        ]
        bytes_ = [
            f"{replica[name] / 1e6:.1f}"
            for name in ("bytes_in", "bytes_out", "state_sent", "state_skipped")
        ]
        memory = [
            f"{replica[name] / 1e6:.0f}" if replica["memory_total"] else ""
            for name in ("memory", "memory_peak")
        ]
        faults = [str(replica[name]) for name in ("deaths", "replays", "respawns")]
        pace = [f"{replica['recent_ms']:.2f}", str(replica["chunk_rows"])]
        rows.append([*identity, *what, *pace, *bytes_, *faults, *memory])
    if not any(replica["memory_total"] for replica in entry["stats"]["replicas"]):
        rows = [row[:-2] for row in rows]
    return _table(rows, bad)


def _table(rows: Sequence[Sequence[str]], bad: Iterable[int] = ()) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in rows[0])
    marked = set(bad)
    body = "".join(
        f"<tr{' class=bad' if i in marked else ''}>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>"
        for i, row in enumerate(rows[1:])
    )
    return f"<div class=wide><table><tr>{head}</tr>{body}</table></div>"


def _key() -> str:
    return f"<p class=key>{''.join(f'<span style=background:var(--{key})></span>{key}' for key in _KEYS)}</p>"


def _svg(height: float, parts: Iterable[str], title: str) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title>{''.join(parts)}</svg>"
    )


def _bar(kind: str, x: float, y: float, width: float, tip: str) -> str:
    kind = kind.replace(" ", "-").replace("_", "-")
    return (
        f'<rect class="{kind}" x="{x:.2f}" y="{y:.0f}" width="{max(0.0, width):.2f}" '
        f'height="{_BAR - 6}">'
        f"<title>{escape(tip)}</title></rect>"
    )


def _label(y: float, text: str) -> str:
    return f'<text x="8" y="{y + 14:.0f}">{escape(text)}</text>'


def _shares(replicas: Sequence[Mapping[str, Any]]) -> str:
    parts, inner = [], _WIDTH - _LEFT - _RIGHT
    for row, replica in enumerate(replicas):
        y, x = row * _BAR + 6, float(_LEFT)
        total = sum(replica["phases"].values()) or 1.0
        parts.append(_label(y, f"{replica['index']} on {device(replica)}"))
        for phase in _PHASES:
            width = inner * replica["phases"][phase] / total
            name = phase.replace("_", " ")
            tip = (
                f"{name}: {replica['phases'][phase]:.3f} s, {replica['phases'][phase] / total:.1%}"
            )
            parts.append(_bar(phase, x, y, width, tip))
            x += width
    return _svg(len(replicas) * _BAR + 6, parts, "Shares of each replica's time")


def _timeline(entry: Mapping[str, Any]) -> str:
    calls = [call for call in entry["calls"] if call[3] < call[5]][-_SHOWN_CALLS:]
    if not calls:
        return "<p class=faint>No call yet.</p>"
    start, end = min(call[3] for call in calls), max(call[5] for call in calls)
    scale = (_WIDTH - _LEFT - _RIGHT) / (end - start)
    replicas = entry["stats"]["replicas"]
    row_of = {replica["index"]: n + 1 for n, replica in enumerate(replicas)}
    parts = [_label(6, "driver")]
    parts += [
        _label(row * _BAR + 6, f"{r['index']} on {device(r)}")
        for r, row in zip(replicas, row_of.values(), strict=True)
    ]
    for method, number, model, began, sent, ended, chunks in calls:
        title = f"{method} #{number} {model}".strip()

        def bar(
            kind: str, since: float, until: float, row: int, what: str, title: str = title
        ) -> str:
            tip = f"{title}: {what}, {1e3 * (until - since):.2f} ms"
            return _bar(
                kind, _LEFT + (since - start) * scale, row * _BAR + 6, (until - since) * scale, tip
            )

        if method == "reduce":
            parts.append(bar("reduce", began, ended, 0, "gradients summed"))
            continue
        parts += [bar("adopt", began, sent, 0, "prepared"), bar("wait", sent, ended, 0, "waited")]
        for replica, gone, laps in chunks:
            parts.append(bar("wait", gone, ended, row_of.get(replica, 0), "under way"))
            for phase, since, until in zip(IN_REPLICA[method], laps, laps[1:], strict=False):
                parts.append(bar(phase, since, until, row_of.get(replica, 0), phase))
    height = (len(replicas) + 1) * _BAR + 6
    for tenth in range(0, 11, 2):
        x = _LEFT + tenth / 10 * (_WIDTH - _LEFT - _RIGHT)
        anchor = "end" if tenth == 10 else "middle" if tenth else "start"
        parts.append(
            f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{height}" y2="{height + 5}"/>'
        )
        text = f"{1e3 * (end - start) * tenth / 10:.1f} ms"
        parts.append(
            f'<text class="faint" text-anchor="{anchor}" x="{x:.1f}" '
            f'y="{height + 18}">{text}</text>'
        )
    return _svg(height + 24, parts, "The last calls: the driver and each replica")


def _history(entry: Mapping[str, Any]) -> str:
    moments = [m for m in entry["history"] if len(m[1]) == len(entry["stats"]["replicas"])]
    if len(moments) < 3:
        return "<p class=faint>Not long enough yet.</p>"
    steps = list(itertools.pairwise(moments))
    lines = [
        [(b[0], max(0.0, (b[1][i] - a[1][i]) / max(1e-6, b[0] - a[0]))) for a, b in steps]
        for i in range(len(moments[0][1]))
    ]
    top = max((value for line in lines for _, value in line), default=0.0) or 1.0
    start, span, height = moments[1][0], max(1e-6, moments[-1][0] - moments[1][0]), 140
    inner = _WIDTH - _LEFT - _RIGHT
    parts = [
        f'<text class="faint" x="8" y="18">{top:.0f}</text>',
        f'<text class="faint" x="8" y="{height - 6}">0</text>',
    ]
    for i, line in enumerate(lines):
        points = " L".join(
            f"{_LEFT + (at - start) / span * inner:.1f},{height - 8 - value / top * (height - 20):.1f}"
            for at, value in line
        )
        name = device(entry["stats"]["replicas"][i])
        parts.append(
            f'<path class="line{i % 5}" d="M{points}"><title>replica {i} on '
            f"{escape(name)}</title></path>"
        )
    return (
        _svg(height, parts, "Samples per second of each replica")
        + f"<p class=faint>The last {span:.0f} s, one line per replica.</p>"
    )


def _events(events: Sequence[Sequence[Any]]) -> str:
    if not events:
        return ""
    items = "".join(
        f"<li>{time.strftime('%H:%M:%S', time.localtime(at))} {escape(text)}</li>"
        for at, text in events
    )
    return f"<h3>What happened</h3><ul>{items}</ul>"
