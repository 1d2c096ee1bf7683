"""Interleaved timing: every contender once per round, medians over rounds, and ratios."""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.metadata
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import torch

RESULTS = Path(__file__).parent / "results"


class Effort(Enum):
    """How long to measure: one round to see that it runs, an eighth of the rounds, or all."""

    SMOKE = "smoke"
    QUICK = "quick"
    FULL = "full"

    def rounds(self, full: int) -> int:
        """How many rounds, where a full run takes so many."""
        return {"smoke": 1, "quick": max(3, full // 8), "full": full}[self.value]

    @property
    def warmup(self) -> int:
        """Rounds that are not counted."""
        return {"smoke": 1, "quick": 3, "full": 5}[self.value]


class Table(NamedTuple):
    """Numbers to read: a title, names of columns, one list per line."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]


class Asked(NamedTuple):
    """A ratio, of one thing to another, and the most that is asked."""

    what: str
    value: float
    limit: float

    @property
    def met(self) -> bool:
        """Tell if it is as asked."""
        return self.value <= self.limit


class Report(NamedTuple):
    """The results of a benchmark.

    Attributes:
        name: Of the benchmark, and of its file of results.
        question: The question that it answers.
        tables: The numbers.
        asked: The ratios that have a limit.
        data: The medians, for comparisons.
        notes: Whatever a reader must know.
    """

    name: str
    question: str
    tables: Sequence[Table]
    asked: Sequence[Asked]
    data: Mapping[str, Any]
    notes: Sequence[str] = ()


def interleaved(
    contenders: Mapping[str, Callable[[], Any]], rounds: int, warmup: int = 5
) -> dict[str, float]:
    """Median milliseconds of each contender, taken in turn so that a noisy machine is noisy for
    all.

    The turns of a round are in a new order each time: some contenders leave work behind, such as
    memory that Ray frees later, and it should not always be the same one that pays. A contender
    that returns a float has timed itself, in seconds.
    """
    times: dict[str, list[float]] = {name: [] for name in contenders}
    turns = [*contenders.items()]
    order = random.Random(0)
    for number in range(warmup + rounds):
        order.shuffle(turns)
        for name, run in turns:
            start = time.perf_counter()
            own = run()
            seconds = own if isinstance(own, float) else time.perf_counter() - start
            if number >= warmup:
                times[name].append(seconds * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def timed(work: Callable[[], Any]) -> float:
    """Seconds that some work takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def compared(title: str, medians: Mapping[str, float]) -> Table:
    """Milliseconds, and the ratio to the first row."""
    first = next(iter(medians))
    rows = [[name, ms, ms / medians[first]] for name, ms in medians.items()]
    return Table(title, ["", "ms", f"to {first}"], rows)


def shown(value: Any) -> str:
    """A cell as text: three significant digits, but whole numbers whole."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def as_text(table: Table) -> str:
    """A table in columns."""
    lines = [
        [str(name) for name in table.columns],
        *([shown(cell) for cell in row] for row in table.rows),
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = (
        "  ".join(
            c.ljust(w) if i == 0 else c.rjust(w)
            for i, (c, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )
    return "\n".join([table.title, *(f"  {line}" for line in aligned)])


def processor() -> str:
    """Read the processor's name."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    names = [line.partition(":")[2].strip() for line in text.splitlines() if "model name" in line]
    return names[0] if names else platform.machine()


def machine() -> dict[str, Any]:
    """Describe this machine."""
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "ray": importlib.metadata.version("ray"),
    }


def use_niceness() -> None:
    """Give workers of a Ray that is started next the niceness that they have where the package
    starts it: Ray's own puts them behind the driver and behind peers without Ray.
    """
    os.environ.setdefault("RAY_worker_niceness", "0")


def connect() -> None:
    """Start a Ray of this program's own, quiet, unless one is connected."""
    import ray  # not at the top: own_process has processes without it

    if not ray.is_initialized():
        use_niceness()
        ray.init(
            address="local", include_dashboard=False, log_to_driver=False, logging_level="ERROR"
        )


def replicas_threads(replicas: int) -> int:
    """Torch's threads for each of so many workers that share this machine."""
    return max(1, (os.cpu_count() or 1) // replicas)


def keep(report: Report, effort: Effort, folder: Path = RESULTS) -> None:
    """Write the last results beside the benchmarks."""
    folder.mkdir(exist_ok=True, parents=True)
    found = {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "effort": effort.value,
        "machine": machine(),
        **report._asdict(),
        "tables": [table._asdict() for table in report.tables],
        "asked": [{**asked._asdict(), "met": asked.met} for asked in report.asked],
    }
    (folder / f"{report.name}.json").write_text(
        json.dumps(found, indent=1) + "\n", encoding="utf-8"
    )


def show(report: Report) -> None:
    """Print the tables and the ratios."""
    for table in report.tables:
        print(as_text(table), end="\n\n")
    for asked in report.asked:
        word = "met" if asked.met else "NOT MET"
        print(f"  {asked.what}: {shown(asked.value)}, asked at most {shown(asked.limit)}: {word}")
    print(*(f"  {note}" for note in report.notes), sep="\n", flush=True)


def on_standin(name: str) -> None:
    """Let a benchmark's process begin again with the stand-in GPUs of the tests, and replicas be
    processes that it forks.
    """
    for part in ("device", "support"):
        sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / part))
    standin = importlib.import_module("standin")
    if standin.lib is None:
        print("this runs on stand-in GPUs, and no time means anything", flush=True)
        standin.give()
        os.execv(sys.executable, [sys.executable, "-m", f"benchmarks.{name}", *sys.argv[1:]])
    forked = importlib.import_module("forked")
    trial = importlib.import_module("raydp_parallel.wire.trial")
    trial.SIZES[:], trial._PRODUCTS = [1 << 16], 1
    forked.start()
    forked.use(True)


def alone(run: Callable[[Effort], Report]) -> None:
    """Run one benchmark as a program."""
    parser = argparse.ArgumentParser(description=run.__doc__)
    parser.add_argument("--quick", action="store_true", help="an eighth of the rounds")
    parser.add_argument(
        "--smoke", action="store_true", help="one round, to see that it runs; nothing is kept"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="where to keep the results")
    options = parser.parse_args()
    effort = Effort.SMOKE if options.smoke else Effort.QUICK if options.quick else Effort.FULL
    connect()
    import ray

    import raydp_parallel

    try:
        report = run(effort)
    finally:
        raydp_parallel.shutdown()
        ray.shutdown()
    show(report)
    if effort is not Effort.SMOKE:
        keep(report, effort, options.results)
