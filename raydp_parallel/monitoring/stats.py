"""Statistics of executors and replicas, frozen: what `Executor.stats()` returns, and its table."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, TypeVar

Values = dict[str, Any]
"""Plain values by name, for JSON."""

DEATHS = ("deaths", "respawns", "replays")
"""Names of counters."""


def _counter(metric: str = "", about: str = "", **labels: str) -> int:
    """Declare a number that grows; with the name, the description and the labels of Ray's metric,
    if it is one.
    """
    return field(default=0, metadata={"metric": metric and (f"raydp_{metric}", about, labels)})


@dataclass(frozen=True)
class ReplicaInfo:
    """One replica.

    Attributes:
        index: Its number in the executor.
        device: The device it serves, as torch writes it: ``"cpu"`` or ``"cuda:1"``.
        node: Ray's id of its node.
        pid: Its process, 0 before it started.
        state: ``"ready"``, ``"starting"``, ``"dead"``, ``"closed"``, or ``"away"`` while an elastic
            executor has no device for it.
        gpu: Name of its GPU, empty on a CPU.
    """

    index: int
    device: str
    node: str
    pid: int
    state: str
    gpu: str = ""

    @property
    def device_id(self) -> int | str:
        """The entry of ``device_ids`` that it serves."""
        return "cpu" if self.device == "cpu" else int(self.device.rpartition(":")[2])


@dataclass(frozen=True)
class ReplicaStats(ReplicaInfo):
    """One replica, and what it did.

    Attributes:
        models: Classes of the modules that it ran.
        calls: Forwards it ran.
        rows: Rows of the batches that it ran.
        busy: Seconds in which it worked on calls.
        waiting: Seconds in which it was ready, and had no call.
        seconds: Seconds since it first started.
        bytes_in: Bytes that went to it, state included.
        bytes_out: Bytes that came from it.
        deaths: How often its process ended before its time.
        respawns: How often a process was started to replace it.
        replays: Chunks that it ran again because a replica had died.
    """

    models: tuple[str, ...] = ()
    calls: int = _counter("calls", "Forwards of the replica")
    rows: int = _counter("samples", "Rows of the batches that were run")
    busy: float = _counter("phase_seconds", "Time busy, and waiting for a call", phase="busy")
    waiting: float = _counter("phase_seconds", "Time busy, and waiting for a call", phase="waiting")
    seconds: float = _counter()
    bytes_in: int = _counter("bytes", "Bytes to and from the replica", direction="in")
    bytes_out: int = _counter("bytes", "Bytes to and from the replica", direction="out")
    deaths: int = _counter("faults", "Deaths, and what followed", kind="deaths")
    respawns: int = _counter("faults", "Deaths, and what followed", kind="respawns")
    replays: int = _counter("faults", "Deaths, and what followed", kind="replays")

    @property
    def rate(self) -> float:
        """Rows per second."""
        return self.rows / self.seconds if self.seconds else 0.0

    @property
    def shares(self) -> tuple[float, float, float]:
        """Shares of its time: busy, waiting, and idle, which is the rest: calls travelled, or it
        was not there.
        """
        # A call is counted when it ends, so that a window can have more work than time.
        seconds = self.seconds or math.inf
        busy = min(1.0, self.busy / seconds)
        waiting = min(1.0 - busy, self.waiting / seconds)
        return busy, waiting, 1.0 - busy - waiting


@dataclass(frozen=True)
class ExecutorStats:
    """The work of an executor so far. Prints as a table.

    Attributes:
        name: The executor's name in Ray's dashboard and in metrics.
        replicas: One entry per replica, none where the module runs in place.
        link: The way in which bytes travel.
        forwards: Forward calls.
        backwards: Trips back.
        state_sends: Forwards, per replica, that had to send state or structure.
        state_bytes: Bytes of parameters and buffers that were sent.
        reruns: Forwards that ran again because contents had changed behind versions.
        events: Starts, deaths and other rare events: seconds since the epoch, and a text.
        steps_behind: The steps of `DataParallel.optimizer` that the master copy lacks.
        deaths: Replicas that ended before their time.
        respawns: Replicas that were started to replace them.
        replays: Chunks that ran again because their replica had died.
    """

    name: str
    replicas: tuple[ReplicaStats, ...]
    link: str
    forwards: int = _counter("passes", "Forwards and backwards of all", method="forward")
    backwards: int = _counter("passes", "Forwards and backwards of all", method="backward")
    state_sends: int = _counter("state_sends", "Forwards that had to send state")
    state_bytes: int = _counter("state_bytes", "Bytes of parameters and buffers that were sent")
    reruns: int = _counter("reruns", "Forwards that ran again after hidden changes")
    events: tuple[tuple[float, str], ...] = ()
    steps_behind: int = 0
    deaths: int = _counter()
    respawns: int = _counter()
    replays: int = _counter()

    def since(self, before: ExecutorStats | None) -> ExecutorStats:
        """Return the work done after an earlier look."""
        earlier = {replica.index: replica for replica in before.replicas} if before else {}
        grown = tuple(_growth(now, earlier.get(now.index)) for now in self.replicas)
        return replace(_growth(self, before), replicas=grown)

    def to_dict(self) -> Values:
        """Return plain values, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Values) -> ExecutorStats:
        """Read `to_dict`'s values, also after a trip through JSON."""
        replicas = [ReplicaStats(**{**r, "models": tuple(r["models"])}) for r in values["replicas"]]
        events = tuple((at, text) for at, text in values["events"])
        return cls(**{**values, "replicas": tuple(replicas), "events": events})

    def cells(self) -> list[list[str]]:
        """Return the head of the table, and a row for each replica."""
        rows = [[column(replica) for column in _COLUMNS.values()] for replica in self.replicas]
        return [[*_COLUMNS], *rows]

    def summary(self) -> str:
        """Describe all replicas together in one line."""
        seconds = max((replica.seconds for replica in self.replicas), default=0.0)
        each = f" ({self.forwards / seconds:,.1f} per second)" if seconds else ""
        text = (
            f"{count(self.forwards, 'forward')}{each}, {count(self.backwards, 'backward')}; "
            f"{count(self.state_sends, 'state send')}, {self.state_bytes / 1e6:,.1f} MB; "
            f"{count(self.reruns, 'rerun')}"
        )
        faults = {name.removesuffix("s"): getattr(self, name) for name in DEATHS}
        if any(faults.values()):
            text += "; " + ", ".join(count(number, noun) for noun, number in faults.items())
        return text

    def __str__(self) -> str:
        table_lines = [*table(self.cells()), NOTE] if self.replicas else []
        return "\n".join([f"{self.name}, link: {self.link}", *table_lines, self.summary()])

    def _repr_html_(self) -> str:
        about = html.escape(f"{self.name}, link: {self.link}; {self.summary()}")
        return f"{html_table(self.cells())}<p>{about}</p>"


