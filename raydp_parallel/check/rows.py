"""All rows, in the order in which they run."""

from __future__ import annotations

from raydp_parallel.check import behaviour, copies, faults, memory, sharing, speed, training
from raydp_parallel.check.table import Row

ROWS: tuple[Row, ...] = (
    *training.ROWS,
    *behaviour.ROWS,
    *memory.ROWS,
    *copies.ROWS,
    *speed.ROWS,
    *faults.ROWS,
    *sharing.ROWS,
)
