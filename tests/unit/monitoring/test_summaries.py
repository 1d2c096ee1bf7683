"""What the dashboard says of replicas with direct lines: short tasks, the few names of which tell
how fast each works.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from looking import report

from raydp_parallel.monitoring.stats import PhaseSeconds, ReplicaStats
from raydp_parallel.monitoring.summaries import Summaries, Summary, summarize


def at(rows: int, index: int = 0, **phases: float) -> ReplicaStats:
    """A replica that has come so far."""
    return ReplicaStats(
        index, "cpu", "cpu", "node", 1, "ready", rows=rows, phases=PhaseSeconds(**phases)
    )


class Watched:
    """Summaries, with a clock and a list of the tasks."""

    def __init__(self) -> None:
        self.now = 100.0
        self.tasks: list[tuple[int, str]] = []
        self.summaries = Summaries(
            lambda index, name: self.tasks.append((index, name)), lambda: self.now
        )

    def see(self, *replicas: ReplicaStats, after: float = 3.0, **fields: Any) -> None:
        """Some time later replicas have come so far."""
        self.now += after
        self.summaries.take(report(*replicas, **fields))


def test_numbers_are_round() -> None:
    """Rates are powers of two, shares are tenths."""
    before, after = at(0), at(1500, forward=1.23, backward=1.11, idle=0.2)
    found = summarize(before, after, 3.0)
    assert found == Summary(9, 4, 4, 1)
    assert found.name == "work 512 samples/s, forward 40 %, backward 40 %, idle 10 %"
    assert summarize(after, replace(after, rows=1501), 3.0).name == (
        "work 1 samples/s, forward 0 %, backward 0 %, idle 0 %"
    )
    assert summarize(at(0), at(0, backward=3.1), 3.0).name.startswith(
        "work no samples, forward 0 %, backward 100 %"
    )


def test_each_replica_that_worked_has_a_task_now_and_then() -> None:
    """None while nothing is done, nor with the last report."""
    watched = Watched()
    watched.see(at(0), at(0, 1))
    watched.see(at(96, forward=1.0), at(96, 1, forward=2.0), after=1.0)
    assert not watched.tasks
    watched.see(at(192, forward=2.0), at(192, 1, forward=3.0), after=2.0)
    assert watched.tasks == [
        (0, "work 64 samples/s, forward 70 %, backward 0 %, idle 0 %"),
        (1, "work 64 samples/s, forward 100 %, backward 0 %, idle 0 %"),
    ]
    watched.see(at(192, forward=2.0, idle=3.0), at(300, 1, forward=4.0))
    watched.see(at(999, forward=9.0), last=True)
    assert [index for index, _ in watched.tasks] == [0, 1, 1]


def test_names_are_few() -> None:
    """However many kinds of work there are: then the nearest name is used."""
    watched, done = Watched(), at(0)
    watched.see(done)
    for step in range(2000):
        share = 3.0 * (step % 100) / 100
        phases = done.phases
        rows = done.rows + 3 * 2 ** (step % 17)
        done = at(
            rows, forward=phases.forward + share + 1e-6, backward=phases.backward + 3.0 - share
        )
        watched.see(done)
    assert len(watched.tasks) == 2000
    assert len({name for _, name in watched.tasks}) == 32
