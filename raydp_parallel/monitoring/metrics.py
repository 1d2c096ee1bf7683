"""The metrics: their names, kinds and labels, and how a report is turned into their values. Nothing
here uses Ray.

Seconds are counters, not histograms: a ratio of two counters is exact, whatever the time between
two readings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from enum import Enum
from typing import NamedTuple

from raydp_parallel.monitoring.accounts import Account
from raydp_parallel.monitoring.reporter import Report
from raydp_parallel.monitoring.stats import NO_FAULTS, ReplicaInfo, ReplicaStats, asked_for

LABELS = ("executor", "model", "replica", "device", "node", "gpu_uuid")
"""The labels that every metric has. ``model`` is empty where a number belongs to none."""


class MetricKind(Enum):
    """How the value of a metric changes."""

    COUNTER = "only grows"
    GAUGE = "goes up and down"


class Measure(NamedTuple):
    """One metric.

    Attributes:
        name: Its name; Ray writes ``ray_`` before it, and ``_total`` behind a counter's.
        kind: How its value changes.
        description: What it is.
        labels: Labels besides `LABELS`.
    """

    name: str
    kind: MetricKind
    description: str
    labels: tuple[str, ...] = ()


SAMPLES = Measure("raydp_samples", MetricKind.COUNTER, "Rows of the batches that were run")
CALLS = Measure("raydp_calls", MetricKind.COUNTER, "Calls of the replica", ("method",))
SECONDS = Measure(
    "raydp_phase_seconds", MetricKind.COUNTER, "What the replica's time went to", ("phase",)
)
BYTES = Measure(
    "raydp_bytes", MetricKind.COUNTER, "Bytes of tensors on the way", ("link", "direction")
)
STATE = Measure(
    "raydp_state_bytes", MetricKind.COUNTER, "State that was sent, or was there already", ("kind",)
)
CHUNK = Measure("raydp_chunk_rows", MetricKind.GAUGE, "Rows of the last chunk")
MEMORY = Measure(
    "raydp_gpu_memory_bytes", MetricKind.GAUGE, "The replica's memory on its GPU", ("kind",)
)
FAULTS = Measure(
    "raydp_faults", MetricKind.COUNTER, "Deaths of replicas, and what followed", ("kind",)
)
RECENT = Measure(
    "raydp_recent_row_seconds",
    MetricKind.GAUGE,
    "Forward and backward of a row, on average of the last calls",
)
LOST = Measure(
    "raydp_lost_seconds",
    MetricKind.COUNTER,
    "From deaths that a call noticed until it had all its answers",
)
DRIVER = Measure(
    "raydp_driver_seconds", MetricKind.COUNTER, "What the driver's time went to", ("phase",)
)
INFO = Measure(
    "raydp_replica_info",
    MetricKind.GAUGE,
    "1 while the replica is there",
    ("gpu", "pid", "ip", "GpuIndex"),
)

MEASURES = (
    SAMPLES,
    CALLS,
    SECONDS,
    BYTES,
    STATE,
    CHUNK,
    MEMORY,
    FAULTS,
    LOST,
    RECENT,
    DRIVER,
    INFO,
)

_SECONDS = ("adopt", "copy in", "forward", "backward", "copy out", "wait")
FAULT_KINDS = tuple(
    f.name for f in fields(ReplicaStats) if f.type == "int" and f.name not in NO_FAULTS
)
"""The counters of a replica that count faults: all that `ReplicaStats` has."""

Reading = tuple[Measure, dict[str, str], float]

_MOVES = ("node", "gpu_uuid")
"""Labels that change when a replica is replaced on another node or GPU. What it did before stays
under the old labels.
"""


class News:
    """What is new in each report: what to add to a counter, and a gauge's value.

    A counter's sum over all labels is exact, also after a replica was replaced on another node or
    GPU. A gauge with the labels of a process that was replaced is set to 0.

    Args:
        addresses: The address of each node, by Ray's id of it.
    """

    def __init__(self, addresses: Mapping[str, str]) -> None:
        self._addresses = addresses
        self._then: dict[tuple[str, tuple[str, ...]], tuple[Reading, float]] = {}

    def of(self, report: Report) -> Iterator[Reading]:
        """The readings that changed since the last report."""
        before, self._then = self._then, {}
        for measure, labels, value in readings(report, self._addresses):
            counts = measure.kind is MetricKind.COUNTER
            fixed = [v for name, v in labels.items() if not (counts and name in _MOVES)]
            key = measure.name, tuple(fixed)
            _, then = before.pop(key, (None, None))
            if counts and then is not None and value < then:
                # time entered as waiting was work: the old value stands until the sum exceeds it
                value = then
            self._then[key] = (measure, labels, value), value
            if value != then:
                yield measure, labels, value - (then or 0.0) if counts else value
        for (measure, labels, _), then in before.values():
            if measure.kind is MetricKind.GAUGE and then:
                yield measure, labels, 0.0


def readings(report: Report, addresses: Mapping[str, str]) -> Iterator[Reading]:
    """Every metric of a report, with its labels and its value so far.

    Args:
        report: The report.
        addresses: The address of each node, by Ray's id of it.
    """
    stats = report.stats
    replicas = {replica.index: replica for replica in stats.replicas}
    for index, model, account in report.accounts:
        if index in replicas:
            yield from _of_model(account, labels_of(replicas[index], stats.name, model))
    for replica in stats.replicas:
        yield from _of_replica(replica, labels_of(replica, stats.name, ""), addresses, report.last)
    shared = {**dict.fromkeys(LABELS, ""), "executor": stats.name}
    yield LOST, shared, stats.lost_ms / 1e3
    for phase in fields(stats.driver):
        yield DRIVER, {**shared, "phase": phase.name}, getattr(stats.driver, phase.name)


def labels_of(replica: ReplicaInfo, executor: str, model: str) -> dict[str, str]:
    """The labels that every metric of a replica has."""
    return {
        "executor": executor,
        "model": model,
        "replica": str(replica.index),
        "device": asked_for(replica.device_id),
        "node": replica.node_id,
        "gpu_uuid": replica.gpu_uuid,
    }


def _of_model(account: Account, labels: dict[str, str]) -> Iterator[Reading]:
    yield SAMPLES, labels, account.rows
    yield CALLS, {**labels, "method": "forward"}, account.forwards
    yield CALLS, {**labels, "method": "backward"}, account.backwards
    for phase, value in zip(_SECONDS, account.seconds, strict=True):
        yield SECONDS, {**labels, "phase": phase}, value
    for (link, direction), size in [*account.traffic.items()]:
        yield BYTES, {**labels, "link": link, "direction": direction}, size
    yield STATE, {**labels, "kind": "sent"}, account.state_sent
    yield STATE, {**labels, "kind": "skipped"}, account.state_skipped
    yield CHUNK, labels, account.chunk_rows


def _of_replica(
    replica: ReplicaStats, labels: dict[str, str], addresses: Mapping[str, str], last: bool
) -> Iterator[Reading]:
    yield SECONDS, {**labels, "phase": "reduce"}, replica.phases.reduce
    yield SECONDS, {**labels, "phase": "idle"}, replica.phases.idle
    yield MEMORY, {**labels, "kind": "allocated"}, replica.memory
    yield MEMORY, {**labels, "kind": "peak"}, replica.memory_peak
    for kind in FAULT_KINDS:
        yield FAULTS, {**labels, "kind": kind}, getattr(replica, kind)
    yield RECENT, labels, replica.recent_ms / 1e3 / max(1.0, replica.recent_rows)
    there = {
        "gpu": replica.gpu,
        "pid": str(replica.pid),
        "ip": addresses.get(replica.node_id, ""),
        "GpuIndex": replica.gpu_index,
    }
    yield INFO, {**labels, **there}, float(replica.state == "ready" and not last)
