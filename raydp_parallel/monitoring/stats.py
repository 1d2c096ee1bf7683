"""Statistics of executors and replicas, frozen: what `Executor.stats()` returns, and its table."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True)
class PhaseSeconds:
    """Where a replica's time went. The parts add up to the time since it started.

    Attributes:
        adopt: Undoing what the last forward left, and taking up changed state.
        copy_in: Inputs, or gradients, to the device.
        forward: The module's forward.
        backward: Differentiating.
        copy_out: Outputs, or gradients, ready for the driver.
        wait: A call was under way, but not worked on: it travelled, or other replicas were not done
            yet.
        reduce: The driver summed the replicas' gradients.
        idle: No call was under way: the driver did something else.
    """

    adopt: float = 0.0
    copy_in: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    copy_out: float = 0.0
    wait: float = 0.0
    reduce: float = 0.0
    idle: float = 0.0

    @property
    def work(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward

    @property
    def copies(self) -> float:
        """Taking up state, and copying."""
        return self.adopt + self.copy_in + self.copy_out

    @property
    def total(self) -> float:
        """All."""
        return self.work + self.copies + self.wait + self.reduce + self.idle


@dataclass(frozen=True)
class DriverSeconds:
    """Where the driver's time went.

    Attributes:
        prepare: Looking for changes, making the chunks' messages and sending them.
        verify: Comparing contents, while the replicas work.
        wait: Waiting for the replicas.
        reduce: Summing their gradients.
        outside: Everything else: the user's loop, loss and optimizer, splitting and gathering.
    """

    prepare: float = 0.0
    verify: float = 0.0
    wait: float = 0.0
    reduce: float = 0.0
    outside: float = 0.0


@dataclass(frozen=True)
class Advice:
    """What limits a workload, in plain words.

    Attributes:
        topic: Its kind, for programs: ``"straggler"``, ``"driver"``, ``"small chunks"``,
            ``"copies"``, ``"state"``, ``"faults"``, ``"memory"``, ``"balanced"``, or ``"in place"``
            where there are no replicas.
        text: What, why, and what may help.
        numbers: The numbers behind it, by name.
        replica: The replica it is about, None if it is about all.
    """

    topic: str
    text: str
    numbers: dict[str, float]
    replica: int | None = None

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class ReplicaInfo:
    """One replica.

    Attributes:
        index: Its number in the executor.
        device: The device as its process sees it; ``gpu`` names the hardware.
        device_id: The entry of ``device_ids`` that it serves.
        node_id: Ray's id of its node.
        pid: Its process, 0 before it started.
        state: ``"ready"``, ``"dead"``, ``"closed"``, ``"empty"`` before it started, or ``"away"``
            while an elastic executor has no device for it.
        gpu: Name of its GPU, empty on a CPU.
        gpu_uuid: The GPU's uuid, empty on a CPU.
        gpu_index: The GPU's number on its node, as Ray's own metrics count, empty on a CPU.
    """

    index: int
    device: str
    device_id: int | str
    node_id: str
    pid: int
    state: str
    gpu: str = ""
    gpu_uuid: str = ""
    gpu_index: str = ""


@dataclass(frozen=True)
class ReplicaStats(ReplicaInfo):
    """One replica, and what it did.

    Attributes:
        calls: Forwards it ran.
        rows: Rows of the batches that it ran.
        forward_seconds: Time in calls of forward, copies and taking up state included;
            ``phases.forward`` is the module's own.
        backward_seconds: The same of backward.
        bytes_in: Bytes of tensors that went to it, state included.
        bytes_out: Bytes of tensors that came from it.
        deaths: How often its process ended before its time.
        replays: Chunks that it was given to run again, because a replica had died.
        respawns: How often a process was started to replace it.
        phases: Where its time went.
        state_sent: Bytes of parameters and buffers that were sent to it.
        state_skipped: Bytes of them that were not sent because the replica had them already.
        chunk_rows: Rows of its last chunk.
        memory: Bytes of its GPU's memory that are allocated, 0 on a CPU.
        memory_peak: The most that were.
        memory_total: All there are.
        recent_ms: Milliseconds of forward and backward that one of its last calls took, their
            median.
        recent_rows: Rows of those calls, their median.
        recent_copies_ms: Milliseconds of taking up state and of copying that one of them took,
            their median.
    """

    calls: int = 0
    rows: int = 0
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    bytes_in: int = 0
    bytes_out: int = 0
    deaths: int = 0
    replays: int = 0
    respawns: int = 0
    phases: PhaseSeconds = PhaseSeconds()
    state_sent: int = 0
    state_skipped: int = 0
    chunk_rows: int = 0
    memory: int = 0
    memory_peak: int = 0
    memory_total: int = 0
    recent_ms: float = 0.0
    recent_rows: float = 0.0
    recent_copies_ms: float = 0.0


NO_FAULTS = {
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
"""Counts of a replica that are no faults; its other counts are."""


@dataclass(frozen=True)
class ExecutorStats:
    """What an executor did so far. Prints as a table.

    Attributes:
        replicas: One entry per replica.
        link: The link that carries bytes.
        forwards: Forward calls.
        backwards: Trips back.
        state_bytes: Bytes of parameters and buffers that were sent.
        state_sends: Forwards, per replica, that had to send state or structure.
        reruns: Forwards that were run again because contents had changed behind versions.
        replays: Chunks that were run again, for a result or for a graph, because their replica had
            died.
        respawns: Replicas that were started to replace others that had died.
        lost_ms: Milliseconds from deaths that a call noticed until it had all its answers.
        name: The executor's name in Ray's dashboard and in metrics.
        models: The modules that were run, by the names that metrics use.
        seconds: Time since the first replica started.
        quiet: Time since the last call ended.
        driver: Where the driver's time went.
        changes: Why more than new contents was sent: what changed, and how often.
        advice: What limits this workload.
        steps_behind: How many steps of its `DataParallel.optimizer` a model's master is behind.
    """

    replicas: tuple[ReplicaStats, ...]
    link: str
    forwards: int
    backwards: int
    state_bytes: int
    state_sends: int
    reruns: int
    replays: int = 0
    respawns: int = 0
    lost_ms: float = 0.0
    name: str = ""
    models: tuple[str, ...] = ()
    seconds: float = 0.0
    quiet: float = 0.0
    driver: DriverSeconds = DriverSeconds()
    changes: tuple[tuple[str, int], ...] = ()
    advice: tuple[Advice, ...] = ()
    steps_behind: int = 0

    @property
    def deaths(self) -> int:
        """How often a replica ended before its time."""
        return sum(replica.deaths for replica in self.replicas)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        return "\n".join([*table(self._cells()), self._summary()])

    def _repr_html_(self) -> str:
        """The same in a notebook, with the advice."""
        head, *rows = [[html.escape(cell) for cell in row] for row in self._cells()]
        body = "".join(
            "<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows
        )
        lines = "".join(
            f"<p>{html.escape(line)}</p>" for line in (self._summary(), *map(str, self.advice))
        )
        return (
            f"<table><tr>{''.join(f'<th>{cell}</th>' for cell in head)}</tr>{body}</table>{lines}"
        )

    def _cells(self) -> list[list[str]]:
        """The head of the table, and a row for each replica."""
        empty = {
            name
            for name, field in _EXTRA.items()
            if not any(getattr(replica, field) for replica in self.replicas)
        }
        columns = [(name, show) for name, show in COLUMNS if name not in empty]
        rows = [[show(replica) for _, show in columns] for replica in self.replicas]
        return [[name for name, _ in columns], *rows]

    def _summary(self) -> str:
        """What concerns all replicas, in one line."""
        found = f"link {self.link}, {self.state_bytes / 1e6:.1f} MB of state sent"
        if self.deaths:
            found += (
                f"; {self.deaths} deaths, {self.replays} chunks run again, "
                f"{self.respawns} replicas replaced, {self.lost_ms:.0f} ms lost"
            )
        return found


def printable(text: str) -> str:
    """A text without control characters: names in it may come from other programs."""
    return "".join(
        character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text
    )


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table with columns as wide as they must be."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]


def asked_for(device_id: int | str) -> str:
    """An entry of ``device_ids`` as torch would write it; its process may see the device under
    another number.
    """
    return "cpu" if device_id == "cpu" else f"cuda:{device_id}"


def device_of(replica: ReplicaInfo) -> str:
    """The device that a user asked for, and the process's own name of it if that differs."""
    same = replica.device_id == replica.device
    return str(replica.device_id) if same else f"{replica.device_id} ({replica.device})"


