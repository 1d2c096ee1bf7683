"""How many files and functions does a training step pass through?

`python -m benchmarks.journey` trains a small net on two CPU replicas and writes down, for one step,
each function of this package that is entered: in the driver, and in a replica. `--list` prints them
in the order in which they are entered. Comprehensions and lambdas do not count.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

import raydp_parallel
from benchmarks.measure import connect

PACKAGE = str(Path(raydp_parallel.__file__).parent)
STEPS = 12
"""Steps before the one that is looked at, so that nothing is seen that happens once."""

Entered = list[tuple[str, str]]
"""The functions entered, in order: each with its file."""

ASKED = {"files": 20, "functions": 120}


class Recorder:
    """Notes each function of a package that is entered, for `sys.setprofile`.

    Args:
        package: The package's folder.
    """

    def __init__(self, package: str) -> None:
        self.entered: Entered = []
        self._package = package

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if (
            event == "call"
            and code.co_filename.startswith(self._package)
            and not code.co_name.startswith("<")
        ):
            owner = type(frame.f_locals["self"]).__name__ + "." if "self" in frame.f_locals else ""
            self.entered.append((code.co_filename[len(self._package) + 1 :], owner + code.co_name))


class Probe(nn.Module):
    """A small net that records what its replica enters between two of its forwards.

    Args:
        folder: Where each replica writes what it saw.
    """

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
        self.folder = folder
        self.recording = False

    def forward(self, x: Tensor) -> Tensor:
        """Record from the middle of one call to that of the next."""
        # The interpreter keeps the recorder: each forward has a module of its own.
        entered = getattr(sys.getprofile(), "entered", None)
        sys.setprofile(None)
        if entered is not None:
            (Path(self.folder) / f"{os.getpid()}.json").write_text(json.dumps(entered))
        elif self.recording:
            sys.setprofile(Recorder(PACKAGE))
        out: Tensor = self.net(x)
        return out


def record() -> tuple[Entered, Entered]:
    """Train, and return what one step enters in the driver and in a replica."""
    with tempfile.TemporaryDirectory() as folder:
        probe = Probe(folder)
        model = raydp_parallel.DataParallel(probe, ["cpu", "cpu"])
        optimizer = torch.optim.SGD(probe.parameters(), lr=0.1)
        x, y = torch.randn(64, 64), torch.randint(8, (64,))

        def step() -> None:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()

        for _ in range(STEPS):
            step()
        recorder = Recorder(PACKAGE)
        sys.setprofile(recorder)
        step()
        sys.setprofile(None)
        probe.recording = True
        for _ in range(4):  # begun in the first, written down in the second, and once more
            step()
        files = sorted(Path(folder).glob("*.json"))
        replica = [(file, name) for file, name in json.loads(files[0].read_text())]
        return recorder.entered, replica


def counts(entered: Entered) -> tuple[int, int, int]:
    """Count files, functions and calls."""
    return len({file for file, _ in entered}), len({*entered}), len(entered)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--list", action="store_true", help="print every function, in the order of the calls"
    )
    options = parser.parse_args(arguments)
    connect()
    driver, replica = record()
    raydp_parallel.shutdown()
    print(f"{'':10}{'files':>8}{'functions':>12}{'calls':>8}")
    for name, entered in (("driver", driver), ("replica", replica), ("together", driver + replica)):
        files, functions, calls = counts(entered)
        print(f"{name:10}{files:8}{functions:12}{calls:8}")
    print(f"asked at most, together: {ASKED}")
    if options.list:
        for name, entered in (("driver", driver), ("replica", replica)):
            print(f"\n{name}")
            for file, function in dict.fromkeys(entered):
                print(f"  {file:36}{function}")


if __name__ == "__main__":
    main()
