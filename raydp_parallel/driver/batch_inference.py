"""`DataParallel.map`: many batches without gradients, one on each replica at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any, Literal

from raydp_parallel.batch import Keywords
from raydp_parallel.errors import warn

OnError = Literal["raise", "skip"]
Begin = Callable[[int, tuple[object, ...], Keywords], Callable[[], object]]
"""Sends a batch, of a number; returns what waits for its output."""


def check(in_flight: object, on_error: object) -> None:
    """Check the arguments of `DataParallel.map`."""
    if in_flight is None:
        in_flight = 1
    if isinstance(in_flight, bool) or not isinstance(in_flight, int):
        raise TypeError(f"map: in_flight must be an int or None, got {in_flight!r}")
    if in_flight < 1:
        raise ValueError(f"map: in_flight={in_flight}, expected at least 1")
    if on_error not in ("raise", "skip"):
        raise ValueError(f"map: on_error={on_error!r}, expected 'raise' or 'skip'")


def outputs(
    batches: Iterable[object], begin: Begin, in_flight: int, on_error: OnError
) -> Generator[Any, None, None]:
    """Yield the output of each batch, in order.

    Args:
        batches: The batches.
        begin: Sends one.
        in_flight: The most that are sent and have not given their outputs.
        on_error: ``"raise"`` if a batch that fails ends everything.
    """
    flying: deque[tuple[int, Callable[[], object]]] = deque()
    skipped: list[str] = []
    loader, number, more = iter(batches), 0, True
    fault: Exception | None = None
    try:
        while more or flying:
            if more and len(flying) < in_flight:
                try:
                    args, kwargs = _arguments(next(loader))
                except StopIteration:
                    more = False
                except Exception as error:  # of the loader: raised after the outputs before it
                    fault, more = error, False
                else:
                    flying.append((number, begin(number, args, kwargs)))
                    number += 1
                continue
            at, finish = flying.popleft()
            try:
                found = finish()
            except Exception as error:
                if on_error == "raise":
                    raise
                skipped.append(f"batch {at}: {type(error).__name__}: {str(error).splitlines()[0]}")
            else:
                yield found
        if fault is not None:
            raise fault
    finally:
        while flying:  # the loop was left early: no answer may be left behind
            try:
                flying.popleft()[1]()
            except Exception:  # nobody asks for it any more
                continue
    if skipped:
        warn(f"map: {len(skipped)} batches failed: {'; '.join(skipped)}")


def _arguments(batch: object) -> tuple[tuple[object, ...], Keywords]:
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, (tuple, list)):
        return tuple(batch), {}
    return (batch,), {}
