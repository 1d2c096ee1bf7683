"""What limits a workload: sentences with the numbers behind them, made from frozen statistics
alone.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from raydp_parallel.monitoring.stats import Advice, ExecutorStats, ReplicaStats, asked_for

_CALLS = 5
"""Calls before any advice is given: the first ones start processes and carry all the weights."""

STRAGGLER = 1.25
"""A replica that takes this many times the others' time for its work is called a straggler."""

_SECONDS = 5
"""Reports in a row that name the same GPU before the warning."""

log = logging.getLogger("raydp_parallel")

_NOTICEABLE = 0.2
"""Milliseconds of a call below which a difference is noise."""


def advise(stats: ExecutorStats) -> tuple[Advice, ...]:
    """The advice for an executor, the most important first."""
    if not stats.replicas or stats.forwards < _CALLS:
        return ()
    found = [
        *_faults(stats),
        *_straggler(stats),
        *_state(stats),
        *_reruns(stats),
        *_memory(stats),
        *_limits(stats),
    ]
    return tuple(found) or (_balanced(stats),)


def straggler(replicas: tuple[ReplicaStats, ...]) -> ReplicaStats | None:
    """The replica that all others wait for, None if they are about as fast as each other."""
    paced = [replica for replica in replicas if replica.recent_ms]
    if len(paced) < 2:
        return None
    # A short last chunk takes more time for each row, because every call has a fixed cost, but no
    # other replica waits for it: so the time of the whole call decides, too.
    slow = [replica for replica in paced if _ratio(replica, paced) >= STRAGGLER]
    slowest = max(slow, key=lambda replica: replica.recent_ms, default=None)
    if slowest is None or _lead(slowest, paced) < _NOTICEABLE:
        return None
    return slowest


def _ratio(replica: ReplicaStats, paced: Sequence[ReplicaStats]) -> float:
    """How many times the others' time a replica took for a row, in its last calls."""
    others = statistics.median(pace(other) for other in paced if other is not replica)
    return pace(replica) / others


def _lead(replica: ReplicaStats, paced: Sequence[ReplicaStats]) -> float:
    """Milliseconds by which the others were done before a replica, in its last calls."""
    return replica.recent_ms - statistics.median(
        other.recent_ms for other in paced if other is not replica
    )


def pace(replica: ReplicaStats) -> float:
    """Milliseconds of forward and backward for each row, in the last calls."""
    return replica.recent_ms / max(1.0, replica.recent_rows)


class SlowGpu:
    """Warns once of a GPU that is slower than the others as measured, as the constructor warns of
    one with less memory or fewer processors.
    """

    def __init__(self) -> None:
        self._suspect: int | None = None
        self._times = 0
        self._told = False

    def take(self, report: Any) -> None:
        """Look at a report's statistics; a single slow second is no reason to warn."""
        if self._told or report.stats.forwards < _CALLS:
            return
        on_gpus = tuple(replica for replica in report.stats.replicas if replica.gpu)
        gpus = replace(report.stats, replicas=on_gpus)
        slow = straggler(gpus.replicas)
        if slow is None:
            self._suspect = None
            return
        self._times = self._times + 1 if slow.index == self._suspect else 1
        self._suspect = slow.index
        if self._times >= _SECONDS:
            self._told = True
            log.warning("There is an imbalance between your GPUs. %s", next(_straggler(gpus)))


def _straggler(stats: ExecutorStats) -> Iterator[Advice]:
    slow = straggler(stats.replicas)
    if slow is None:
        return
    paced = [replica for replica in stats.replicas if replica.recent_ms]
    ratio, waited = _ratio(slow, paced), _lead(slow, paced)
    yield Advice(
        "straggler",
        f"{_name(slow)} (node {slow.node_id[:8]}, pid {slow.pid}) is a straggler: "
        f"{slow.recent_ms:.1f} ms of forward and backward in each of its last calls, "
        f"{ratio:.1f} times the others' time for a row; they wait {waited:.1f} ms for it "
        "each time. See what else runs there, or leave it out",
        {"recent_ms": slow.recent_ms, "ratio": ratio, "others_wait_ms": waited},
        slow.index,
    )


