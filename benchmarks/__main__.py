"""All benchmarks, and their summary: `python -m benchmarks`, or with `--quick` in about two minutes."""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Sequence
from pathlib import Path

import ray

import raydp_parallel
from benchmarks import summary
from benchmarks.measure import RESULTS, Effort, connect, keep, show


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, keep, summarize."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="benchmark", help=f"which, by default all: {summary.NAMES}")
    parser.add_argument("--quick", action="store_true", help="an eighth of the rounds")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where to keep the results")
    options = parser.parse_args(arguments)
    unknown = set(options.names) - set(summary.NAMES)
    if unknown:
        parser.error(f"no benchmark named {', '.join(sorted(unknown))}; there are {', '.join(summary.NAMES)}")
    effort = Effort.QUICK if options.quick else Effort.FULL
    connect()
    try:
        for name in options.names or summary.NAMES:
            measure(name, effort, options.results)
    finally:
        ray.shutdown()
    for written in summary.write(options.results):
        print(f"wrote {written}")


def measure(name: str, effort: Effort, folder: Path) -> None:
    """One benchmark, with replicas of its own."""
    start = time.perf_counter()
    try:
        report = importlib.import_module(f"benchmarks.{name}").run(effort)
    finally:
        raydp_parallel.shutdown()
    print(f"== {name}: {report.question}", end="\n\n")
    show(report)
    print(f"  took {time.perf_counter() - start:.0f} s", end="\n\n", flush=True)
    keep(report, effort, folder)


if __name__ == "__main__":
    main()
