"""A training run seen in a real Ray dashboard, by a real Prometheus, and in a browser; see
dashboard_script.py.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import browser
import pytest

pytestmark = pytest.mark.long
TESTS = Path(__file__).parents[2]
HERE = TESTS / "support"
needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="prometheus is not installed"
)
needs_browser = pytest.mark.skipif(
    bool(browser.missing()), reason=f"not installed: {browser.missing()}"
)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where screenshots go; set KEEP_SCREENSHOTS to keep them with the documents."""
    kept = os.environ.get("KEEP_SCREENSHOTS")
    return TESTS.parent / "docs" / "images" if kept else tmp_path_factory.mktemp("pictures")


@pytest.fixture(scope="module")
def seen(pictures: Path) -> str:
    """What the script found."""
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    env["PYTHONPATH"] = os.pathsep.join(
        map(str, (HERE, TESTS.parent, TESTS / "unit" / "transport"))
    )
    command = [sys.executable, str(HERE / "dashboard_script.py"), str(pictures)]
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_phases_add_up_to_the_wall_time(seen: str) -> None:
    """For each replica, between two looks at its statistics."""
    shares = [
        float(share)
        for share in re.findall(
            r"phases add up to ([\d.]+) of the wall "
            r"time",
            seen,
        )
    ]
    assert len(shares) == 2
    assert all(abs(share - 1) < 0.05 for share in shares), seen


@needs_prometheus
def test_prometheus_has_the_exact_number_of_samples(seen: str) -> None:
    assert "samples: 9600 of 9600 exact" in seen


@needs_prometheus
def test_every_panels_query_returns_data(seen: str) -> None:
    """But those about GPUs as Ray sees them, which are asked all the same."""
    found = re.findall(r"panel (.+): (\d+) series( \(GPU\))?", seen)
    assert len(found) >= 15
    assert not [title for title, count, gpu in found if not int(count) and not gpu], seen


@needs_prometheus
def test_prometheus_has_all_of_the_time(seen: str) -> None:
    """Also of an executor that has ended: its last report is not lost."""
    share = re.search(r"phases in Prometheus at the end: ([\d.]+) of the wall time", seen)
    assert share and abs(float(share[1]) - 1) < 0.05, seen


def test_a_straggler_is_named_by_all_who_are_asked(seen: str) -> None:
    """Within ten seconds: by statistics, advice, status, and the dashboard's query."""
    said = dict(re.findall(r"(\w+) after ([\d.]+) s", seen))
    assert {"stats", "advice", "status"} <= set(said), seen
    assert shutil.which("prometheus") is None or "query" in said, seen
    assert all(float(seconds) < 10 for seconds in said.values())


def test_tasks_and_timeline_read_well(seen: str) -> None:
    """Within ten seconds tasks say what each replica does, and how fast; housekeeping is not among
    them.
    """
    assert "tasks: 2 replicas say what they do, others []" in seen
    assert "work in the timeline: True" in seen


def test_each_phase_is_a_task_where_that_is_asked(seen: str) -> None:
    """Named by phase and chunk; the timeline has what is inside of them, and what the
    driver does.
    """
    assert "phases as tasks: True" in seen
    assert "phases in the timeline: True" in seen


@needs_browser
def test_the_dashboard_shows_devices_names_and_phases(seen: str, pictures: Path) -> None:
    assert "the Actors page shows both replicas by name and device" in seen
    assert "the actor's page shows its work; no housekeeping" in seen
    assert all(
        (pictures / f"{name}.png").stat().st_size > 5000
        for name in ("actors", "actor", "report-light")
    )


def test_nothing_is_left_behind(seen: str) -> None:
    """The entry that `raydp-parallel status` reads goes with the executor."""
    assert "entries left: 0" in seen
