"""One table of the package before and after a change, on one machine.

`python -m benchmarks.house --old /path/to/old/checkout` runs each group of rows with the old
package and with this one, in processes of their own that take turns, and prints medians over all
rounds with their ratio; three rounds or more of
all groups are kept, and their figures go into the pages. Peers, nets and turns are this checkout's
for both. Rows that are multiples of a peer are taken in turns with it, inside one process.

`--rounds 1 --rows tiny structure` is a quick look at two groups. Without ``--old`` the table has
one column.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import figures
from benchmarks.measure import Effort, Report, Table, connect, keep, show, timed

Rows = dict[str, float]

REPLICAS = 2
ASKED = {
    "own device": 1.04,
    "structure": 10.0,
    "tiny step to": 1.3,
    "MLP 2.1 M": 0.95,
    "MLP 16.8 M": 0.85,
    "ResNet-like": 0.95,
    "GPT-2 0.34 M, batch 8 x 32: step": 1.25,
    "320 tensors, driver's CPU, 8 replicas": 1.3,
    "320 tensors, driver's CPU, a further replica": 0.07,
    "400 tensors": 2.6,
    "320 tensors beside computation, 2 replicas": 3.2,
    "killed: one": 100.0,
    "journey: files": 20,
    "journey: functions": 120,
}
"""The largest figure that is asked, by the beginning of a row's name."""


def own_device() -> Rows:
    """A forward and a step with one own device, as multiples of the plain module's."""
    from benchmarks.nets import GPT2_SMALL, RESNET50
    from benchmarks.one_device import FORWARD, OURS, PLAIN, STEP, measure

    found = {}
    for case, rounds, works in ((GPT2_SMALL, 12, (FORWARD, STEP)), (RESNET50, 6, (FORWARD,))):
        for what, medians in measure(case, rounds, works).items():
            ratio = medians[OURS] / medians[PLAIN]
            found[f"own device, {case}: {what} to the plain module"] = ratio
    return found


def _hook(module: Any, inputs: Any, output: Any) -> None:
    """Do nothing."""


def structure() -> Rows:
    """Milliseconds that a change of structure adds to a forward of a ResNet-50."""
    import torch
    from torch import nn

    import raydp_parallel
    from benchmarks.nets import pictures, resnet50

    net: Any = resnet50().eval()
    net.seen = []
    model, (x, _) = raydp_parallel.DataParallel(net, ["cpu"] * REPLICAS), pictures(4)

    def swap() -> None:
        net.classifier[1] = nn.Linear(2048, 10)

    edits: dict[str, Callable[[], Any]] = {
        "a hook": lambda: net.classifier.register_forward_hook(_hook),
        "an item in a list": lambda: net.seen.append(len(net.seen)),
        "a swapped layer": swap,
    }

    def forward() -> None:
        with torch.no_grad():
            model(x)

    added: dict[str, list[float]] = {name: [] for name in edits}
    for number in range(8):
        for name, edit in edits.items():
            calm = statistics.median(timed(forward) for _ in range(3))
            edit()
            if number:
                added[name].append((timed(forward) - calm) * 1e3)
    return {f"structure, {name}: ms more": statistics.median(ms) for name, ms in added.items()}


def tiny() -> Rows:
    """A tiny step, as a multiple of two Ray fan-outs."""
    from benchmarks.step_latency import STEP, TRIPS, steps

    found = steps(150, 30)
    ratio = found[STEP] / found[TRIPS]
    return {"tiny step to two Ray fan-outs": ratio, "tiny step, ms": found[STEP]}


def ddp() -> Rows:
    """Training steps of two replicas, as multiples of DDP's over gloo."""
    from benchmarks.peers import DDP, OURS, PEERS
    from benchmarks.training_step import LIMITS, check, measure

    peers = {name: PEERS[name](REPLICAS) for name in (DDP, OURS)}
    found = {}
    for case in LIMITS:
        medians, weights = measure(case, peers, Effort.QUICK)
        check(case, weights)
        found[f"{case}: step to DDP gloo"] = medians[OURS] / medians[DDP]
    peers[DDP].close()
    return found


def kill() -> Rows:
    """Milliseconds that deaths add to a step."""
    from benchmarks.faults import cost

    logging.getLogger("raydp_parallel").setLevel(logging.ERROR)
    found = cost(3, REPLICAS)
    found.pop("undisturbed step")
    return {f"{name}: ms more": ms for name, ms in found.items()}


_FIRST = """
import time
begun = time.perf_counter()
import torch
import raydp_parallel
imported = time.perf_counter()
import ray
ray.init(log_to_driver=False, logging_level="ERROR")
joined = time.perf_counter()
model = raydp_parallel.DataParallel(torch.nn.Linear(4, 2), ["cpu", "cpu"])
model(torch.ones(4, 4)).sum().item()
done = time.perf_counter()
print("found", imported - begun, joined - imported, done - joined, done - begun)
"""


