"""What `raydp-parallel status` shows: the running executors of a cluster, as text. Read off their
entries alone.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from raydp_parallel.monitoring.reporter import Report
from raydp_parallel.monitoring.stats import asked_for, printable, table

_EVENTS = 6
"""Events that are shown."""

_WINDOW = 10
"""Seconds that a rate is taken over."""

_OLD = 5.0
"""Seconds after which an entry is said to be old."""

_KNOWN = {
    "index",
    "pid",
    "calls",
    "rows",
    "bytes_in",
    "bytes_out",
    "state_sent",
    "state_skipped",
    "chunk_rows",
    "memory",
    "memory_peak",
    "memory_total",
}


class DriverStatus(NamedTuple):
    """Whose executor it is.

    Attributes:
        host: The name of its machine.
        pid: Its process.
        job: Ray's id of its job.
    """

    host: str
    pid: int
    job: str


def entry(report: Report, driver: DriverStatus) -> dict[str, Any]:
    """What a driver posts of an executor, in plain values."""
    return {
        "posted": time.time(),
        "clock": time.perf_counter(),
        **driver._asdict(),
        "stats": report.stats.to_dict(),
        "calls": report.calls,
        "events": report.events,
        "history": report.history,
    }


UNREADABLE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
"""What an entry raises that another version wrote, or somebody else."""


def render(entries: Sequence[Mapping[str, Any]], now: float | None = None) -> str:
    """All executors.

    Args:
        entries: What their drivers posted.
        now: Seconds since the epoch.
    """
    if not entries:
        return (
            "No executor is running in this cluster: none was started, the program has "
            "ended, or it runs with "
            "Options(metrics=False)."
        )
    at = time.time() if now is None else now
    return "\n\n".join(
        "\n".join(map(printable, lines)) for entry in entries for lines in [_lines(entry, at)]
    )


def _lines(entry: Mapping[str, Any], now: float) -> list[str]:
    try:
        return _executor(entry, now)
    except UNREADABLE as error:
        return [unreadable(entry, error)]


def unreadable(entry: Any, error: Exception) -> str:
    """What is said of an entry that is not as this version makes them; the others are shown all the
    same.
    """
    job = entry.get("job", "") if isinstance(entry, Mapping) else ""
    return (
        f"an executor of job {job or 'unknown'} has an entry that this version cannot "
        f"read: {error!r}"
    )


def _executor(entry: Mapping[str, Any], now: float) -> list[str]:
    stats = entry["stats"]
    age = now - entry["posted"]
    late = (
        (f", last heard of {age:.0f} s ago: the driver hangs, or does not get to it")
        if age > _OLD
        else ""
    )
    samples, calls = sum(rates(entry)), _per_second(entry)
    lines = [
        f"{stats['name']}  pid {entry['pid']} on {entry['host']}, job {entry['job']}, models "
        f"{', '.join(stats['models']) or 'none yet'}{late}",
        f"{stats['forwards']} forwards and {stats['backwards']} backwards in "
        f"{stats['seconds']:.0f} s; lately "
        f"{calls:.1f} forwards and {samples:.0f} samples per second; link {stats['link']}",
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
    """What deaths cost, once there is something to tell."""
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
    """Whether a field counts what went wrong, whichever fields there are; shown once there is
    something.
    """
    return name not in _KNOWN and any(
        type(replica.get(name)) is int and replica[name] for replica in replicas
    )


def device(replica: Mapping[str, Any]) -> str:
    """The device that the user asked for."""
    return asked_for(replica["device_id"])


def _window(entry: Mapping[str, Any]) -> tuple[Sequence[Any], Sequence[Any]] | None:
    """The moments at both ends of the last seconds, as (time, rows, work)."""
    stats = entry["stats"]
    now = [
        entry["posted"],
        [r["rows"] for r in stats["replicas"]],
        [_work(r) for r in stats["replicas"]],
    ]
    then = [
        m
        for m in entry["history"]
        if now[0] - m[0] <= _WINDOW and len(m[1]) == len(now[1]) and now[0] > m[0]
    ]
    return (then[0], now) if then else None


def _work(replica: Mapping[str, Any]) -> float:
    return float(replica["phases"]["forward"] + replica["phases"]["backward"])


def rates(entry: Mapping[str, Any]) -> list[float]:
    """Samples per second of each replica, lately."""
    found = _window(entry)
    if found is None:
        return [0.0] * len(entry["stats"]["replicas"])
    then, now = found
    return [(b - a) / (now[0] - then[0]) for a, b in zip(then[1], now[1], strict=True)]


def shares(entry: Mapping[str, Any]) -> list[float]:
    """Share of its time that each replica was at work, lately."""
    found = _window(entry)
    if found is None:
        return [0.0] * len(entry["stats"]["replicas"])
    then, now = found
    return [(b - a) / (now[0] - then[0]) for a, b in zip(then[2], now[2], strict=True)]


def _per_second(entry: Mapping[str, Any]) -> float:
    """Forwards per second, of the calls that are kept."""
    calls = [call for call in entry["calls"] if call[0] == "forward"]
    if len(calls) < 2 or calls[-1][5] <= calls[0][5]:
        return 0.0
    return float((len(calls) - 1) / (max(entry["clock"], calls[-1][5]) - calls[0][5]))
