"""Calls as a trace that Chrome (chrome://tracing) and Perfetto draw: driver and replicas, on the
driver's clock.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from raydp_parallel.monitoring.accounts import IN_REPLICA, CallSpan
from raydp_parallel.monitoring.reporter import Report
from raydp_parallel.monitoring.stats import ReplicaInfo, device_of

_DRIVER = 0
"""The row of the driver; replica n has row n + 1."""

_SUFFIX = ".trace.json"


class TraceFile:
    """A trace file that grows with each report. It can be opened at any time: viewers accept a file
    without its end.

    Args:
        folder: Where to write it; made if missing.
        name: The name of the executor.
    """

    def __init__(self, folder: str, name: str) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        self.path = _begin(Path(folder), f"{name.replace('/', '-')}-{os.getpid()}")
        self._named: set[int] = set()

    def beside(self, suffix: str) -> Path:
        """A file of the same name with another ending, which no other executor's trace has."""
        return self.path.with_name(self.path.name.removesuffix(_SUFFIX) + suffix)

    def take(self, report: Report) -> None:
        """Write what is new."""
        replicas = [
            replica for replica in report.stats.replicas if replica.index not in self._named
        ]
        with self.path.open("a", encoding="utf-8") as file:
            if replicas:
                file.writelines(json.dumps(event) + ",\n" for event in names(replicas))
                self._named.update(replica.index for replica in replicas)
            file.writelines(json.dumps(event) + ",\n" for event in events(report.traced))
            if report.last:
                file.write(json.dumps(_row_name(_DRIVER, "driver")) + "\n]\n")


def _begin(folder: Path, name: str) -> Path:
    """Create a new file. The name may be taken: by an executor of an earlier cluster in this
    process, or by a process of the same number on another machine.
    """
    for number in itertools.count(1):
        path = folder / f"{name}{f'~{number}' if number > 1 else ''}{_SUFFIX}"
        with contextlib.suppress(FileExistsError), path.open("x", encoding="utf-8") as file:
            file.write("[\n")
            return path
    raise AssertionError("numbers do not end")


def events(calls: Iterable[CallSpan]) -> Iterator[dict[str, Any]]:
    """The spans of calls."""
    for call in calls:
        about = {"call": call.number, "model": call.model}
        if call.method == "reduce":
            yield _span(
                "reduce", f"reduce #{call.number}", _DRIVER, (call.began, call.ended), about
            )
            continue
        title = f"{call.method} #{call.number}"
        yield _span("driver", f"{title} prepare", _DRIVER, (call.began, call.sent), about)
        yield _span("driver", f"{title} wait", _DRIVER, (call.sent, call.ended), about)
        for number, chunk in enumerate(call.chunks):
            place = f"chunk {number + 1}/{len(call.chunks)}"
            spans = itertools.pairwise(chunk.laps)
            for phase, span in zip(IN_REPLICA[call.method], spans, strict=False):
                name = f"{phase} #{call.number} {place}"
                yield _span(phase, name, chunk.replica + 1, span, about)


def names(replicas: Sequence[ReplicaInfo]) -> Iterator[dict[str, Any]]:
    """The names of the replicas' rows."""
    for replica in replicas:
        yield _row_name(
            replica.index + 1, f"replica {replica.index} on {device_of(replica)}, pid {replica.pid}"
        )


def _span(
    kind: str, name: str, row: int, span: tuple[float, float], about: dict[str, Any]
) -> dict[str, Any]:
    begin, end = span
    start, length = round(begin * 1e6, 1), round(max(0.0, end - begin) * 1e6, 1)
    return {
        "ph": "X",
        "cat": kind,
        "name": name,
        "pid": 1,
        "tid": row,
        "ts": start,
        "dur": length,
        "args": about,
    }


def _row_name(row: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "thread_name", "pid": 1, "tid": row, "args": {"name": name}}
