"""The thread that makes a report of an executor once per second and gives it to the sinks. Steps
never wait for it.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from raydp_parallel.devices import forks
from raydp_parallel.monitoring.accounts import Account, CallSpan
from raydp_parallel.monitoring.stats import ExecutorStats

log = logging.getLogger("raydp_parallel")

_FAREWELL = 2.0
"""Seconds that a close, and the end of the program, wait for last reports."""

EVERY = 1.0
"""Seconds between two reports."""

_KEPT = 300
"""Moments that are kept for the graphs of the HTML report."""


class ReportedMoment(NamedTuple):
    """How far an executor was at one moment.

    Attributes:
        time: Seconds since the epoch.
        rows: For each replica its rows so far.
        work: For each replica its seconds of forward and backward so far.
    """

    time: float
    rows: tuple[int, ...]
    work: tuple[float, ...]


class Report(NamedTuple):
    """How an executor is doing.

    Attributes:
        stats: Its statistics.
        accounts: What each replica did for each model: the replica's number, the model's name, the
            account.
        calls: The last calls, with the times of their phases.
        events: Deaths, starts and other rare events: seconds since the epoch, and the text.
        history: The moments of the last minutes.
        traced: Calls since the last report, if a trace is written.
        last: Whether the executor ends.
    """

    stats: ExecutorStats
    accounts: Sequence[tuple[int, str, Account]]
    calls: Sequence[CallSpan]
    events: Sequence[tuple[float, str]]
    history: Sequence[ReportedMoment]
    traced: Sequence[CallSpan]
    last: bool


class Sink(Protocol):
    """Receives reports."""

    def take(self, report: Report) -> None:
        """Process a report; the last one has ``last``."""


class Reporter:
    """The thread.

    Args:
        look: Makes a report, given the history and whether it is the last; None once there is
            nothing to report on.
        sinks: Where reports go.
    """

    def __init__(
        self, look: Callable[[Sequence[ReportedMoment], bool], Report | None], sinks: Sequence[Sink]
    ) -> None:
        self._look = look
        self._sinks = [*sinks]
        self._history: deque[ReportedMoment] = deque(maxlen=_KEPT)
        self._last: Report | None = None
        self._stop = threading.Event()
        self._final: Report | None = None
        self._leaves = False
        self._guard = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="raydp-reporter", daemon=True)
        _running.add(self)
        self._thread.start()

    def close(self) -> None:
        """Report a last time. May be called twice.

        The thread tells the sinks, and is waited for only so long: a sink may ask a cluster that
        does not answer.
        """
        if not self._stop.is_set():
            _running.discard(self)
            self._final = self._report(True)
            self.leave()
            self.wait(_FAREWELL)

    def leave(self) -> None:
        """Let the thread report a last time, at the end of the program; `wait` waits for that."""
        self._leaves = True
        self._stop.set()

    def wait(self, seconds: float) -> None:
        """Wait for the end of the thread."""
        if self._thread is not threading.current_thread():
            self._thread.join(seconds)

    def _run(self) -> None:
        while not self._stop.wait(EVERY):
            report = self._report(False)
            if report is None or self._stop.is_set():
                break
            self._tell(report)
            if report.last:
                return
        if self._leaves:
            final = self._final or self._report(True)
            if final is not None:
                self._tell(final)

    def _report(self, last: bool) -> Report | None:
        """Make a report. Where there is nothing more to report on, it is the report before, marked
        as the last one.
        """
        with self._guard:
            history = [*self._history]
        report = self._seen(history, last)
        with self._guard:
            if report is None:
                gone = self._last
                return gone._replace(last=True, traced=()) if gone is not None else None
            self._last = report
            replicas = report.stats.replicas
            work = tuple(r.phases.work for r in replicas)
            self._history.append(ReportedMoment(time.time(), tuple(r.rows for r in replicas), work))
            return report

    def _tell(self, report: Report) -> None:
        for sink in [*self._sinks]:
            self._hand_over(sink, report)

    def _seen(self, history: Sequence[ReportedMoment], last: bool) -> Report | None:
        try:
            return self._look(history, last)
        except Exception as error:
            log.warning("no more reports: %s: %s", type(error).__name__, error)
            return None

    def _hand_over(self, sink: Any, report: Report) -> None:
        try:
            sink.take(report)
        except Exception as error:
            # A report that fails must not end the training.
            self._sinks.remove(sink)
            log.warning(
                "%s takes no more reports: %s: %s", type(sink).__name__, type(error).__name__, error
            )


_running: weakref.WeakSet[Reporter] = weakref.WeakSet()
forks.call_in_child(_running.clear)


@atexit.register
def _close_all() -> None:
    """Make a last report of each executor, for `_FAREWELL` seconds at most: after the loss of the
    cluster's head Ray would wait a minute.
    """
    leaving, until = [*_running], time.monotonic() + _FAREWELL
    for reporter in leaving:
        reporter.leave()
    for reporter in leaving:
        reporter.wait(max(0.0, until - time.monotonic()))