Record = TypeVar("Record", ReplicaStats, ExecutorStats)


def counters(of: Record | type[Record]) -> Values:
    """Return the metrics of a record's counters, by the names of these; "" is none."""
    return {one.name: one.metadata["metric"] for one in fields(of) if one.metadata}


def _growth(now: Record, before: Record | None) -> Record:
    grown = {name: getattr(now, name) - getattr(before, name, 0) for name in counters(now)}
    return replace(now, **grown)


NOTE = (
    "busy: at work on calls; waiting: ready, without a call; idle: calls travel, or no process\n"
    "MB in: inputs, gradients, changed weights; MB out: outputs, gradients; mapped weights in none"
)


_COLUMNS: dict[str, Callable[[ReplicaStats], str]] = {
    "replica": lambda r: str(r.index),
    "device": lambda r: f"{r.device} {r.gpu}".strip(),
    "node": lambda r: r.node[:8],
    "pid": lambda r: str(r.pid),
    "state": lambda r: r.state,
    "model": lambda r: ", ".join(r.models[:3]) + ", ..." * (len(r.models) > 3),
    "calls": lambda r: f"{r.calls:,}",
    "rows/s": lambda r: f"{r.rate:,.0f}",
    "busy": lambda r: f"{r.shares[0]:.0%}",
    "waiting": lambda r: f"{r.shares[1]:.0%}",
    "idle": lambda r: f"{r.shares[2]:.0%}",
    "MB in": lambda r: f"{r.bytes_in / 1e6:,.1f}",
    "MB out": lambda r: f"{r.bytes_out / 1e6:,.1f}",
    "deaths": lambda r: str(r.deaths),
}


def count(number: int, noun: str) -> str:
    """Write a number of things."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def printable(text: str) -> str:
    """Replace control characters: texts of other programs go to a terminal."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table with columns as wide as they must be."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells))
    return lines


def html_table(rows: Sequence[Sequence[str]]) -> str:
    """Return a table for a page."""
    lines = []
    for number, row in enumerate(rows):
        kind = "td" if number else "th"
        cells = "".join(f"<{kind}>{html.escape(cell)}</{kind}>" for cell in row)
        lines.append(f"<tr>{cells}</tr>")
    return f"<table>{''.join(lines)}</table>"
