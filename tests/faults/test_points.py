"""Every point: samples of what tests/support/points.py tries; run as a command, it tries all."""

from __future__ import annotations

import pytest
from harness import printed, raised

POINTS = "tests/support/points.py"
MACHINES = "deaths", "calls", "lines"


@pytest.mark.parametrize("machine", ["deaths", "lines"])
def test_some_points(machine: str) -> None:
    """Always the same ones."""
    assert ", 0 wrong" in printed(POINTS, machine, "--only", "clip/replicas/2", "--sample", "12")


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("machine", MACHINES)
def test_many_points(machine: str) -> None:
    """With three replicas, too."""
    few = "20" if machine == "calls" else "60"  # it waits a second for many of them
    assert ", 0 wrong" in printed(POINTS, machine, "--sample", few)


@pytest.mark.long
@pytest.mark.parametrize(
    ("machine", "program"),
    [("deaths", "clip/replicas/2"), ("calls", "plain/driver/2"), ("lines", "plain/driver/2")],
)
def test_a_planted_defect_is_found(machine: str, program: str) -> None:
    """The machines see what they are for: see what each of them plants."""
    said = raised(
        lambda: printed(POINTS, machine, "--only", program, "--sample", "60", "--planted")
    )
    assert "WRONG" in str(said), said
