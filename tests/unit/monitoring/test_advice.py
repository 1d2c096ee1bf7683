"""Advice: each of it comes when its numbers say so, and not otherwise."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from raydp_parallel.monitoring.advice import SlowGpu, advise, straggler
from raydp_parallel.monitoring.stats import DriverSeconds, ExecutorStats, PhaseSeconds, ReplicaStats

BUSY = PhaseSeconds(forward=30, backward=60, wait=5, idle=5)


def replica(index: int, **fields: Any) -> ReplicaStats:
    """A replica that works most of the time."""
    usual: dict[str, Any] = {
        "calls": 100,
        "rows": 3200,
        "phases": BUSY,
        "recent_ms": 90.0,
        "recent_rows": 32.0,
    }
    return ReplicaStats(
        index, "cpu", index, "a1b2c3d4e5", 4711 + index, "ready", **{**usual, **fields}
    )


def stats(*replicas: ReplicaStats, **fields: Any) -> ExecutorStats:
    """An executor that has run for a while."""
    usual = ExecutorStats(
        replicas, "auto", 100, 100, 0, 0, 0, seconds=100.0, driver=DriverSeconds(outside=5)
    )
    return replace(usual, **fields)


def topics(found: ExecutorStats) -> list[str]:
    """What the advice is about."""
    return [advice.topic for advice in advise(found)]


def test_nothing_stands_out() -> None:
    assert topics(stats(replica(0), replica(1))) == ["balanced"]
    assert "90%" in str(advise(stats(replica(0)))[0])


def test_a_slow_gpu_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """After some seconds with the same one; CPUs, which other programs slow down, are not."""
    gpus = [replica(i, gpu="G", recent_ms=30.0 + 60.0 * (i == 1)) for i in range(3)]
    cpus = [replica(i, recent_ms=30.0 + 60.0 * (i == 1)) for i in range(3)]
    other = [replica(i, gpu="G", recent_ms=30.0 + 60.0 * (i == 2)) for i in range(3)]
    watch, calm = SlowGpu(), SlowGpu()
    for found in (cpus, gpus, gpus, gpus, gpus, other, gpus, gpus, gpus, gpus):
        watch.take(SimpleNamespace(stats=stats(*found)))
    calm.take(SimpleNamespace(stats=stats(*gpus, forwards=1)))
    assert not caplog.records
    for _ in range(3):
        watch.take(SimpleNamespace(stats=stats(*gpus)))
    (said,) = caplog.records
    assert said.getMessage().startswith(
        "There is an imbalance between your GPUs. replica 1 on cuda:1 (node"
    )
    assert "3.0 times the others' time" in said.getMessage()


def test_too_early_to_say() -> None:
    assert advise(stats(replica(0), forwards=2)) == ()
    assert advise(stats()) == ()


@pytest.mark.parametrize("count", [2, 3, 8])
def test_a_straggler_is_named(count: int) -> None:
    others = [replica(i) for i in range(count - 1)]
    slow = replica(count - 1, recent_ms=270.0)
    found = advise(stats(*others, slow))[0]
    assert (found.topic, found.replica) == ("straggler", count - 1)
    assert f"replica {count - 1} on cuda:{count - 1}" in found.text
    assert "3.0 times" in found.text
    assert found.numbers["ratio"] == pytest.approx(3.0)


def test_a_larger_chunk_makes_no_straggler() -> None:
    """Time for a row is what counts: the last chunk of a batch may be smaller."""
    assert straggler((replica(0), replica(1, recent_ms=180.0, recent_rows=64.0))) is None


def test_a_short_last_chunk_makes_no_straggler() -> None:
    """It takes more time for each row, because every call costs something; but it is done first."""
    short = replica(2, recent_ms=60.0, recent_rows=16.0)
    assert straggler((replica(0), replica(1), short)) is None
    found = straggler((replica(0), replica(1, recent_ms=180.0), short))
    assert found is not None and found.index == 1


def test_what_is_said_of_a_straggler_is_of_its_last_calls() -> None:
    """Not of the time when another one was slow, or when all waited for imports."""
    waited = replica(0, phases=replace(BUSY, wait=500))
    (advice,) = advise(stats(waited, replica(1, recent_ms=270.0)))
    assert "they wait 180.0 ms for it each time" in advice.text and "500" not in advice.text


def test_noise_makes_no_straggler() -> None:
    assert straggler((replica(0, recent_ms=0.10), replica(1, recent_ms=0.15))) is None
    assert straggler((replica(0),)) is None


def test_driver_bound() -> None:
    idle = PhaseSeconds(forward=10, backward=20, wait=5, reduce=25, idle=40)
    (found,) = advise(stats(replica(0, phases=idle), driver=DriverSeconds(outside=40, prepare=3)))
    assert found.topic == "driver"
    assert "40%" in found.text and "25%" in found.text and "40.0 s outside" in found.text


def test_a_pause_after_the_last_call_is_nobodys_fault() -> None:
    paused = replica(0, phases=replace(BUSY, idle=1005))
    assert topics(stats(paused)) == ["driver"]
    assert topics(stats(paused, quiet=1000.0)) == ["balanced"]


def test_small_chunks() -> None:
    phases = PhaseSeconds(forward=0.02, backward=0.03, wait=0.2, idle=0.05)
    (found,) = advise(
        stats(replica(0, phases=phases, rows=400), replica(1, phases=phases, rows=400))
    )
    assert found.topic == "small chunks"
    assert (
        "of 4 rows" in found.text
        and "0.50 ms of work" in found.text
        and "2.00 ms on the way" in found.text
    )


def test_bound_by_copies() -> None:
    phases = PhaseSeconds(adopt=10, copy_in=30, forward=10, backward=10, copy_out=30, wait=10)
    (advice,) = advise(stats(replica(0, phases=phases, recent_copies_ms=300.0)))
    assert advice.topic == "copies"
    assert "spent 300.0 ms copying and taking up state, and 90.0 ms working" in advice.text


def test_imports_in_the_first_call_are_no_copies() -> None:
    """The replica imports the model's code where it takes the model up: seconds, once."""
    phases = PhaseSeconds(adopt=7, copy_in=0.1, forward=1, backward=1, copy_out=0.1, wait=1)
    assert topics(stats(replica(0, phases=phases, recent_copies_ms=2.0))) == ["balanced"]


def test_state_that_is_sent_again_and_again_is_named() -> None:
    found = stats(
        replica(0),
        changes=(("encoder.step", 99), ("head.seen", 2)),
        state_bytes=5_000_000,
        state_sends=100,
    )
    (advice,) = advise(found)
    assert "because encoder.step changed: 99 times in 100 forwards" in advice.text


def test_forwards_that_are_run_twice() -> None:
    assert topics(stats(replica(0), reruns=50)) == ["state"]


def test_deaths_come_first() -> None:
    slow = replica(1, recent_ms=900.0, deaths=2)
    assert topics(stats(replica(0), slow)) == ["faults", "straggler"]


def test_memory_that_is_nearly_full() -> None:
    full = replica(0, memory_peak=95, memory_total=100)
    assert topics(stats(full)) == ["memory"]
