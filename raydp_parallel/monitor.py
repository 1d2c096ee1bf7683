"""What was done, as frozen statistics. The executor tells; nobody is asked."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True)
class ReplicaInfo:
    """One replica.

    Attributes:
        index: Its number in the executor.
        device: The device as its process sees it; ``gpu`` names the hardware.
        device_id: The entry of ``device_ids`` that it serves.
        node_id: Ray's id of its node.
        pid: Its process, 0 before it started.
        state: ``"ready"``, ``"dead"``, ``"closed"``, or ``"empty"`` before it started.
        gpu: Name of its GPU, empty on a CPU.
        gpu_uuid: The GPU's uuid, empty on a CPU.
    """

    index: int
    device: str
    device_id: int | str
    node_id: str
    pid: int
    state: str
    gpu: str = ""
    gpu_uuid: str = ""


@dataclass(frozen=True)
class ReplicaStats(ReplicaInfo):
    """One replica, and what it did.

    Attributes:
        calls: Forwards it ran.
        rows: Rows of the batches that it ran.
        forward_seconds: Time in forwards, as it measured them.
        backward_seconds: Time in backwards.
        bytes_in: Bytes of tensors that went to it, state included.
        bytes_out: Bytes of tensors that came from it.
        deaths: How often its process ended before its time.
    """

    calls: int = 0
    rows: int = 0
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    bytes_in: int = 0
    bytes_out: int = 0
    deaths: int = 0


@dataclass(frozen=True)
class ExecutorStats:
    """What an executor did so far. Prints as a table.

    Attributes:
        replicas: One entry per replica.
        link: What bytes travel by.
        forwards: Forward calls.
        backwards: Trips back.
        state_bytes: Bytes of parameters and buffers that were sent.
        state_sends: Forwards, per replica, that had to send state or structure.
        reruns: Forwards that were run again because contents had changed behind versions.
        replays: Chunks that were run again because their replica had died.
        respawns: Replicas that were started in the place of others that had died.
        lost_ms: Milliseconds from deaths that a call noticed until it had all its answers.
    """

    replicas: tuple[ReplicaStats, ...]
    link: str
    forwards: int
    backwards: int
    state_bytes: int
    state_sends: int
    reruns: int
    replays: int
    respawns: int
    lost_ms: float

    @property
    def deaths(self) -> int:
        """How often a replica ended before its time."""
        return sum(replica.deaths for replica in self.replicas)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        names = (
            "replica",
            "device",
            "node",
            "pid",
            "state",
            "calls",
            "rows",
            "forward s",
            "backward s",
            "MB in",
            "MB out",
        )
        rows = [names, *(_row(replica) for replica in self.replicas)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        lines.append(f"link {self.link}, {self.state_bytes / 1e6:.1f} MB of state sent")
        if self.deaths:
            lines[-1] += (
                f"; {self.deaths} deaths, {self.replays} chunks run again, {self.respawns} replicas replaced, "
                f"{self.lost_ms:.0f} ms lost"
            )
        return "\n".join(lines)


def _row(replica: ReplicaStats) -> tuple[str, ...]:
    return (
        str(replica.index),
        str(replica.device_id) if replica.device_id == replica.device else f"{replica.device_id} ({replica.device})",
        replica.node_id[:8],
        str(replica.pid),
        replica.state,
        str(replica.calls),
        str(replica.rows),
        f"{replica.forward_seconds:.3f}",
        f"{replica.backward_seconds:.3f}",
        f"{replica.bytes_in / 1e6:.1f}",
        f"{replica.bytes_out / 1e6:.1f}",
    )


@dataclass
class Tally:
    """The counters of one replica, while they count."""

    calls: int = 0
    rows: int = 0
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    bytes_in: int = 0
    bytes_out: int = 0
    deaths: int = 0

    def stats(self, info: ReplicaInfo) -> ReplicaStats:
        """Frozen, with whose they are."""
        return ReplicaStats(**asdict(info), **asdict(self))


@dataclass
class Totals:
    """The counters of an executor, while they count."""

    forwards: int = 0
    backwards: int = 0
    state_bytes: int = 0
    state_sends: int = 0
    reruns: int = 0
    replays: int = 0
    respawns: int = 0
    lost_ms: float = 0.0

    def stats(self, replicas: tuple[ReplicaStats, ...], link: str) -> ExecutorStats:
        """Frozen, with the replicas'."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        return ExecutorStats(replicas, link, **plain)
