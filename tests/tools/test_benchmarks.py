"""The benchmarks run; what they measure is not asserted, for a test machine is as fast as it is."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from benchmarks import measure, summary
from benchmarks.measure import Effort

pytestmark = [pytest.mark.ray, pytest.mark.long]


@pytest.mark.parametrize("name", summary.NAMES)
def test_a_benchmark_runs_and_is_kept(name: str, tmp_path: Path) -> None:
    """One round of each, and a page of it."""
    report = importlib.import_module(f"benchmarks.{name}").run(Effort.SMOKE)
    measure.keep(report, Effort.SMOKE, tmp_path)
    page = summary.write(tmp_path)[0].read_text(encoding="utf-8")
    assert report.question in page
    assert all(table.title in page for table in report.tables)
