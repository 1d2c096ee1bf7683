"""Checks what this machine's devices compute and how fast, and lists what was not checked."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from raydp_parallel.check import runner
from raydp_parallel.check.here import machine
from raydp_parallel.check.table import RowStatus, TableLine, as_json, as_text, summary
from raydp_parallel.options import GPU_PATHS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the check."""
    parser.add_argument("--out", type=_file, metavar="FILE.json", help="where to keep the table")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="measure for a short time, and leave out what takes long",
    )
    parser.add_argument(
        "--gpu-paths",
        nargs="+",
        choices=GPU_PATHS,
        default=(),
        metavar="PATH",
        help=f"Options(gpu_paths=...) of all rows, some of {', '.join(GPU_PATHS)}",
    )


def _file(text: str) -> Path:
    """The path of a file that can be written; checked now and not after the first row."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder; give the name of a file")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written")
    return path


def _devices(about: Mapping[str, Any]) -> str:
    if about["gpus"]:
        return ", ".join(gpu["name"] for gpu in about["gpus"])
    if not about["driver"]:
        return "no GPU"
    # There is a driver, so the user may expect a GPU.
    built = f"CUDA {about['cuda']}" if about["cuda"] else "CPUs alone"
    return f"no GPU that torch can use (it is built for {built})"


def run(options: argparse.Namespace) -> int:
    """Run all rows, print each when it is done, then the table. Returns 1 if a row failed."""
    found: list[TableLine] = []
    about = machine()
    _say(
        f"{_devices(about)}; driver {about['driver'] or 'none'}, torch {about['torch']}, "
        f"Ray {about['ray']}"
    )
    for line in runner.lines(options.quick, options.gpu_paths):
        found.append(line)
        sys.stderr.write(
            f"  {line.status.value}: {line.group}, {line.name} ({line.seconds:.1f} s)\n"
        )
        sys.stderr.flush()
        if options.out is not None:  # after each row, so that a crash loses no result
            _keep(options.out, json.dumps(as_json(found, about), indent=1, default=str) + "\n")
    _say(as_text(found))
    _say(summary(found))
    return int(any(line.status is RowStatus.FAILED for line in found))


def _keep(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:  # such as a full disk: the results are still printed
        sys.stderr.write(f"  the table cannot be kept: {error}\n")


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m raydp_parallel.check", description=__doc__)
    add_arguments(parser)
    try:
        return run(parser.parse_args(arguments))
    except KeyboardInterrupt:
        return 130
