"""`DataParallel.map`: many batches without gradients, one on each replica at a time."""

from __future__ import annotations

import contextlib
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Literal

OnError = Literal["raise", "skip"]
Begin = Callable[[int, tuple[object, ...], dict[str, object]], Callable[[], object]]
"""Sends a batch, of a number; returns what waits for its output."""


def check(in_flight: object, on_error: object) -> None:
    """Check the arguments of `DataParallel.map`."""
    if in_flight is not None and (type(in_flight) is not int or in_flight < 1):
        raise ValueError(f"map: in_flight={in_flight!r}, expected None or an int, at least 1")
    if on_error not in ("raise", "skip"):
        raise ValueError(f"map: on_error={on_error!r}, expected 'raise' or 'skip'")


def outputs(
    batches: Iterable[object], begin: Begin, in_flight: int, on_error: OnError
) -> Generator[object, None, None]:
    """Yield the output of each batch, in order. So many may be ``in_flight``: they are sent, and
    have not given their outputs.
    """
    flying: deque[tuple[int, Callable[[], object]]] = deque()
    sent = ((at, begin(at, *_arguments(batch))) for at, batch in enumerate(batches))
    skipped: list[str] = []
    end: Exception | None = None  # of the loader: raised after the outputs before it
    try:
        while end is None or flying:
            if end is None and len(flying) < in_flight:
                try:
                    flying.append(next(sent))
                except Exception as error:
                    end = error
                continue
            at, finish = flying.popleft()
            try:
                found = finish()
            except Exception as error:
                if on_error == "raise":
                    raise
                text = str(error).partition("\n")[0]
                skipped.append(f"batch {at}: {type(error).__name__}: {text}")
            else:
                yield found
        if not isinstance(end, StopIteration):
            raise end
    finally:
        for _, finish in flying:  # the loop was left early: no answer may be left behind
            with contextlib.suppress(Exception):  # nobody asks for it any more
                finish()
    if skipped:
        warnings.warn(f"map: {len(skipped)} batches failed: {'; '.join(skipped)}", stacklevel=2)


def _arguments(batch: object) -> tuple[tuple[object, ...], dict[str, object]]:
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)), {}