def start() -> Rows:
    """Seconds from import to the first forward's result, in a Ray that runs."""
    import ray

    place = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    times = []
    for _ in range(3):
        command = [sys.executable, "-c", _FIRST]
        text = subprocess.run(
            command, env=place, check=True, stdout=subprocess.PIPE, text=True
        ).stdout
        line = next(line for line in text.splitlines() if line.startswith("found"))
        times.append([float(part) for part in line.split()[1:]])
    names = ("import", "joining Ray", "replicas and forward", "import to the first result")
    parts = zip(*times[1:], strict=True)  # the first one warms the page cache
    return {f"start, {n}: s": min(part) for n, part in zip(names, parts, strict=True)}


def journey() -> Rows:
    """Files and functions that a step passes through."""
    from benchmarks.journey import counts, record

    driver, replica = record()
    files, functions, _ = counts(driver + replica)
    return {"journey: files": files, "journey: functions": functions}


def host() -> Rows:
    """The driver's own time for a step of a ResNet-50's tensors, to the plain module's step."""
    from benchmarks import host_time

    nets = {name: host_time.NETS[name] for name in (host_time.RESNET50, "400 parameters")}
    data = host_time.measure(nets, (2, 8), Effort.QUICK)
    (plain, _), (two, _), (eight, _) = (data[host_time.RESNET50][n] for n in ("0", "2", "8"))
    wall = {count: times[1] for count, times in data["400 parameters"].items()}
    ratios = {
        "2 replicas": two / plain,
        "8 replicas": eight / plain,
        "a further replica": (eight - two) / 6 / plain,
    }
    found = {f"320 tensors, driver's CPU, {what}: to plain": v for what, v in ratios.items()}
    found["400 tensors, 2 replicas: a step to plain"] = wall["2"] / wall["0"]
    beside = host_time.beside(Effort.QUICK, (2,))
    for name, ms in beside.items():
        found[f"320 tensors beside computation, {name}: to plain"] = ms / beside["plain"]
    return found


def sizes() -> Rows:
    """Steps of growing length, with and without the wrapper."""
    from benchmarks import sizes

    return {**sizes.sizes(), **sizes.speed_up()}


GROUPS: dict[str, Callable[[], Rows]] = {
    work.__name__: work
    for work in (own_device, structure, tiny, ddp, host, sizes, kill, start, journey)
}


def measured(group: str, package: Path) -> Rows:
    """Run a group in a process that imports a package, and these benchmarks."""
    with tempfile.TemporaryDirectory() as folder:
        for name, source in (
            ("raydp_parallel", package),
            ("benchmarks", Path(__file__).parents[1]),
        ):
            (Path(folder) / name).symlink_to(source / name)
        place = {**os.environ, "PYTHONPATH": folder, "RAY_worker_niceness": "0"}
        command = [sys.executable, "-m", "benchmarks.house", "--only", group]
        done = subprocess.run(
            command, cwd=folder, env=place, capture_output=True, text=True, check=False
        )
    for line in done.stdout.splitlines():
        if line.startswith("rows: "):
            return json.loads(line.removeprefix("rows: "))  # type: ignore[no-any-return]
    print(f"{group} failed with {package}:\n{done.stderr[-2000:]}", flush=True)
    return {}


def only(group: str) -> None:
    """Measure a group with the package that this process imports."""
    connect()
    print(f"rows: {json.dumps(GROUPS[group]())}", flush=True)


def asked(row: str) -> Any:
    """Return the figure that a row may have at most."""
    return next((most for begin, most in ASKED.items() if row.startswith(begin)), "")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure in turns, print the table, keep it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.house", description=__doc__)
    parser.add_argument("--old", type=Path, help="the checkout to compare with")
    parser.add_argument("--rows", nargs="*", choices=[*GROUPS], default=[*GROUPS])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=[*GROUPS], help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.only:
        only(given.only)
        return
    packages = {"now": Path(__file__).parents[1]}
    if given.old is not None:
        packages["before"] = given.old.resolve()
    found: dict[str, dict[str, list[float]]] = {}
    for number in range(given.rounds):
        order = [*packages] if number % 2 else [*packages][::-1]
        for group in given.rows:
            for name in order:
                begun = time.monotonic()
                for row, value in measured(group, packages[name]).items():
                    found.setdefault(row, {}).setdefault(name, []).append(value)
                seconds = time.monotonic() - begun
                print(f"round {number + 1}, {group}, {name}: {seconds:.0f} s", flush=True)
    rows = [*_lines(found)]
    table = Table("Before and after", ["", "before", "now", "now to before", "asked"], rows)
    question = "How fast is this package beside the one before?"
    note = f"Medians of {given.rounds} rounds, each a process of its own."
    report = Report("house", question, [table], [], {"found": found}, [note])
    show(report)
    if given.rounds >= 3 and [*given.rows] == [*GROUPS]:
        keep(report, Effort.FULL)
        figures.main()


def _lines(found: dict[str, dict[str, list[float]]]) -> Iterator[list[Any]]:
    for row, values in found.items():
        before, now = (
            float(statistics.median(values[name])) if name in values else None
            for name in ("before", "now")
        )
        ratio = now / before if now and before else ""
        yield [row, *("" if v is None else v for v in (before, now)), ratio, asked(row)]


if __name__ == "__main__":
    main()
