"""The table: its rows before and after they were tried, as text and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

from raydp_parallel.check.here import Here


class RowStatus(Enum):
    """What became of a row."""

    PASSED = "ok"
    FAILED = "FAILED"
    NOT_CHECKED = "not checked"


class NotHere(Exception):
    """A row found out that this machine has not got what it takes. Its text says what."""


class RowResult(NamedTuple):
    """What a row found.

    Attributes:
        text: In words.
        numbers: The numbers behind it, by name.
        good: Whether it is as it should be.
    """

    text: str
    numbers: Mapping[str, Any] = {}
    good: bool = True


class Row(NamedTuple):
    """Something to look at.

    Attributes:
        group: What it belongs to.
        name: What it is.
        run: Looks at it. What it raises is a failure, and its reason.
        gpus: How many GPUs it takes at least.
        long: Whether ``--quick`` leaves it out.
    """

    group: str
    name: str
    run: Callable[[Here], RowResult]
    gpus: int = 0
    long: bool = False

    def left_out(self, here: Here) -> str:
        """Why it is not looked at here; empty if it is."""
        if here.gpus < self.gpus:
            return "no GPU" if not here.gpus else f"takes {self.gpus} GPUs, there is one"
        return "--quick" if self.long and here.quick else ""


class TableLine(NamedTuple):
    """A row that was tried.

    Attributes:
        group: What it belongs to.
        name: What it is.
        status: What became of it.
        text: What was found, why it failed, or why it was not looked at.
        numbers: The numbers behind it, by name.
        seconds: How long it took.
    """

    group: str
    name: str
    status: RowStatus
    text: str
    numbers: Mapping[str, Any] = {}
    seconds: float = 0.0


def as_text(lines: Sequence[TableLine]) -> str:
    """The table to read."""
    cells = [(line.group, line.name, line.status.value, line.text) for line in lines]
    widths = [max(len(row[column]) for row in cells) for column in range(3)]
    shown = []
    before = ""
    for row in cells:
        padded = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        padded[0] = padded[0] if row[0] != before else " " * widths[0]
        before = row[0]
        shown.append("  ".join([*padded, row[3]]).rstrip())
    return "\n".join(shown)


def summary(lines: Sequence[TableLine]) -> str:
    """How many of each, in one sentence."""
    counts = {status: sum(line.status is status for line in lines) for status in RowStatus}
    return (
        f"{counts[RowStatus.PASSED]} rows as they should be, {counts[RowStatus.FAILED]} failed, "
        f"{counts[RowStatus.NOT_CHECKED]} not checked"
    )


def as_json(lines: Sequence[TableLine], machine: Mapping[str, Any]) -> dict[str, Any]:
    """The table to keep, with what it was taken on."""
    rows = [
        {**line._asdict(), "status": line.status.value, "numbers": dict(line.numbers)}
        for line in lines
    ]
    return {"machine": dict(machine), "summary": summary(lines), "rows": rows}
