"""The trace: what Chrome and Perfetto read, whole at its end and readable before."""

from __future__ import annotations

import json
from pathlib import Path

from looking import calls, report

from raydp_parallel.monitoring.trace import TraceFile, events


def test_each_phase_of_each_chunk_is_a_span_on_its_replicas_row() -> None:
    found = [*events(calls(2))]
    names = {event["name"] for event in found}
    assert {
        "forward #1 chunk 2/2",
        "backward #2 chunk 1/2",
        "copy in #1 chunk 1/2",
        "adopt #2 chunk 2/2",
    } <= names
    assert {"reduce #1", "forward #2 prepare", "forward #2 wait"} <= names
    assert {event["tid"] for event in found} == {0, 1, 2}
    assert all(event["dur"] >= 0 for event in found)
    one = next(event for event in found if event["name"] == "copy in #1 chunk 1/2")
    assert (one["ts"], one["dur"]) == (1000.1e6 + 3000, 2000.0)


def test_the_file_is_json_at_the_end_and_readable_before(tmp_path: Path) -> None:
    """Readers of traces forgive a missing end."""
    file = TraceFile(str(tmp_path / "new"), "train/2")
    file.take(report())
    assert json.loads(file.path.read_text().rstrip(",\n") + "]")
    file.take(report(last=True))
    whole = json.loads(file.path.read_text())
    rows = {event["args"]["name"] for event in whole if event["ph"] == "M"}
    assert rows == {
        "driver",
        "replica 0 on 0 (cuda:0), pid 4711",
        "replica 1 on 1 (cuda:0), pid 4712",
    }


def test_a_trace_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    """After the cluster was left the same executor, in the same process, begins another."""
    one, other = TraceFile(str(tmp_path), "train"), TraceFile(str(tmp_path), "train")
    one.take(report())
    other.take(report())
    assert one.path != other.path
    assert len(one.path.read_text()) == len(other.path.read_text()) > 100
