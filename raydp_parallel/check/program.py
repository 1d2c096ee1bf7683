"""The check as a program: what this machine's devices compute, how fast, and what was not looked at."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from raydp_parallel.check import runner
from raydp_parallel.check.here import machine
from raydp_parallel.check.table import Line, Status, as_json, as_text, summary


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the check."""
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="where to keep the table")
    parser.add_argument("--quick", action="store_true", help="measure for a short time, and leave out what takes long")


def run(options: argparse.Namespace) -> int:
    """Look at all rows; prints each as it comes, then the table. 1 if one failed."""
    found: list[Line] = []
    about = machine()
    gpus = ", ".join(gpu["name"] for gpu in about["gpus"]) or "no GPU"
    _say(f"{gpus}; driver {about['driver'] or 'none'}, torch {about['torch']}, Ray {about['ray']}")
    for line in runner.lines(options.quick):
        found.append(line)
        sys.stderr.write(f"  {line.status.value}: {line.group}, {line.name} ({line.seconds:.1f} s)\n")
        sys.stderr.flush()
        if options.out is not None:  # after each row: what is known is kept, whatever comes
            options.out.write_text(json.dumps(as_json(found, about), indent=1, default=str) + "\n", encoding="utf-8")
    _say(as_text(found))
    _say(summary(found))
    return int(any(line.status is Status.FAILED for line in found))


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m raydp_parallel.check", description=__doc__)
    add_arguments(parser)
    return run(parser.parse_args(arguments))
