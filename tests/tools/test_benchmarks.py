"""The benchmarks run; what they measure is not asserted, for a test machine is as fast as it is."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path

import pytest
from torch import nn

from benchmarks import gpu_host, journey, measure, summary, training_step
from benchmarks.measure import Asked, Effort, Report, Table
from raydp_parallel.check import nets

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.long]

SLOW_TO_START = ("Accelerate", "Ray Train")
"""Their own start takes longer than all the rest; a full run has them."""


@pytest.mark.parametrize("name", [name for name in summary.NAMES if name != "training_step"])
def test_a_benchmark_runs_and_is_kept(name: str, tmp_path: Path) -> None:
    """One round of each, and a page and a picture of it."""
    report = importlib.import_module(f"benchmarks.{name}").run(Effort.SMOKE)
    kept_and_shown(report, tmp_path)


def test_peers_train_to_the_same_weights(tmp_path: Path) -> None:
    """One round of the smallest net: DDP, ours, one process, a naive Ray driver. The benchmark
    compares checksums.
    """
    names = [name for name in training_step.PEERS if name not in SLOW_TO_START]
    report = training_step.run(Effort.SMOKE, names)
    (table,) = report.tables
    assert [row[0] for row in table.rows] == names
    kept_and_shown(report, tmp_path)


@pytest.mark.parametrize("way", gpu_host.WAYS)
def test_the_host_s_part_of_a_step_on_a_gpu(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Both sides work, and a replica that shares the GPU's memory asks for little: however many
    tensors there are.
    """
    monkeypatch.setitem(gpu_host.NETS, "small", (nets.residual, 1.0))
    found = gpu_host.measure("small", way, 1, 3)
    assert found.driver > 0 and found.replica > 0
    assert min(found.asked) > 0
    if way == "ipc":
        several = functools.partial(_several, 4)
        monkeypatch.setitem(gpu_host.NETS, "larger", (several, 1.0))
        large = gpu_host.measure("larger", way, 1, 3)
        assert large.waits == found.waits
        assert large.waits == (0, 2)
        assert max(large.asked) <= max(found.asked) + 4


def _several(count: int) -> nn.Module:
    return nn.Sequential(*[nets.residual() for _ in range(count)])


def test_the_journey_passes_through_driver_and_replica() -> None:
    """Each side's own functions are among those that are entered, and none of the other side's."""
    driver, replica = journey.record()
    assert ("data_parallel.py", "DataParallel.forward") in driver and (
        "replica/replica.py",
        "Replica._forward",
    ) not in driver
    assert ("replica/replica.py", "Replica._forward") in replica and (
        "data_parallel.py",
        "DataParallel.forward",
    ) not in replica
    files, functions, calls, changes = journey.counts(driver)
    assert 1 < files < functions < calls and 0 < changes < calls


def test_different_weights_are_an_error() -> None:
    """A peer that trains something else would be compared for nothing."""
    found = {
        "DDP gloo": training_step.Weights(1.0, "a"),
        "raydp_parallel": training_step.Weights(1.1, "b"),
    }
    with pytest.raises(RuntimeError, match=r"different weights at the end.*1\.1"):
        training_step.check("some net", found)


def test_a_ratio_over_its_limit_is_not_met(tmp_path: Path) -> None:
    """And the summary says so."""
    asked = [Asked("this to that", 1.3, 1.2), Asked("that to this", 0.8, 1.2)]
    report = Report("scaling", "What?", [Table("numbers", ["", "ms"], [["one", 2.0]])], asked, {})
    measure.keep(report, Effort.QUICK, tmp_path)
    page = summary.markdown(summary.load(tmp_path), plotted=False)
    assert "| this to that | 1.3 | 1.2 | **no** |" in page
    assert "| that to this | 0.8 | 1.2 | yes |" in page
    assert "1 of 2 as asked" in page


def kept_and_shown(report: Report, folder: Path) -> None:
    """A report's way to the page and the picture."""
    measure.keep(report, Effort.SMOKE, folder)
    written = summary.write(folder)
    assert all(file.stat().st_size > 200 for file in written)
    page = written[0].read_text(encoding="utf-8")
    assert report.question in page
    assert all(table.title in page for table in report.tables)
