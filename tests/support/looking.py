"""What tests of pictures and tables share: the entry of an executor with two replicas, one of them
slow.
"""

from __future__ import annotations

import json
import time
from typing import Any

from raydp_parallel.monitoring.accounts import CallSpan, ChunkSpan
from raydp_parallel.monitoring.advice import advise
from raydp_parallel.monitoring.reporter import Report, ReportedMoment
from raydp_parallel.monitoring.stats import DriverSeconds, ExecutorStats, PhaseSeconds, ReplicaStats
from raydp_parallel.monitoring.status import DriverStatus, entry

STEP = 0.1
"""Seconds of a step."""


def replica(index: int, work: float, **fields: Any) -> ReplicaStats:
    """A replica that has run a hundred steps."""
    phases = PhaseSeconds(0.1, 0.2, work * 40, work * 60, 0.3, 10 - 100 * work - 1.6, 0.5, 0.5)
    counted: dict[str, Any] = {
        "calls": 100,
        "rows": 3200,
        "bytes_in": 3_000_000,
        "bytes_out": 1_500_000,
        "chunk_rows": 32,
        "recent_ms": work * 1e3,
        "recent_rows": 32.0,
        "state_sent": 2_000_000,
        "state_skipped": 1_000_000,
        "phases": phases,
    }
    known = ("a1b2c3d4e5f6", 4711 + index, "ready")
    return ReplicaStats(
        index, "cuda:0", index, *known, "H200 <SXM>", "uuid", str(index), **{**counted, **fields}
    )


def calls(count: int = 8) -> list[CallSpan]:
    """Steps: a forward, a backward, a reduction."""
    found = []
    for number in range(1, count + 1):
        start = 1000.0 + number * STEP
        for method, at in (("forward", start), ("backward", start + 0.04)):
            chunks = tuple(
                ChunkSpan(
                    i,
                    at + 0.001,
                    (at + 0.002, at + 0.003, at + 0.005, at + 0.015 * (i + 1), at + 0.032),
                )
                for i in range(2)
            )
            found.append(CallSpan(method, number, "Net-1", at, at + 0.002, at + 0.035, chunks))
        found.append(CallSpan("reduce", number, "", start + 0.076, start + 0.076, start + 0.08, ()))
    return found


def report(*replicas: ReplicaStats, last: bool = False, **fields: Any) -> Report:
    """A report of an executor after ten seconds."""
    found = replicas or (replica(0, 0.02), replica(1, 0.06))
    stats = ExecutorStats(
        found,
        "auto",
        100,
        100,
        4_000_000,
        2,
        0,
        name="train",
        models=("Net-1",),
        seconds=10.0,
        driver=DriverSeconds(1, 0.5, 7, 0.5, 1),
    )
    object.__setattr__(stats, "advice", advise(stats))
    now = time.time()
    history = [
        ReportedMoment(now - 10 + i, (320 * i, 320 * i), (0.2 * i, 0.6 * i)) for i in range(10)
    ]
    usual: dict[str, Any] = {"history": history, "traced": calls()}
    usual["events"] = [(now - 3, "replica 1 died: SIGKILL")]
    return Report(stats, (), calls(), **{**usual, **fields}, last=last)


def posted(found: Report | None = None) -> dict[str, Any]:
    """The entry of a report, after its way through JSON."""
    plain: dict[str, Any] = json.loads(
        json.dumps(entry(found or report(), DriverStatus("host", 99, "01000000")))
    )
    return plain
