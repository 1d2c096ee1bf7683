"""Tries rows in another process, which a row may end; the next one goes on in a new process.

parent ──► names of rows ──► child: that it has started, the child ends over a row: that row has
failed,
       ◄── lines ◄────────── then a line for each row          and the others go to another child
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from multiprocessing.connection import Connection
from typing import Any

from raydp_parallel.calls.executor import shutdown
from raydp_parallel.check.here import Here
from raydp_parallel.check.table import NotHere, Row, RowStatus, TableLine

TABLE = "raydp_parallel.check.rows"
"""The module whose ``ROWS`` are tried."""

PATIENCE = 600.0
"""Seconds that a row may take."""

_START = 300.0
"""Seconds that a process may take to start."""


class Word(Enum):
    """What a child says besides lines."""

    STARTED = "started"
    ELSEWHERE = "elsewhere"
    """The other rows are for another process: this one's device works no more."""


_SHOWN = 300
"""Characters of an error that are shown; the file has all of it."""


def try_row(row: Row, here: Here) -> TableLine:
    """Look at a row. Whatever it raises is its failure."""
    left_out = row.left_out(here)
    if left_out:
        return TableLine(row.group, row.name, RowStatus.NOT_CHECKED, left_out)
    begun = time.perf_counter()
    try:
        found = row.run(here)
    except NotHere as error:
        return TableLine(
            row.group, row.name, RowStatus.NOT_CHECKED, str(error), {}, time.perf_counter() - begun
        )
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:_SHOWN]
        numbers = {"traceback": traceback.format_exc()}
        return TableLine(
            row.group, row.name, RowStatus.FAILED, reason, numbers, time.perf_counter() - begun
        )
    status = RowStatus.PASSED if found.good else RowStatus.FAILED
    return TableLine(
        row.group, row.name, status, found.text, found.numbers, time.perf_counter() - begun
    )


def lines(quick: bool = False) -> Iterator[TableLine]:
    """The lines of the table, as they come.

    Args:
        quick: Whether to measure for a short time only.
    """
    table, patience = TABLE, PATIENCE
    left = [*importlib.import_module(table).ROWS]
    while left:
        done = 0
        for line in _in_child(left, quick, table, patience):
            yield line
            done += 1
        left = left[done:]


def _in_child(rows: Sequence[Row], quick: bool, table: str, patience: float) -> Iterator[TableLine]:
    """The lines of one child; at least one, also if it never gets that far."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=_work, args=(theirs, table, [row.name for row in rows], quick))
    child.start()
    theirs.close()
    begun = time.monotonic()
    done = 0
    try:
        _receive(ours, _START)
        while done < len(rows):
            begun = time.monotonic()
            line = _receive(ours, patience)
            if isinstance(line, Word):
                return
            yield line
            done += 1
    except (EOFError, OSError, TimeoutError) as error:
        if isinstance(error, TimeoutError):
            child.kill()
        child.join(10)
        how = str(error) if isinstance(error, TimeoutError) else _ending(child.exitcode)
        row = rows[done]
        yield TableLine(row.group, row.name, RowStatus.FAILED, how, {}, time.monotonic() - begun)
    finally:
        ours.close()
        _end(child)


def _receive(connection: Connection, patience: float) -> TableLine | Word:
    if not connection.poll(patience):
        raise TimeoutError(f"no answer within {patience:g} s")
    said: TableLine | Word = connection.recv()
    return said


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        return f"the process that tried it was ended by signal {-code}"
    return f"the process that tried it ended, with status {code}"


def _end(child: Any) -> None:
    child.join(10)  # it ends its replicas
    if child.is_alive():
        child.kill()
        child.join()


def _work(connection: Connection, table: str, names: Sequence[str], quick: bool) -> None:
    """The child: its rows, one after the other, until one spoils the device."""
    here = Here(quick)
    rows = {row.name: row for row in importlib.import_module(table).ROWS}
    connection.send(Word.STARTED)
    try:
        for name in names:
            connection.send(try_row(rows[name], here))
            # what CUDA calls a sticky error: only another process has a device that works
            if _spoiled(here.finish):
                connection.send(Word.ELSEWHERE)
                return
    except KeyboardInterrupt:
        pass  # Ctrl-C reaches both, and the parent says what there is to say
    finally:
        with contextlib.suppress(Exception):
            here.close()
            shutdown()


def _spoiled(finish: Callable[[], None]) -> bool:
    try:
        finish()
    except RuntimeError:
        return True
    return False
