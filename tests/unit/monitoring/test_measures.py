"""Metrics as they are told: each sum exact, whatever becomes of the replica that a number belongs
to.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from looking import replica, report

from raydp_parallel.monitoring.accounts import Account
from raydp_parallel.monitoring.metrics import FAULTS, INFO, MEMORY, SAMPLES, MetricKind, News


class Heard:
    """Adds up what it is told, as Ray does."""

    def __init__(self) -> None:
        self._news = News({})
        self.values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}

    def hear(self, **fields: Any) -> None:
        """A report with one replica."""
        who, rows, last = fields.pop("who"), fields.pop("rows"), fields.pop("last", False)
        found = report(who, last=last)._replace(accounts=[(0, "Net-1", Account(rows=rows))])
        for measure, labels, value in self._news.of(found):
            key = measure.name, tuple(sorted(labels.items()))
            self.values[key] = value + (
                self.values.get(key, 0.0) if measure.kind is MetricKind.COUNTER else 0.0
            )

    def series(self, name: str, **labels: str) -> list[float]:
        """The values of a metric with some labels."""
        return [
            v
            for (n, own), v in self.values.items()
            if n == name and labels.items() <= dict(own).items()
        ]


def test_a_replica_that_comes_back_elsewhere_counts_on() -> None:
    """On another GPU: its rows are not counted twice, and what it did stays with the GPU that it
    did it on.
    """
    heard, who = Heard(), replica(0, 0.02)
    heard.hear(who=who, rows=100)
    heard.hear(who=replace(who, gpu_uuid="other", deaths=1, respawns=1), rows=130)
    assert sum(heard.series(SAMPLES.name)) == 130
    assert heard.series(SAMPLES.name, gpu_uuid="uuid") == [100]
    assert heard.series(SAMPLES.name, gpu_uuid="other") == [30]
    assert sum(heard.series(FAULTS.name, kind="deaths")) == 1


def test_a_process_that_was_replaced_is_not_there() -> None:
    """Also when its successor came between two reports; and after the last report none is."""
    heard, who = Heard(), replace(replica(0, 0.02), memory=7)
    heard.hear(who=who, rows=1)
    heard.hear(who=replace(who, pid=99, gpu_uuid="other"), rows=1)
    assert heard.series(INFO.name, pid=str(who.pid)) == [0]
    assert heard.series(INFO.name, pid="99") == [1]
    assert heard.series(MEMORY.name, gpu_uuid="uuid", kind="allocated") == [0]
    heard.hear(who=replace(who, pid=99, gpu_uuid="other"), rows=1, last=True)
    assert heard.series(INFO.name) == [0, 0]
