"""The metrics, of what `stats` counts, and how they grow. Nothing here uses Ray.

Seconds are counters, not histograms: a ratio of two counters is exact, whatever the time between
two readings.
"""

from __future__ import annotations

from collections.abc import Iterator

from raydp_parallel.monitoring.stats import ExecutorStats, Record, ReplicaStats, counters

INFO = "raydp_replica_info", "1 while the replica is there"
"""A name and its description. Ray writes ``ray_`` before it, and ``_total`` behind a counter's."""


def process_labels(replica: ReplicaStats, executor: str) -> dict[str, str]:
    """Return the labels of a replica's process."""
    return {**_labels(replica, executor), "gpu": replica.gpu, "pid": str(replica.pid)}


def _labels(replica: ReplicaStats, executor: str) -> dict[str, str]:
    own = {"replica": str(replica.index), "device": replica.device, "node": replica.node}
    return {"executor": executor, **own}


Increment = tuple[str, str, dict[str, str], float]
"""A metric's name, description and labels, and how much to add."""


def increments(new: ExecutorStats) -> Iterator[Increment]:
    """Yield what to add for new work."""
    yield from _of(new, {"executor": new.name})
    for replica in new.replicas:
        yield from _of(replica, _labels(replica, new.name))


def _of(record: Record, common: dict[str, str]) -> Iterator[Increment]:
    for counter, metric in counters(record).items():
        if metric:
            name, about, labels = metric
            yield name, about, {**common, **labels}, getattr(record, counter)


def summary(replica: ReplicaStats) -> str:
    """Describe the recent work of a replica, as the name of a short task in Ray's dashboard. Ray
    labels metrics with each task's name, and never removes them: so numbers are rounded, the rate
    to two digits, and there is no time.
    """
    models = ", ".join(replica.models) or "a module"
    rate, busy = float(f"{replica.rate:.2g}"), round(10 * replica.shares[0]) * 10
    text = f"replica {replica.index}, {models}: {rate:,.12g} samples per second, {busy} % busy"
    return text.replace(" ", "\xa0")  # else the dashboard shows each word on a line of its own
