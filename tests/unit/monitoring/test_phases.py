"""The stopwatch of a call, and the difference between two clocks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydp_parallel.monitoring.accounts import BACKWARD, FORWARD, Clock
from raydp_parallel.replica.replica import Laps


def test_phases_follow_each_other_without_a_gap() -> None:
    laps = Laps(FORWARD)
    for number in range(4):
        laps.begin(number)
    stamps = laps.end()
    assert len(stamps) == 5
    assert list(stamps) == sorted(stamps)


@pytest.mark.parametrize("reached", range(1, 5))
def test_what_an_exception_left_out_took_no_time(reached: int) -> None:
    """The phase that it broke off has the time until the end."""
    laps = Laps(BACKWARD)
    for number in range(reached):
        laps.begin(number)
    stamps = laps.end()
    assert len(stamps) == 5
    assert len(set(stamps[reached:])) == 1


def test_a_phase_that_begins_again_is_still_the_same() -> None:
    """A module that calls itself again, through a checkpoint, does not start another."""
    laps = Laps(FORWARD)
    for number in (0, 1, 2, 2, 1, 3):
        laps.begin(number)
    assert len(laps.end()) == 5


def test_spans_open_and_close_in_order() -> None:
    seen: list[str] = []

    @contextlib.contextmanager
    def span(name: str) -> Iterator[None]:
        seen.append(f"{name} begins")
        yield
        seen.append(f"{name} ends")

    laps = Laps(FORWARD, span)
    for number in range(3):
        laps.begin(number)
    laps.end()
    expected = [
        f"{name} {what}" for name in ("adopt", "copy in", "forward") for what in ("begins", "ends")
    ]
    assert seen == expected


@given(
    st.floats(-1e6, 1e6).filter(lambda x: abs(x) > 1),
    st.lists(
        st.tuples(st.floats(0.001, 0.1), st.floats(0.001, 0.1), st.floats(0.001, 0.1)), min_size=1
    ),
)
def test_another_machines_clock_is_bounded_by_every_call(
    difference: float, calls: list[tuple[float, ...]]
) -> None:
    """The estimate is off by no more than half of the shortest way there and back."""
    clock, now = Clock(), 100.0
    for there, work, back in calls:
        sent, began = now, now + there
        ended = began + work
        now = ended + back
        clock.heard(sent, (began - difference, ended - difference), now)
    slack = min(there for there, _, _ in calls) + min(back for _, _, back in calls)
    assert abs(clock.offset - difference) <= slack / 2 + 1e-6


def test_processes_of_one_machine_have_one_clock() -> None:
    """As long as none at all is possible, there is no difference, however lopsided the ways
    were.
    """
    clock = Clock()
    assert clock.offset == 0.0
    clock.heard(1.0, (1.0001, 1.5), 3.0)
    assert clock.offset == 0.0
