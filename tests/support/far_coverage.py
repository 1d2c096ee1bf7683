"""A plugin of coverage. A replica is ended without a word, and so is any other process of Ray's:
what such a process ran is written down while it runs.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

from coverage import Coverage

_EVERY = 2.0
"""Seconds between two times; what a process runs after the last one is not counted."""


def coverage_init(registry: Any, options: Any) -> None:
    """Begin, in a process that Ray starts. The suite's own writes at its end."""
    if any(argument.endswith("default_worker.py") for argument in sys.orig_argv):
        threading.Thread(target=_write, name="coverage", daemon=True).start()


def _write() -> None:
    while True:
        time.sleep(_EVERY)
        current = Coverage.current()
        if current is not None:
            current.save()
