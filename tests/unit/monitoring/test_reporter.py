"""The thread that tells others: regularly, a last time at the end, and never to anybody's harm."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from looking import report

from raydp_parallel.monitoring import reporter
from raydp_parallel.monitoring.reporter import Report, ReportedMoment, Reporter


class Listener:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.heard: list[Report] = []
        self.twice = threading.Event()

    def take(self, found: Report) -> None:
        """Hear a report."""
        self.heard.append(found)
        if len(self.heard) == 2:
            self.twice.set()


class Broken:
    """Cannot take anything."""

    def take(self, found: Report) -> None:
        """Fail."""
        raise OSError("disk full")


def look(history: Sequence[ReportedMoment], last: bool) -> Report:
    """A report with the history it was given."""
    return report(history=history, last=last)


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a test need not wait a second."""
    monkeypatch.setattr(reporter, "EVERY", 0.01)


def test_it_tells_again_and_again_and_a_last_time() -> None:
    listener = Listener()
    told = Reporter(look, [listener])
    assert listener.twice.wait(10)
    told.close()
    told.close()
    assert [found.last for found in listener.heard].count(True) == 1
    assert listener.heard[-1].last
    assert len(listener.heard[-1].history) == len(listener.heard) - 1


def test_it_ends_with_whom_it_reports_on() -> None:
    asked: list[Any] = []

    def gone(history: Sequence[ReportedMoment], last: bool) -> None:
        asked.append(last)

    told = Reporter(gone, [])
    told._thread.join(10)
    assert not told._thread.is_alive()
    assert asked == [False]


def test_who_is_gone_without_a_word_is_reported_on_a_last_time() -> None:
    """So that an executor that was dropped and never closed leaves no entry."""
    listener = Listener()

    def soon_gone(history: Sequence[ReportedMoment], last: bool) -> Report | None:
        return look(history, last) if len(listener.heard) < 2 else None

    told = Reporter(soon_gone, [listener])
    told._thread.join(10)
    assert not told._thread.is_alive()
    assert [found.last for found in listener.heard] == [False, False, True]


def test_a_sink_that_fails_is_left_out_and_the_others_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    listener = Listener()
    told = Reporter(look, [Broken(), listener])
    assert listener.twice.wait(10)
    told.close()
    assert caplog.text.count("Broken takes no more reports: OSError: disk full") == 1


class Stuck:
    """A sink that stands still, as where a cluster does not answer."""

    def __init__(self) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()

    def take(self, report: Report) -> None:
        self.reached.set()
        self.go_on.wait(60)


@pytest.mark.long
def test_a_close_does_not_wait_for_a_sink_that_stands_still() -> None:
    """It goes on while the sink still stands; the last report comes after it."""
    stuck, listener = Stuck(), Listener()
    told = Reporter(look, [stuck, listener])
    assert stuck.reached.wait(10)
    told.close()
    assert told._thread.is_alive() and not listener.heard
    stuck.go_on.set()
    told._thread.join(10)
    assert [found.last for found in listener.heard] == [False, True]


STUCK = """
import threading
from looking import report
from raydp_parallel.monitoring.reporter import Reporter

class Stuck:
    def take(self, report):
        print("the last one" if report.last else "", flush=True)
        if report.last:
            threading.Event().wait()

told = Reporter(lambda history, last: report(history=history, last=last), [Stuck()])
"""


@pytest.mark.long
def test_a_program_ends_though_its_last_report_does_not_get_through() -> None:
    """Where the cluster's head is gone, Ray waits for it for a minute, and then ends the process
    with status 1.
    """
    here = Path(__file__).parents[2] / "support"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here), str(here.parents[1])])}
    done = subprocess.run(
        [sys.executable, "-c", STUCK],
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0 and done.stdout.split("\n").count("the last one") == 1, (
        done.stdout + done.stderr
    )
