"""The command ``raydp-parallel``: look at running executors from another terminal, write
Grafana's dashboard, and check what this machine's devices compute."""

from __future__ import annotations

import argparse
import math
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from raydp_parallel.check import program as check
from raydp_parallel.cluster import registry
from raydp_parallel.errors import ClusterError
from raydp_parallel.monitoring import grafana, html_report, status

_CLEAR = "\x1b[H\x1b[2J"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options) or 0)
    except ClusterError as error:
        sys.stderr.write(f"raydp-parallel: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="raydp-parallel", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    shows = commands.add_parser("status", help="what every running executor of the cluster does")
    shows.add_argument("--watch", action="store_true", help="again and again, until Ctrl-C")
    shows.add_argument(
        "--every", type=_seconds, default=1.0, metavar="SECONDS", help="how often (default 1)"
    )
    shows.set_defaults(run=_status)
    reports = commands.add_parser("report", help="the same as one HTML page with a timeline")
    reports.add_argument("--html", required=True, metavar="FILE", help="where to write it")
    reports.set_defaults(run=_report)
    for command in (shows, reports):
        command.add_argument(
            "--address", help="the cluster's; by default RAY_ADDRESS, or the one on this machine"
        )
    boards = commands.add_parser("grafana", help="write the Grafana dashboard")
    boards.add_argument(
        "--out", required=True, metavar="DIR", help="the folder that Grafana reads dashboards from"
    )
    boards.set_defaults(run=_grafana)
    checks = commands.add_parser("check", help="what this machine's devices compute, and how fast")
    check.add_arguments(checks)
    checks.set_defaults(run=check.run)
    return parser


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < threading.TIMEOUT_MAX:
        raise argparse.ArgumentTypeError(f"invalid seconds: {text!r}")
    return seconds


def _status(options: argparse.Namespace) -> None:
    while True:
        text = status.render(registry.entries(options.address))
        clear = _CLEAR if options.watch and sys.stdout.isatty() else ""
        sys.stdout.write(f"{clear}{text}\n")
        sys.stdout.flush()
        if not options.watch:
            return
        time.sleep(options.every)


def _report(options: argparse.Namespace) -> None:
    Path(options.html).write_text(
        html_report.report(registry.entries(options.address)), encoding="utf-8"
    )
    sys.stdout.write(f"{options.html}\n")


def _grafana(options: argparse.Namespace) -> None:
    sys.stdout.write(f"{grafana.write(options.out)}\n")
