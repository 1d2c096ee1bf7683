"""`DataParallel.map`: many batches without gradients, one on each replica at a time."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any, Literal

OnError = Literal["raise", "skip"]
Begin = Callable[[int, tuple[Any, ...], dict[str, Any]], Callable[[], Any]]
"""Sends a batch, of a number; returns what waits for its output."""


def check(in_flight: Any, on_error: Any) -> None:
    """Check the arguments of `DataParallel.map`."""
    if in_flight is not None and (isinstance(in_flight, bool) or not isinstance(in_flight, int)):
        raise TypeError(f"map: in_flight must be an int or None, got {in_flight!r}")
    if in_flight is not None and in_flight < 1:
        raise ValueError(f"map: in_flight={in_flight}, expected at least 1")
    if on_error not in ("raise", "skip"):
        raise ValueError(f"map: on_error={on_error!r}, expected 'raise' or 'skip'")


def outputs(
    batches: Iterable[Any], begin: Begin, in_flight: int, on_error: OnError
) -> Generator[Any, None, None]:
    """Yield the output of each batch, in order.

    Args:
        batches: The batches.
        begin: Sends one.
        in_flight: The most that are sent and have not given their outputs.
        on_error: ``"raise"`` if a batch that fails ends everything.
    """
    flying: deque[tuple[int, Callable[[], Any]]] = deque()
    skipped: list[str] = []

    def give() -> Generator[Any, None, None]:
        number, finish = flying.popleft()
        try:
            found = finish()
        except Exception as error:
            if on_error == "raise":
                raise
            skipped.append(f"batch {number}: {type(error).__name__}: {str(error).splitlines()[0]}")
            return
        yield found

    loader, number, more = iter(batches), 0, True
    fault: Exception | None = None
    try:
        while more or flying:
            if not more or len(flying) == in_flight:
                yield from give()
                continue
            try:
                args, kwargs = _arguments(next(loader))
            except StopIteration:
                more = False
            except Exception as error:  # of the loader: raised after the outputs before it
                fault, more = error, False
            else:
                flying.append((number, begin(number, args, kwargs)))
                number += 1
        if fault is not None:
            raise fault
    finally:
        while flying:  # the loop was left early: no answer may be left behind
            try:
                flying.popleft()[1]()
            except Exception:  # nobody asks for it any more
                continue
    if skipped:
        warnings.warn(f"map: {len(skipped)} batches failed: {'; '.join(skipped)}", stacklevel=2)


def _arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, (tuple, list)):
        return tuple(batch), {}
    return (batch,), {}
