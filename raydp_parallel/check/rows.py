"""All rows, in the order in which they run."""

from __future__ import annotations

from raydp_parallel.check import behaviour, copies, faults, process_memory, sharing, speed, training
from raydp_parallel.check.table import Row

ROWS: tuple[Row, ...] = (
    *training.ROWS,
    *behaviour.ROWS,
    *process_memory.ROWS,
    *copies.ROWS,
    *speed.ROWS,
    *faults.ROWS,
    *sharing.ROWS,
)
