"""The one option that every example has."""

from __future__ import annotations

import argparse


def devices(description: str | None, default: str) -> list[str | int] | None:
    """The ``device_ids`` that ``--devices`` asks for."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--devices",
        default=default,
        metavar="LIST",
        help="cpu,cpu: two CPU replicas; cpu: in place; 0,1: two GPUs of the Ray "
        "cluster; all: every GPU of it, in place where it has none (default: %(default)s)",
    )
    return parse(parser.parse_args().devices)


def parse(text: str) -> list[str | int] | None:
    """``cpu,cpu`` is two CPU replicas, ``0,1`` two GPUs of the cluster, ``all`` every
    GPU.
    """
    if text == "all":
        return None
    return [int(name) if name.isdigit() else name for name in text.split(",")]
