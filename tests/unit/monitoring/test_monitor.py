"""Frozen statistics, and the counters they are taken from."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest

from raydp_parallel.monitoring.stats import (
    Advice,
    ExecutorStats,
    PhaseSeconds,
    ReplicaInfo,
    ReplicaStats,
    Tally,
    Totals,
)


def info(index: int = 0, device_id: int | str = "cpu", device: str = "cpu") -> ReplicaInfo:
    """A replica."""
    return ReplicaInfo(index, device, device_id, "a1b2c3d4e5f6", 4711, "ready")


def stats() -> ExecutorStats:
    """An executor with two replicas that did something."""
    first = Tally(
        calls=3,
        rows=48,
        forward_seconds=0.25,
        backward_seconds=0.5,
        bytes_in=3_000_000,
        bytes_out=1_500_000,
    )
    phases = PhaseSeconds(adopt=0.03, copy_in=0.01, forward=0.2, backward=0.4, copy_out=0.02)
    rows = (first.stats(info(), phases=phases), Tally().stats(info(1, 1, "cpu")))
    return Totals(forwards=3, backwards=2, state_bytes=2_500_000, state_sends=1).stats(rows, "auto")


def test_statistics_are_a_snapshot() -> None:
    """Counting on does not change what was taken, nor can anybody else."""
    tally = Tally(calls=1)
    taken = tally.stats(info())
    tally.calls += 1
    assert taken.calls == 1
    assert isinstance(taken, ReplicaStats)
    with pytest.raises(dataclasses.FrozenInstanceError):
        taken.calls = 5  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats().forwards = 5  # type: ignore[misc]


def test_a_replicas_statistics_say_whose_they_are() -> None:
    """Everything of its info, and every counter."""
    taken = Tally(calls=2, deaths=1).stats(info(3))
    for field in dataclasses.fields(ReplicaInfo):
        assert getattr(taken, field.name) == getattr(info(3), field.name)
    assert (taken.calls, taken.deaths) == (2, 1)


def test_plain_values_for_json() -> None:
    """All the way down."""
    plain = json.loads(json.dumps(stats().to_dict()))
    assert plain["replicas"][0]["rows"] == 48
    assert (plain["forwards"], plain["link"]) == (3, "auto")


def test_printed_they_are_a_table() -> None:
    """One line per replica under a head of the same width, and one line about state."""
    head, first, second, last = str(stats()).splitlines()
    assert len(head) == len(first) == len(second)
    assert head.split()[:5] == ["replica", "device", "node", "pid", "state"]
    assert first.split()[:9] == [
        "0",
        "cpu",
        "a1b2c3d4",
        "4711",
        "ready",
        "3",
        "48",
        "0.200",
        "0.400",
    ]
    assert first.split()[9:] == ["0.060", "0.000", "0.000", "3.0", "1.5"]
    assert second.split()[1:3] == ["1", "(cpu)"]
    assert last == "link auto, 2.5 MB of state sent"


def test_in_a_notebook_they_are_a_table() -> None:
    """With the same cells, the summary and the advice, none of which is taken for markup."""
    advice = Advice("state", "state is sent again because <b>x</b> changed", {})
    page = dataclasses.replace(stats(), advice=(advice,))._repr_html_()
    cells = [
        cell for line in str(stats()).splitlines()[:-1] for cell in re.split(r" {2,}", line.strip())
    ]
    assert re.findall(r"<t[hd]>(.*?)</t[hd]>", page) == cells
    assert "<p>link auto, 2.5 MB of state sent</p>" in page
    assert "because &lt;b&gt;x&lt;/b&gt; changed" in page and "<b>" not in page
