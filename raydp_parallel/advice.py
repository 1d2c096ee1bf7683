"""What limits a workload, in plain words, each with the numbers behind it. Read off frozen statistics alone."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from raydp_parallel.monitor import Advice, ExecutorStats, ReplicaStats, asked_for

_CALLS = 5
"""Calls before anything is said: the first ones start processes and carry all the weights."""

STRAGGLER = 1.25
"""How many times the others' time a replica takes for its work before it is called a straggler."""

_SECONDS = 5
"""Reports in a row that name the same GPU before it is warned of."""

log = logging.getLogger("raydp_parallel")

_NOTICEABLE = 0.2
"""Milliseconds of a call below which a difference is noise."""


def advise(stats: ExecutorStats) -> tuple[Advice, ...]:
    """The advice for an executor, the weightiest first."""
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
    paced = {replica.index: pace(replica) for replica in replicas if replica.recent_ms}
    if len(paced) < 2:
        return None
    slow = max((r for r in replicas if r.index in paced), key=lambda r: paced[r.index])
    others = statistics.median(p for index, p in paced.items() if index != slow.index)
    rows = max(1.0, slow.recent_rows)
    late = (paced[slow.index] - others) * rows
    return slow if paced[slow.index] >= STRAGGLER * others and late >= _NOTICEABLE else None


def pace(replica: ReplicaStats) -> float:
    """Milliseconds of forward and backward for each row, lately."""
    return replica.recent_ms / max(1.0, replica.recent_rows)


class SlowGpu:
    """Says once, as the constructor does of memory and processors, that a GPU is slower than the others as measured."""

    def __init__(self) -> None:
        self._suspect: int | None = None
        self._times = 0
        self._told = False

    def take(self, report: Any) -> None:
        """Look at a report's statistics; a single slow second is nobody's fault."""
        if self._told or report.stats.forwards < _CALLS:
            return
        gpus = replace(report.stats, replicas=tuple(replica for replica in report.stats.replicas if replica.gpu))
        slow = straggler(gpus.replicas)
        self._times = self._times + 1 if slow is not None and slow.index == self._suspect else 1
        self._suspect = slow.index if slow is not None else None
        if slow is not None and self._times >= _SECONDS:
            self._told = True
            log.warning("There is an imbalance between your GPUs. %s", next(_straggler(gpus)))


def _straggler(stats: ExecutorStats) -> Iterator[Advice]:
    slow = straggler(stats.replicas)
    if slow is None:
        return
    others = statistics.median(pace(r) for r in stats.replicas if r.index != slow.index and r.recent_ms)
    ratio = pace(slow) / others if others else float("inf")
    lost = max(r.phases.wait for r in stats.replicas if r.index != slow.index)
    yield Advice(
        "straggler",
        f"{_who(slow)} (node {slow.node_id[:8]}, pid {slow.pid}) is a straggler: "
        f"{slow.recent_ms:.1f} ms of forward and backward in a call, {ratio:.1f} times the others' time for a row. "
        f"The others have waited for up to {lost:.1f} s. See what else runs on that device, or leave it out",
        {"recent_ms": slow.recent_ms, "ratio": ratio, "others_waited_s": lost},
        slow.index,
    )


def _limits(stats: ExecutorStats) -> Iterator[Advice]:
    """What most of the replicas' time goes to, if it is not their work."""
    # A loop that has ended, or a notebook that waits for its user, is not bound by anything.
    total = sum(r.phases.total - stats.quiet for r in stats.replicas)
    if total <= 0:
        return
    idle, wait, reduce, work, copies = (
        sum(value(r) for r in stats.replicas) / total
        for value in (
            lambda r: r.phases.idle - stats.quiet,
            lambda r: r.phases.wait,
            lambda r: r.phases.reduce,
            lambda r: r.phases.work,
            lambda r: r.phases.copy_in + r.phases.copy_out + r.phases.adopt,
        )
    )
    if idle + reduce > 0.4:
        driver = stats.driver
        yield Advice(
            "driver",
            f"driver-bound: the replicas have no call {idle:.0%} of the time and wait for the sum of gradients "
            f"{reduce:.0%}; they work {work:.0%}. The driver spent {driver.outside:.1f} s outside of calls (your loop: "
            f"loading, loss, optimizer), {driver.prepare:.1f} s preparing them. Load batches ahead, or enlarge them",
            {"idle": idle, "reduce": reduce, "work": work, "outside_s": driver.outside, "prepare_s": driver.prepare},
        )
    calls = sum(r.calls for r in stats.replicas)
    each = 1e3 * sum(r.phases.work for r in stats.replicas) / max(1, calls)
    around = 1e3 * sum(r.phases.wait for r in stats.replicas) / max(1, calls)
    rows = sum(r.rows for r in stats.replicas) / max(1, calls)
    if wait > work and each < 20 and straggler(stats.replicas) is None:
        yield Advice(
            "small chunks",
            f"chunks too small: of {rows:.0f} rows, they take {each:.2f} ms of work, and {around:.2f} ms on the way or "
            "waiting for each other. Larger batches, or fewer replicas",
            {"rows": rows, "work_ms": each, "way_ms": around},
        )
    if copies > work and copies > 0.2:
        yield Advice(
            "copies",
            f"bound by copies: {copies:.0%} of the replicas' time goes to copying and taking up state, {work:.0%} to "
            f"work. Over the link {stats.link!r} went {_mb(stats, 'bytes_in')} in and {_mb(stats, 'bytes_out')} out",
            {"copies": copies, "work": work},
        )


def _state(stats: ExecutorStats) -> Iterator[Advice]:
    for what, times in stats.changes[:3]:
        if times > _CALLS and times * 2 > stats.forwards:
            size = stats.state_bytes / max(1, stats.state_sends)
            yield Advice(
                "state",
                f"state is sent again with most calls because {what} changed: {times} times in {stats.forwards} "
                f"forwards, {size / 1e6:.1f} MB each. Keep what changes outside of the module, or pass it as an input",
                {"times": times, "forwards": stats.forwards, "bytes": size},
            )


def _reruns(stats: ExecutorStats) -> Iterator[Advice]:
    if stats.reruns * 10 > stats.forwards:
        yield Advice(
            "state",
            f"{stats.reruns} of {stats.forwards} forwards were run twice, because weights were written to through "
            "`.data` or a NumPy alias, which moves no version. Write under torch.no_grad() instead",
            {"reruns": stats.reruns, "forwards": stats.forwards},
        )


def _faults(stats: ExecutorStats) -> Iterator[Advice]:
    for replica in stats.replicas:
        if replica.deaths:
            yield Advice(
                "faults",
                f"{_who(replica)} (node {replica.node_id[:8]}) died {replica.deaths} "
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
                f"{_who(replica)} has used {share:.0%} of its GPU's memory: a larger batch may not fit",
                {"share": share},
                replica.index,
            )


def _balanced(stats: ExecutorStats) -> Advice:
    total = sum(r.phases.total - stats.quiet for r in stats.replicas)
    work = sum(r.phases.work for r in stats.replicas) / total if total > 0 else 0.0
    return Advice("balanced", f"nothing stands out: the replicas work {work:.0%} of the time", {"work": work})


def _who(replica: ReplicaStats) -> str:
    return f"replica {replica.index} on {asked_for(replica.device_id)}"


def _mb(stats: ExecutorStats, field: str) -> str:
    return f"{sum(getattr(replica, field) for replica in stats.replicas) / 1e6:.1f} MB"
