"""The metrics: their names and labels, and how they grow. Nothing here uses Ray.

Seconds are counters, not histograms: a ratio of two counters is exact, whatever the time between
two readings.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from raydp_parallel.monitoring.stats import DEATHS, ExecutorStats, ReplicaStats

_EXECUTOR = ("executor",)
_REPLICA = ("executor", "replica", "device", "node")


class Metric(NamedTuple):
    """One metric. Ray writes ``ray_`` before its name, and ``_total`` behind a counter's."""

    name: str
    description: str
    tags: tuple[str, ...]


SAMPLES = Metric("raydp_samples", "Rows of the batches that were run", _REPLICA)
CALLS = Metric("raydp_calls", "Forwards of the replica", _REPLICA)
SECONDS = Metric("raydp_phase_seconds", "Time busy, and waiting for a call", (*_REPLICA, "phase"))
BYTES = Metric("raydp_bytes", "Bytes to and from the replica", (*_REPLICA, "direction"))
FAULTS = Metric("raydp_faults", "Deaths, and what followed", (*_REPLICA, "kind"))
PASSES = Metric("raydp_passes", "Forwards and backwards of all", (*_EXECUTOR, "method"))
STATE = Metric("raydp_state_bytes", "Bytes of parameters and buffers that were sent", _EXECUTOR)
SENDS = Metric("raydp_state_sends", "Forwards that had to send state", _EXECUTOR)
RERUNS = Metric("raydp_reruns", "Forwards that ran again after hidden changes", _EXECUTOR)
INFO = Metric("raydp_replica_info", "1 while the replica is there", (*_REPLICA, "gpu", "pid"))

COUNTERS = (SAMPLES, CALLS, SECONDS, BYTES, FAULTS, PASSES, STATE, SENDS, RERUNS)


def tags_of(replica: ReplicaStats, executor: str) -> dict[str, str]:
    """Return the tags of all metrics of a replica."""
    return {
        "executor": executor,
        "replica": str(replica.index),
        "device": replica.device,
        "node": replica.node,
    }


def increments(new: ExecutorStats) -> Iterator[tuple[Metric, dict[str, str], float]]:
    """Yield what to add to each counter for new work."""
    for replica in new.replicas:
        tags = tags_of(replica, new.name)
        yield SAMPLES, tags, replica.rows
        yield CALLS, tags, replica.calls
        yield SECONDS, {**tags, "phase": "busy"}, replica.busy
        yield SECONDS, {**tags, "phase": "waiting"}, replica.waiting
        yield BYTES, {**tags, "direction": "in"}, replica.bytes_in
        yield BYTES, {**tags, "direction": "out"}, replica.bytes_out
        for kind in DEATHS:
            yield FAULTS, {**tags, "kind": kind}, getattr(replica, kind)
    shared = {"executor": new.name}
    yield PASSES, {**shared, "method": "forward"}, new.forwards
    yield PASSES, {**shared, "method": "backward"}, new.backwards
    yield STATE, shared, new.state_bytes
    yield SENDS, shared, new.state_sends
    yield RERUNS, shared, new.reruns


def summary(replica: ReplicaStats) -> str:
    """Describe the work of a replica since its last short task, which has this name in Ray's
    dashboard. Ray labels metrics with each task's name, and never removes them: so numbers are
    rounded, the rate to two digits.
    """
    models = ", ".join(replica.models) or "a module"
    rate, busy = float(f"{replica.rate:.2g}"), round(10 * replica.shares[0]) * 10
    speed = f"{rate:,.0f}" if rate >= 10 else f"{rate:g}"
    return f"replica {replica.index}, {models}: {speed} samples per second, {busy} % busy"
