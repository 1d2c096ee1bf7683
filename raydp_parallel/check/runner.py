"""Runs rows in a child process. If a row ends the child, the rows after it run in a new child.

```
 parent ──► names of rows ──► child: STARTED, then a line for each row
        ◄── lines ◄────────── a child that ends during a row: that row has failed
```
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from multiprocessing.connection import Connection
from typing import Any

from raydp_parallel.calls.executor import shutdown
from raydp_parallel.check.here import Here
from raydp_parallel.check.table import NotHere, Row, RowStatus, TableLine
from raydp_parallel.options import GpuPath

TABLE = "raydp_parallel.check.rows"
"""The module with the ``ROWS`` to run."""

PATIENCE = 600.0
"""Seconds that a row may take."""

_START = 300.0
"""Seconds that a process may take to start."""


class Word(Enum):
    """What a child sends besides lines."""

    STARTED = "started"
    ELSEWHERE = "elsewhere"
    """The rows left need another process: this one cannot use its device any more."""


_SHOWN = 300
"""Characters of an error that are shown; the file has all of it."""


def try_row(row: Row, here: Here) -> TableLine:
    """Run a row. An exception that it raises makes it a failed row."""
    left_out = row.left_out(here)
    if left_out:
        return TableLine(row.group, row.name, RowStatus.NOT_CHECKED, left_out)
    begun = time.perf_counter()
    numbers: Mapping[str, Any] = {}
    try:
        found = row.run(here)
    except NotHere as error:
        status, text = RowStatus.NOT_CHECKED, str(error)
    except Exception as error:
        status = RowStatus.FAILED
        text = " ".join(f"{type(error).__name__}: {error}".split())[:_SHOWN]
        numbers = {"traceback": traceback.format_exc()}
    else:
        status = RowStatus.PASSED if found.good else RowStatus.FAILED
        text, numbers = found.text, found.numbers
    seconds = time.perf_counter() - begun
    return TableLine(row.group, row.name, status, text, numbers=numbers, seconds=seconds)


def lines(quick: bool = False, paths: Sequence[GpuPath] = ()) -> Iterator[TableLine]:
    """The lines of the table, each as soon as its row is done.

    Args:
        quick: Whether to measure for a short time only.
        paths: `Options.gpu_paths` of rows that choose none themselves.
    """
    table, patience = TABLE, PATIENCE
    left = [*importlib.import_module(table).ROWS]
    while left:
        done = 0
        for line in _in_child(left, (quick, paths), table, patience):
            yield line
            done += 1
        left = left[done:]


def _in_child(
    rows: Sequence[Row], settings: tuple[Any, ...], table: str, patience: float
) -> Iterator[TableLine]:
    """The lines of one child: at least one, also if it fails to start."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    names = [row.name for row in rows]
    child = context.Process(target=_work, args=(theirs, table, names, *settings))
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
        seconds = time.monotonic() - begun
        yield TableLine(row.group, row.name, RowStatus.FAILED, how, seconds=seconds)
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


def _work(
    connection: Connection,
    table: str,
    names: Sequence[str],
    quick: bool,
    paths: Sequence[GpuPath] = (),
) -> None:
    """Run rows in the child, one after the other, until one leaves the device unusable."""
    here = Here(quick, paths=paths)
    rows = {row.name: row for row in importlib.import_module(table).ROWS}
    connection.send(Word.STARTED)
    try:
        for name in names:
            connection.send(try_row(rows[name], here))
            # after a sticky error of CUDA only another process can use the device
            if _spoiled(here.finish):
                connection.send(Word.ELSEWHERE)
                return
    except KeyboardInterrupt:
        pass  # Ctrl-C reaches both processes; the parent prints
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