_EXTRA = {
    "peak MB": "memory_peak",
    "deaths": "deaths",
    "replays": "replays",
    "respawns": "respawns",
}
"""Columns that are shown only if some replica has a value, with their fields."""

COLUMNS: tuple[tuple[str, Any], ...] = (
    ("replica", lambda r: str(r.index)),
    ("device", device_of),
    ("node", lambda r: r.node_id[:8]),
    ("pid", lambda r: str(r.pid)),
    ("state", lambda r: r.state),
    ("calls", lambda r: str(r.calls)),
    ("rows", lambda r: str(r.rows)),
    ("forward s", lambda r: f"{r.phases.forward:.3f}"),
    ("backward s", lambda r: f"{r.phases.backward:.3f}"),
    ("copies s", lambda r: f"{r.phases.copies:.3f}"),
    ("wait s", lambda r: f"{r.phases.wait:.3f}"),
    ("idle s", lambda r: f"{r.phases.idle:.3f}"),
    ("MB in", lambda r: f"{r.bytes_in / 1e6:.1f}"),
    ("MB out", lambda r: f"{r.bytes_out / 1e6:.1f}"),
    ("peak MB", lambda r: f"{r.memory_peak / 1e6:.1f}"),
    *(
        (name, lambda r, name=name: str(getattr(r, name)))
        for name in ("deaths", "replays", "respawns")
    ),
)
"""What the table of statistics shows of each replica."""


@dataclass
class Tally:
    """The counters of one replica."""

    calls: int = 0
    rows: int = 0
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    bytes_in: int = 0
    bytes_out: int = 0
    deaths: int = 0
    replays: int = 0
    respawns: int = 0

    def stats(self, info: ReplicaInfo, **more: Any) -> ReplicaStats:
        """The frozen statistics of the replica."""
        return ReplicaStats(**asdict(info), **{**asdict(self), **more})


@dataclass
class Totals:
    """The counters of an executor."""

    forwards: int = 0
    backwards: int = 0
    state_bytes: int = 0
    state_sends: int = 0
    reruns: int = 0
    replays: int = 0
    respawns: int = 0
    lost_ms: float = 0.0

    def stats(self, replicas: tuple[ReplicaStats, ...], link: str, **more: Any) -> ExecutorStats:
        """The frozen statistics of the executor, with those of its replicas."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        return ExecutorStats(replicas, link, **{**plain, **more})
