"""The table: its rows before and after they ran, as text and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

from raydp_parallel.check.here import Here


class RowStatus(Enum):
    """The result of a row."""

    PASSED = "ok"
    FAILED = "FAILED"
    NOT_CHECKED = "not checked"


class NotHere(Exception):
    """Raised by a row if this machine lacks what it needs; the text says what."""


class RowResult(NamedTuple):
    """What a row found.

    Attributes:
        text: The result in words.
        numbers: The numbers behind it, by name.
        good: Whether the row passed.
    """

    text: str
    numbers: Mapping[str, Any] = {}
    good: bool = True


class Row(NamedTuple):
    """One check.

    Attributes:
        group: The group that it belongs to.
        name: Its name.
        run: Runs it. An exception is a failure, with its text as the reason.
        gpus: How many GPUs it needs at least.
        long: Whether ``--quick`` leaves it out.
    """

    group: str
    name: str
    run: Callable[[Here], RowResult]
    gpus: int = 0
    long: bool = False

    def left_out(self, here: Here) -> str:
        """Why the row does not run on this machine; empty if it does."""
        if here.gpus < self.gpus:
            return "no GPU" if not here.gpus else f"takes {self.gpus} GPUs, there is one"
        return "--quick" if self.long and here.quick else ""


class TableLine(NamedTuple):
    """The line of a row that ran or was left out.

    Attributes:
        group: The group that it belongs to.
        name: The name of the row.
        status: Its result.
        text: What was found, why it failed, or why it did not run.
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
    """The table as text."""
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
    """How many rows passed, failed and were left out, in one sentence."""
    counts = {status: sum(line.status is status for line in lines) for status in RowStatus}
    return (
        f"{counts[RowStatus.PASSED]} rows as they should be, {counts[RowStatus.FAILED]} failed, "
        f"{counts[RowStatus.NOT_CHECKED]} not checked"
    )


def as_json(lines: Sequence[TableLine], machine: Mapping[str, Any]) -> dict[str, Any]:
    """The table as plain values, with the machine that it was made on."""
    rows = [
        {**line._asdict(), "status": line.status.value, "numbers": dict(line.numbers)}
        for line in lines
    ]
    return {"machine": dict(machine), "summary": summary(lines), "rows": rows}
