"""What `raydp-parallel status` shows: the running executors of a cluster, as text, made from their
entries alone.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from raydp_parallel.monitoring.reporter import Report
from raydp_parallel.monitoring.stats import NO_FAULTS, asked_for, printable, table

_EVENTS = 6
"""Events that are shown."""

_WINDOW = 10
"""Seconds that a rate is taken over."""

_OLD = 5.0
"""Seconds after which the text says that an entry is old."""


class DriverStatus(NamedTuple):
    """The driver of an executor.

    Attributes:
        host: The name of its machine.
        pid: Its process.
        job: Ray's id of its job.
    """

    host: str
    pid: int
    job: str


def entry(report: Report, driver: DriverStatus) -> dict[str, Any]:
    """The entry that a driver writes for an executor, in plain values."""
    return {
        "posted": time.time(),
        "clock": time.perf_counter(),
        **driver._asdict(),
        "stats": report.stats.to_dict(),
        "calls": report.calls,
        "events": report.events,
        "history": report.history,
    }


UNREADABLE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, OSError)
"""The errors of reading an entry that another version or another program wrote. OSError is that of
a time in no calendar.
"""


def render(entries: Sequence[Mapping[str, Any]], now: float | None = None) -> str:
    """The text about all executors.

    Args:
        entries: What their drivers wrote.
        now: Seconds since the epoch.
    """
    if not entries:
        return (
            "No executor is running in this cluster: none was started, the program has "
            "ended, or it runs with Options(metrics=False)."
        )
    at = time.time() if now is None else now
    return "\n\n".join("\n".join(map(printable, _lines(entry, at))) for entry in entries)


def _lines(entry: Mapping[str, Any], now: float) -> list[str]:
    try:
        return _executor(entry, now)
    except UNREADABLE as error:
        return [unreadable(entry, error)]


def unreadable(entry: Any, error: Exception) -> str:
    """What is shown for an entry that this version cannot read; the others are shown as usual."""
    job = entry.get("job", "") if isinstance(entry, Mapping) else ""
    return (
        f"an executor of job {job or 'unknown'} has an entry that this version cannot "
        f"read: {error!r}"
    )


def _executor(entry: Mapping[str, Any], now: float) -> list[str]:
    stats = entry["stats"]
    age = now - entry["posted"]
    late = ""
    if age > _OLD:
        late = f", last heard of {age:.0f} s ago: the driver hangs, or does not get to it"
    samples, calls = sum(rates(entry)), _per_second(entry)
    lines = [
        f"{stats['name']}  pid {entry['pid']} on {entry['host']}, job {entry['job']}, models "
        f"{', '.join(stats['models']) or 'none yet'}{late}",
        f"{stats['forwards']} forwards and {stats['backwards']} backwards in "
        f"{stats['seconds']:.0f} s; lately {calls:.1f} forwards and {samples:.0f} samples "
        f"per second; link {stats['link']}",
        *table(_rows(entry)),
        *_lost(stats),
        *(f"! {advice['text']}" for advice in stats["advice"]),
    ]
    events = entry["events"][-_EVENTS:]
    return [
        *lines,
        *(f"{time.strftime('%H:%M:%S', time.localtime(at))}  {text}" for at, text in events),
    ]


def _lost(stats: Mapping[str, Any]) -> list[str]:
    """What deaths cost, if there were any."""
    if not (stats["replays"] or stats["respawns"] or stats["lost_ms"]):
        return []
    return [
        f"{stats['replays']} chunks run again, {stats['respawns']} replicas replaced, "
        f"{stats['lost_ms']:.0f} ms lost"
    ]


def _rows(entry: Mapping[str, Any]) -> list[list[str]]:
    replicas = entry["stats"]["replicas"]
    counted = [name for name in replicas[0] if _is_fault(name, replicas)] if replicas else []
    head = [
        "replica",
        "device",
        "node",
        "pid",
        "state",
        "samples",
        "/s",
        "at work",
        "ms",
        "wait",
        "idle",
        "MB in",
        "MB out",
    ]
    with_gpu = any(replica["memory_total"] for replica in replicas)
    rows = [[*head, *(["GPU MB", "peak"] if with_gpu else []), *counted]]
    slow = {
        advice["replica"] for advice in entry["stats"]["advice"] if advice["topic"] == "straggler"
    }
    for replica, rate, work in zip(replicas, rates(entry), shares(entry), strict=True):
        phases = replica["phases"]
        total = sum(phases.values()) or 1.0
        row = [
            f"{'>' if replica['index'] in slow else ''}{replica['index']}",
            device(replica),
            replica["node_id"][:8],
            str(replica["pid"]),
            replica["state"],
            str(replica["rows"]),
            f"{rate:.0f}",
            f"{work:.0%}",
            f"{replica['recent_ms']:.1f}",
            f"{phases['wait'] / total:.0%}",
            f"{phases['idle'] / total:.0%}",
            f"{replica['bytes_in'] / 1e6:.1f}",
            f"{replica['bytes_out'] / 1e6:.1f}",
        ]
        if with_gpu:
            row += [f"{replica['memory'] / 1e6:.0f}", f"{replica['memory_peak'] / 1e6:.0f}"]
        rows.append([*row, *(str(replica[name]) for name in counted)])
    return rows


def _is_fault(name: str, replicas: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a field counts faults and is not 0; entries of later versions may have more such."""
    return name not in NO_FAULTS and any(
        type(replica.get(name)) is int and replica[name] for replica in replicas
    )


def device(replica: Mapping[str, Any]) -> str:
    """The device that the user asked for."""
    return asked_for(replica["device_id"])


def _window(entry: Mapping[str, Any]) -> tuple[Sequence[Any], Sequence[Any]] | None:
    """The moments at both ends of the last seconds, as (time, rows, work)."""
    stats = entry["stats"]
    rows = [replica["rows"] for replica in stats["replicas"]]
    now = [entry["posted"], rows, [_work(replica) for replica in stats["replicas"]]]
    for moment in entry["history"]:
        if 0 < now[0] - moment[0] <= _WINDOW and len(moment[1]) == len(rows):
            return moment, now
    return None


def _work(replica: Mapping[str, Any]) -> float:
    return float(replica["phases"]["forward"] + replica["phases"]["backward"])


def rates(entry: Mapping[str, Any]) -> list[float]:
    """Samples per second of each replica, over the last seconds."""
    found = _window(entry)
    if found is None:
        return [0.0] * len(entry["stats"]["replicas"])
    then, now = found
    return [(b - a) / (now[0] - then[0]) for a, b in zip(then[1], now[1], strict=True)]


def shares(entry: Mapping[str, Any]) -> list[float]:
    """Share of the last seconds that each replica was at work."""
    found = _window(entry)
    if found is None:
        return [0.0] * len(entry["stats"]["replicas"])
    then, now = found
    return [(b - a) / (now[0] - then[0]) for a, b in zip(then[2], now[2], strict=True)]


def _per_second(entry: Mapping[str, Any]) -> float:
    """Forwards per second, from the calls in the entry."""
    calls = [call for call in entry["calls"] if call[0] == "forward"]
    if len(calls) < 2 or calls[-1][5] <= calls[0][5]:
        return 0.0
    return float((len(calls) - 1) / (max(entry["clock"], calls[-1][5]) - calls[0][5]))
