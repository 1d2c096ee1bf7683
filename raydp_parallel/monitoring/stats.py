"""Statistics of executors and replicas, frozen: what `Executor.stats()` returns, and its table."""

from __future__ import annotations

import html
import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, TypeVar

PlainValues = dict[str, Any]
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
        memory: Bytes of main memory that its process has, 0 if it is not on the driver's machine.
    """

    index: int
    device: str
    node: str
    pid: int
    state: str
    gpu: str = ""
    memory: int = 0


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
    """The work of an executor so far. Prints as a table, with the speed of the last ten seconds.

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
        recent: The work of about the last ten seconds; None in itself.
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
    recent: ExecutorStats | None = None

    def since(self, before: ExecutorStats) -> ExecutorStats:
        """Return the work done after an earlier look."""
        earlier = {replica.index: replica for replica in before.replicas}
        grown = tuple(_growth(now, earlier.get(now.index)) for now in self.replicas)
        return replace(_growth(self, before), replicas=grown, recent=None)

    def to_dict(self) -> PlainValues:
        """Return plain values, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: PlainValues) -> ExecutorStats:
        """Read `to_dict`'s values, also after a trip through JSON."""
        replicas = tuple(ReplicaStats(**replica) for replica in values["replicas"])
        recent = values["recent"] and cls.from_dict(values["recent"])
        return cls(**{**values, "replicas": replicas, "recent": recent})

    def cells(self) -> list[list[str]]:
        """Return the head of the table, and a row for each replica."""
        pairs = zip(self.replicas, (self.recent or self).replicas, strict=True)
        return [[*_COLUMNS], *([cell(*pair) for cell in _COLUMNS.values()] for pair in pairs)]

    def _texts(self) -> tuple[list[str], list[str]]:
        """Return the lines above the table, and those below it."""
        title = f"{self.name}, transport: {self.link.replace('windows', 'shared memory')}"
        recent, total = (self.recent or self)._summary("the last"), self._summary("in all")
        if not self.replicas:
            return [title], [total]
        events = [f"{time.ctime(at)[11:19]}  {text}" for at, text in self.events[-6:]]
        return [title, recent], [*_NOTES, total, *events]

    def _summary(self, when: str) -> str:
        """Describe all replicas together in one line."""
        seconds = max((replica.seconds for replica in self.replicas), default=0.0)
        span = f"{when} {seconds:,.0f} s: " if seconds else ""
        each = f" ({self.forwards / seconds:,.1f} per second)" if seconds else ""
        updates = f"{count(self.state_sends, 'model update')} of {_mb(self.state_bytes)} MB"
        text = f"{count(self.forwards, 'forward')}{each}, {count(self.backwards, 'backward')}"
        rare = {name[:-1]: getattr(self, name) for name in ("reruns", *DEATHS)}
        return span + ", ".join([text, updates, *(count(n, noun) for noun, n in rare.items() if n)])

    def __str__(self) -> str:
        above, below = self._texts()
        return "\n".join([*above, *(table(self.cells()) if self.replicas else []), *below])

    def _repr_html_(self) -> str:
        above, below = ("<br>".join(map(html.escape, lines)) for lines in self._texts())
        return f"<p>{above}</p>{html_table(self.cells())}<p>{below}</p>"


Record = TypeVar("Record", ReplicaStats, ExecutorStats)


def counters(of: Record | type[Record]) -> PlainValues:
    """Return the metrics of a record's counters, by the names of these; "" is none."""
    return {one.name: one.metadata["metric"] for one in fields(of) if one.metadata}


def _growth(now: Record, before: Record | None) -> Record:
    grown = {name: getattr(now, name) - getattr(before, name, 0) for name in counters(now)}
    return replace(now, **grown)


_NOTES = (
    "rows/s, busy (computes), waiting (has no call), idle (data travels, or it starts): lately",
    "MB in and out: since the start, without shared memory; MB RAM: of a process of this machine",
)


def _mb(number: float) -> str:
    return f"{number / 1e6:,.{0 if number > 1e8 else 1}f}"


# Of a replica's work so far, and of its recent work.
_COLUMNS: dict[str, Callable[[ReplicaStats, ReplicaStats], str]] = {
    "replica": lambda r, _: (
        f"{r.index} {r.device} {r.gpu if r.state == 'ready' else r.state}".strip()
    ),
    "pid": lambda r, _: str(r.pid),
    "model": lambda r, _: ", ".join(r.models),
    "rows/s": lambda _, now: f"{now.rate:,.0f}",
    "busy": lambda _, now: f"{now.shares[0]:.0%}",
    "waiting": lambda _, now: f"{now.shares[1]:.0%}",
    "idle": lambda _, now: f"{now.shares[2]:.0%}",
    "MB in": lambda r, _: _mb(r.bytes_in),
    "MB out": lambda r, _: _mb(r.bytes_out),
    "MB RAM": lambda r, _: _mb(r.memory),
}


def count(number: int, noun: str) -> str:
    """Write a number of things."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def printable(text: str) -> str:
    """Replace control characters: texts of other programs go to a terminal."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table, which has no more than 100 letters."""
    short = [[cell.replace("NVIDIA ", "")[:16] for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*short, strict=True)]
    return ["  ".join(map(str.rjust, row, widths)) for row in short]


def html_table(rows: Sequence[Sequence[str]]) -> str:
    """Return a table for a page, with a bar for each share."""
    lines = []
    for number, row in enumerate(rows):
        kind = "td" if number else "th"
        cells = "".join(f"<{kind}>{html.escape(cell)}</{kind}>" for cell in row)
        lines.append(f"<tr>{re.sub(_SHARE, _BAR, cells)}</tr>")
    return f"<table>{''.join(lines)}</table>"


_SHARE, _BAR = r">(\d+)%<", r">\1% <meter max=100 value=\1></meter><"
