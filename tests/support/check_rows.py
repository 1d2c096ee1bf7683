"""Rows that end in every way a row can, for the process that tries them. They are found by this
module's name.
"""

from __future__ import annotations

import os
import signal
import time

from raydp_parallel.check.here import Here
from raydp_parallel.check.table import NotHere, Row, RowResult


def fine(_here: Here) -> RowResult:
    """As it should be."""
    return RowResult("as it should be", {"number": 3})


def wrong(_here: Here) -> RowResult:
    """Not as it should be."""
    return RowResult("too much", {}, False)


def crash(_here: Here) -> RowResult:
    """Raises."""
    raise ValueError("a reason")


def absent(_here: Here) -> RowResult:
    """Finds out late."""
    raise NotHere("no such thing")


def die(_here: Here) -> RowResult:
    """Takes the process with it, as a segmentation fault does."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def hang(_here: Here) -> RowResult:
    """Never comes back."""
    while True:
        time.sleep(60)


def spoil(here: Here) -> RowResult:
    """From now on nothing works in this process, as after an illegal access to a GPU's memory."""

    def finish() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    here.finish = finish  # type: ignore[method-assign]
    return RowResult("spoilt")


def unspoilt(here: Here) -> RowResult:
    """Says whether it runs where `spoil` did."""
    here.finish()
    return RowResult("another process")


ROWS = (
    Row("one", "fine", fine),
    Row("one", "wrong", wrong),
    Row("one", "crash", crash),
    Row("one", "absent", absent),
    Row("two", "die", die),
    Row("two", "spoil", spoil),
    Row("two", "unspoilt", unspoilt),
    Row("two", "long", fine, long=True),
    Row("two", "many", fine, gpus=99),
    Row("two", "last", fine),
    Row("two", "hang", hang),
)
