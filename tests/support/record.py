"""A record of how each test ended, kept while the suite runs: it is there when the run was ended
halfway, and a second run with the same record runs what has not passed.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest


class Record:
    """Writes a line when a test begins, and one when it has ended.

    Where several processes run tests, one that runs none writes for all of them, and tells each
    which tests to leave out: also one that takes the place of a process that ended.

    Args:
        path: The file, which may hold the lines of earlier runs.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._outcomes: dict[str, str] = {}
        self._done = _done(path.read_text().splitlines() if path.exists() else [])

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """A process that runs tests is about to start."""
        node.workerinput["done"] = [*self._done]

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Leave out the tests that are done."""
        leave_out(self._done, config, items)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A test begins."""
        self._outcomes[nodeid] = "passed"
        self._write("begun", nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """One of its three parts has ended."""
        before = self._outcomes.get(report.nodeid, "passed")
        if report.failed or (report.skipped and before == "passed"):
            late = report.skipped and _LATE in str(report.longrepr)
            self._outcomes[report.nodeid] = "late" if late else report.outcome

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """A test has ended."""
        self._write(self._outcomes.pop(nodeid), nodeid)

    def _write(self, outcome: str, name: str) -> None:
        with self._path.open("a") as file:
            file.write(f"{outcome} {name}\n")


def _done(lines: Collection[str]) -> set[str]:
    """The tests that need not run again: those that passed or were skipped in earlier runs, also
    for want of time if they had not failed before.
    """
    failed: Counter[str] = Counter()
    ended: dict[str, str] = {}
    for line in lines:
        outcome, _, name = line.partition(" ")
        failed[name] += {"begun": 1, "failed": 0}.get(outcome, -1)
        if outcome not in ("begun", "failed"):
            ended[name] = outcome
    return {name for name, outcome in ended.items() if outcome != "late" or failed[name] == 0}


_LATE = "its time was over"


class Deadline:
    """Skips the tests that would begin after a moment. The record has them as ``late``.

    Args:
        until: The moment, in seconds since 1970.
    """

    def __init__(self, until: float) -> None:
        self._until = until

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """A test is about to begin."""
        if time.time() > self._until:
            pytest.skip(f"{item.nodeid}: {_LATE}")


class Told:
    """Leaves out tests in a process for which another one keeps the record.

    Args:
        done: The tests.
    """

    def __init__(self, done: Collection[str]) -> None:
        self._done = {*done}

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Leave them out."""
        leave_out(self._done, config, items)


def leave_out(done: Collection[str], config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests by their names."""
    left = [item for item in items if item.nodeid in done]
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item.nodeid not in done]


def record_of(config: pytest.Config, path: Path) -> Record | Told:
    """What leaves out, and perhaps records, tests in this process."""
    told = getattr(config, "workerinput", None)
    return Record(path) if told is None else Told(told["done"])
