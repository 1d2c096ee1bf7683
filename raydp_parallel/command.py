"""The command ``raydp-parallel``: look at running executors from another terminal, write Grafana's
dashboard, and check what this machine's devices compute.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from raydp_parallel.errors import ClusterError
from raydp_parallel.monitoring import status

_DASHBOARD = Path(__file__).parent / "monitoring" / "grafana_dashboard.json"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    options = _parser().parse_args(arguments)
    try:
        if options.command == "check":
            from raydp_parallel import check  # imports torch, which takes two seconds

            return check.main(options.devices)
        while True:
            sys.stdout.write("\033[H\033[2J" * options.watch + _text(options))  # first clears
            if not options.watch:
                return 0
            time.sleep(1)
    except (ClusterError, ValueError) as error:
        sys.stderr.write(f"raydp-parallel: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="raydp-parallel", description=__doc__)
    parser.set_defaults(watch=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    shows = commands.add_parser("status", help="show the work of each running executor")
    shows.add_argument("--watch", action="store_true", help="again each second, until Ctrl-C")
    reports = commands.add_parser("report", help="write the same as one HTML page")
    reports.add_argument("file", metavar="FILE", type=Path, help="where to write it")
    for command in (shows, reports):
        command.add_argument("--address", help="by default RAY_ADDRESS, else all yours here")
    commands.add_parser("grafana", help="print a dashboard for Grafana, as JSON")
    checks = commands.add_parser("check", help="compare and time the devices and the plain module")
    text = "such as 0,1 or cpu,cpu; by default all GPUs of the cluster, else two CPU replicas"
    checks.add_argument("--devices", default="all", help=text)
    return parser


def _text(options: argparse.Namespace) -> str:
    if options.command == "grafana":
        return _DASHBOARD.read_text(encoding="utf-8")
    from raydp_parallel.cluster import ray_api  # imports Ray, which takes a second

    entries = [*map(json.loads, ray_api.entries(options.address))]
    if options.command == "status":
        return f"{status.render(entries)}\n"
    options.file.write_text(status.page(entries), encoding="utf-8")
    return f"{options.file}\n"
