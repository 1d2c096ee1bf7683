"""Tells others how an executor is doing, once per second, from a thread of its own: steps never
wait for it.
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
from raydp_parallel.monitoring.accounts import Account
from raydp_parallel.monitoring.phases import CallSpan
from raydp_parallel.monitoring.stats import ExecutorStats

log = logging.getLogger("raydp_parallel")

_FAREWELL = 2.0
"""Seconds that the end of the program waits for the last reports of all executors."""

EVERY = 1.0
"""Seconds between two reports."""

_KEPT = 300
"""Moments that are kept, for pictures."""


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
        calls: The last calls as they happened.
        events: What does not happen with every call: seconds since the epoch, and the text.
        history: The last minutes.
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
    """Takes reports somewhere."""

    def take(self, report: Report) -> None:
        """Take a report. The last one is said to be."""


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
        self._leaves = False
        self._telling = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="raydp-reporter", daemon=True)
        _running.add(self)
        self._thread.start()

    def close(self) -> None:
        """Report a last time. May be called twice."""
        if not self._stop.is_set():
            self._stop.set()
            _running.discard(self)
            self._tell(True)

    def leave(self) -> None:
        """Let the thread report a last time, at the end of the program; `wait` waits for that."""
        self._leaves = True
        self._stop.set()

    def wait(self, seconds: float) -> None:
        """Wait for the end of the thread."""
        self._thread.join(seconds)

    def _run(self) -> None:
        while not self._stop.wait(EVERY):
            if not self._tell(False):
                return
        if self._leaves:
            self._tell(True)

    def _tell(self, last: bool) -> bool:
        with self._telling:
            if self._stop.is_set() and not last:
                return False
            report = self._seen(last)
            gone = report is None
            report = (
                self._last._replace(last=True, traced=())
                if report is None and self._last is not None
                else report
            )
            if report is None:
                return False
            self._last = report
            replicas = report.stats.replicas
            work = tuple(r.phases.work for r in replicas)
            self._history.append(ReportedMoment(time.time(), tuple(r.rows for r in replicas), work))
            for sink in [*self._sinks]:
                self._hand_over(sink, report)
            return not gone

    def _seen(self, last: bool) -> Report | None:
        try:
            return self._look([*self._history], last)
        except Exception as error:
            log.warning("no more reports: %s: %s", type(error).__name__, error)
            return None

    def _hand_over(self, sink: Any, report: Report) -> None:
        try:
            sink.take(report)
        except Exception as error:
            # Whatever is wrong with it, nobody's training ends over a picture of it.
            self._sinks.remove(sink)
            log.warning(
                "%s takes no more reports: %s: %s", type(sink).__name__, type(error).__name__, error
            )


_running: weakref.WeakSet[Reporter] = weakref.WeakSet()
forks.call_in_child(_running.clear)


@atexit.register
def _close_all() -> None:
    """A last report, unless it takes long: where the cluster's head is gone, Ray would wait for it
    for a minute.
    """
    leaving, until = [*_running], time.monotonic() + _FAREWELL
    for reporter in leaving:
        reporter.leave()
    for reporter in leaving:
        reporter.wait(max(0.0, until - time.monotonic()))
