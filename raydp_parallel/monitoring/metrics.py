"""The metrics: their names and labels, and how they grow. Nothing here uses Ray.

Seconds are counters, not histograms: a ratio of two counters is exact, whatever the time between
two readings.
"""

from __future__ import annotations

from collections.abc import Iterator

from raydp_parallel.monitoring.stats import DEATHS, ExecutorStats, ReplicaStats

COUNTERS = {
    "raydp_samples": "Rows of the batches that were run",
    "raydp_calls": "Forwards of the replica",
    "raydp_phase_seconds": "Time busy, and waiting for a call",
    "raydp_bytes": "Bytes to and from the replica",
    "raydp_faults": "Deaths, and what followed",
    "raydp_passes": "Forwards and backwards of all",
    "raydp_state_bytes": "Bytes of parameters and buffers that were sent",
    "raydp_state_sends": "Forwards that had to send state",
    "raydp_reruns": "Forwards that ran again after hidden changes",
}
INFO = "raydp_replica_info", "1 while the replica is there"
"""Names and descriptions. Ray writes ``ray_`` before a name, and ``_total`` behind a counter's."""


def tags_of(replica: ReplicaStats, executor: str) -> dict[str, str]:
    """Return the tags of all metrics of a replica."""
    own = {"replica": str(replica.index), "device": replica.device, "node": replica.node}
    return {"executor": executor, **own}


def increments(new: ExecutorStats) -> Iterator[tuple[str, dict[str, str], float]]:
    """Yield what to add to each counter for new work."""
    for replica in new.replicas:
        tags = tags_of(replica, new.name)
        yield "raydp_samples", tags, replica.rows
        yield "raydp_calls", tags, replica.calls
        yield "raydp_phase_seconds", {**tags, "phase": "busy"}, replica.busy
        yield "raydp_phase_seconds", {**tags, "phase": "waiting"}, replica.waiting
        yield "raydp_bytes", {**tags, "direction": "in"}, replica.bytes_in
        yield "raydp_bytes", {**tags, "direction": "out"}, replica.bytes_out
        for kind in DEATHS:
            yield "raydp_faults", {**tags, "kind": kind}, getattr(replica, kind)
    shared = {"executor": new.name}
    yield "raydp_passes", {**shared, "method": "forward"}, new.forwards
    yield "raydp_passes", {**shared, "method": "backward"}, new.backwards
    for name in ("state_bytes", "state_sends", "reruns"):
        yield f"raydp_{name}", shared, getattr(new, name)


def summary(replica: ReplicaStats) -> str:
    """Describe the work of a replica since its last short task, which has this name in Ray's
    dashboard. Ray labels metrics with each task's name, and never removes them: so numbers are
    rounded, the rate to two digits.
    """
    models = ", ".join(replica.models) or "a module"
    rate, busy = float(f"{replica.rate:.2g}"), round(10 * replica.shares[0]) * 10
    return f"replica {replica.index}, {models}: {rate:,.12g} samples per second, {busy} % busy"