def _limits(stats: ExecutorStats) -> Iterator[Advice]:
    """What takes most of the replicas' time, if it is not their work."""
    # A loop that has ended, or a notebook that waits for its user, is not bound by anything.
    total = sum(r.phases.total - stats.quiet for r in stats.replicas)
    if total <= 0:
        return
    idle = sum(r.phases.idle - stats.quiet for r in stats.replicas) / total
    wait = sum(r.phases.wait for r in stats.replicas) / total
    reduce = sum(r.phases.reduce for r in stats.replicas) / total
    work = sum(r.phases.work for r in stats.replicas) / total
    copies = sum(r.phases.copies for r in stats.replicas) / total
    if idle + reduce > 0.4:
        driver = stats.driver
        yield Advice(
            "driver",
            f"driver-bound: the replicas have no call {idle:.0%} of the time and wait for "
            f"the sum of gradients {reduce:.0%}; they work {work:.0%}. The driver spent "
            f"{driver.outside:.1f} s outside of calls (your loop: loading, loss, optimizer), "
            f"{driver.prepare:.1f} s preparing them. Load batches ahead, or enlarge them",
            {
                "idle": idle,
                "reduce": reduce,
                "work": work,
                "outside_s": driver.outside,
                "prepare_s": driver.prepare,
            },
        )
    calls = sum(r.calls for r in stats.replicas)
    each = 1e3 * sum(r.phases.work for r in stats.replicas) / max(1, calls)
    around = 1e3 * sum(r.phases.wait for r in stats.replicas) / max(1, calls)
    rows = sum(r.rows for r in stats.replicas) / max(1, calls)
    if wait > work and each < 20 and straggler(stats.replicas) is None:
        yield Advice(
            "small chunks",
            f"chunks too small: of {rows:.0f} rows, they take {each:.2f} ms of work, and "
            f"{around:.2f} ms on the way or waiting for each other. Larger batches, or fewer "
            "replicas",
            {"rows": rows, "work_ms": each, "way_ms": around},
        )
    # Of the last calls: the first ones import the model's code, and carry all of its weights.
    lately = sum(r.recent_copies_ms for r in stats.replicas)
    worked = sum(r.recent_ms for r in stats.replicas)
    if lately > worked and copies > 0.2:
        yield Advice(
            "copies",
            "bound by copies: of each of their last calls the replicas spent "
            f"{lately / len(stats.replicas):.1f} ms copying and taking up state, and "
            f"{worked / len(stats.replicas):.1f} ms working. Over the link {stats.link!r} went "
            f"{_mb(stats, 'bytes_in')} in and {_mb(stats, 'bytes_out')} out",
            {"copies": copies, "work": work, "copies_ms": lately, "work_ms": worked},
        )


def _state(stats: ExecutorStats) -> Iterator[Advice]:
    for what, times in stats.changes[:3]:
        if times > _CALLS and times * 2 > stats.forwards:
            size = stats.state_bytes / max(1, stats.state_sends)
            yield Advice(
                "state",
                f"state is sent again with most calls because {what} changed: {times} times "
                f"in {stats.forwards} forwards, {size / 1e6:.1f} MB each. Keep what changes "
                "outside of the module, or pass it as an input",
                {"times": times, "forwards": stats.forwards, "bytes": size},
            )


def _reruns(stats: ExecutorStats) -> Iterator[Advice]:
    if stats.reruns * 10 > stats.forwards:
        yield Advice(
            "state",
            f"{stats.reruns} of {stats.forwards} forwards were run twice, because weights "
            "were written to through `.data` or a NumPy alias, which moves no version. Write "
            "under torch.no_grad() instead",
            {"reruns": stats.reruns, "forwards": stats.forwards},
        )


def _faults(stats: ExecutorStats) -> Iterator[Advice]:
    for replica in stats.replicas:
        if replica.deaths:
            yield Advice(
                "faults",
                f"{_name(replica)} (node {replica.node_id[:8]}) died {replica.deaths} "
                f"time(s); it is {replica.state} now. The driver's log has the causes",
                {"deaths": replica.deaths},
                replica.index,
            )


def _memory(stats: ExecutorStats) -> Iterator[Advice]:
    for replica in stats.replicas:
        if replica.memory_total and replica.memory_peak > 0.9 * replica.memory_total:
            share = replica.memory_peak / replica.memory_total
            yield Advice(
                "memory",
                f"{_name(replica)} has used {share:.0%} of its GPU's memory: a larger batch "
                "may not fit",
                {"share": share},
                replica.index,
            )


def _balanced(stats: ExecutorStats) -> Advice:
    total = sum(r.phases.total - stats.quiet for r in stats.replicas)
    work = sum(r.phases.work for r in stats.replicas) / total if total > 0 else 0.0
    return Advice(
        "balanced", f"nothing stands out: the replicas work {work:.0%} of the time", {"work": work}
    )


def _name(replica: ReplicaStats) -> str:
    return f"replica {replica.index} on {asked_for(replica.device_id)}"


def _mb(stats: ExecutorStats, field: str) -> str:
    return f"{sum(getattr(replica, field) for replica in stats.replicas) / 1e6:.1f} MB"
