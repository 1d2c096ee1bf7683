"""A record of how each test ended, kept while the suite runs: it is there when the run was ended
halfway, and a second run with the same record runs what has not passed.
"""

from __future__ import annotations

from pathlib import Path

import pytest


class Record:
    """Writes a line when a test begins, and one when it has ended.

    Args:
        path: The file, which may hold the lines of earlier runs.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._outcome = ""

    def done(self) -> set[str]:
        """The tests that have passed, or were skipped, in earlier runs."""
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        found = (line.partition(" ") for line in lines)
        return {name for outcome, _, name in found if outcome in ("passed", "skipped")}

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Leave out what is done."""
        done = self.done()
        left = [item for item in items if item.nodeid in done]
        if left:
            config.hook.pytest_deselected(items=left)
            items[:] = [item for item in items if item.nodeid not in done]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A test begins."""
        self._outcome = "passed"
        self._write("begun", nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """One of its three parts has ended."""
        if report.failed or (report.skipped and self._outcome == "passed"):
            self._outcome = report.outcome

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """A test has ended."""
        self._write(self._outcome, nodeid)

    def _write(self, outcome: str, name: str) -> None:
        with self._path.open("a") as file:
            file.write(f"{outcome} {name}\n")
