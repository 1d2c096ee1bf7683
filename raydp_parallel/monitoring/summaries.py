"""What each replica did in the last seconds, as the name of a short task in Ray's dashboard.

A call over a direct connection is no Ray task, so the dashboard does not show it. Therefore the
reporter's thread lets each replica with such a connection run an empty task every few seconds,
while there is work, under a name such as ``work 512 samples/s, forward 40 %, backward 40 %, idle 10
%``. The page of the actor, the job's table of tasks and the timeline list it. No call waits for
it, because the task runs in a thread of Ray's own.

[Note: few names]
Ray labels its metrics with each task's name, 11 series each, and never removes them. So numbers
are rounded, replicas with the same numbers share a name, and after `_MOST` names the nearest one is
used.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import NamedTuple

from raydp_parallel.monitoring.reporter import Report
from raydp_parallel.monitoring.stats import ReplicaStats

_EVERY = 3.0
"""Seconds between two tasks of a replica."""

_MOST = 32
"""Names that one executor uses at most."""


class Summary(NamedTuple):
    """What a replica did, in round numbers.

    Attributes:
        samples: The power of two that is nearest to its samples per second; -1 for none.
        forward: Tenths of the time in forward.
        backward: Tenths of the time in backward.
        idle: Tenths of the time in which no call was under way.
    """

    samples: int
    forward: int
    backward: int
    idle: int

    @property
    def name(self) -> str:
        """The name of the task."""
        rate = f"{2**self.samples} samples/s" if self.samples >= 0 else "no samples"
        shares = f"forward {self.forward}0 %, backward {self.backward}0 %, idle {self.idle}0 %"
        return f"work {rate}, {shares}".replace(" 00 %", " 0 %")

    def distance(self, other: Summary) -> int:
        """How far apart two summaries are."""
        return sum(abs(one - two) for one, two in zip(self, other, strict=True))


def summarize(before: ReplicaStats, after: ReplicaStats, seconds: float) -> Summary:
    """What a replica did between two looks at its statistics."""
    rate = (after.rows - before.rows) / seconds
    then, now = before.phases, after.phases
    tenths = [
        min(10, max(0, round(10 * (getattr(now, phase) - getattr(then, phase)) / seconds)))
        for phase in ("forward", "backward", "idle")
    ]
    return Summary(max(0, round(math.log2(rate))) if rate > 0 else -1, *tenths)


class Summaries:
    """Receives reports, and shows in the dashboard what replicas did.

    Args:
        show: Lets the replica of a number run a task with a name.
        clock: The time, in seconds.
    """

    def __init__(
        self, show: Callable[[int, str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._show = show
        self._clock = clock
        self._names: set[Summary] = set()
        self._before: dict[int, tuple[float, ReplicaStats]] = {}

    def take(self, report: Report) -> None:
        """Show what each replica did since its last task."""
        now = self._clock()
        for replica in report.stats.replicas if not report.last else ():
            began, before = self._before.setdefault(replica.index, (now, replica))
            if now - began < _EVERY:
                continue
            self._before[replica.index] = now, replica
            if replica.phases.work > before.phases.work:
                self._show(replica.index, self._few(summarize(before, replica, now - began)).name)

    def _few(self, wanted: Summary) -> Summary:
        """The summary, or the nearest of those used so far if there are `_MOST`."""
        if len(self._names) < _MOST:
            self._names.add(wanted)
        return min(self._names, key=wanted.distance)
