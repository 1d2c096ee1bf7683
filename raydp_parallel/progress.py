"""Progress for people: a line that is drawn over on a terminal or in a notebook, a few lines
elsewhere.
"""

from __future__ import annotations

import importlib
import logging
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, TextIO

log = logging.getLogger("raydp_parallel")

_PATIENCE = 2.0
"""Seconds that a start may take before anything is said."""

_OFTEN = 10.0
"""Seconds between two log lines about the same start."""


class Progress:
    """A progress bar for a loop of known length.

    ::

        with Progress(3, "step") as progress:
            for batch in (x, x, x):
                progress.advance(f"loss {criterion(model(batch), y).item():.3f}")

    Args:
        total: How many steps there are.
        label: What a step is called.
        stream: Where to draw, by default standard output.
        width: Characters of the bar.
    """

    def __init__(
        self, total: int, label: str = "step", *, stream: TextIO | None = None, width: int = 30
    ) -> None:
        if total < 1:
            raise ValueError(f"Progress(total={total}): expected at least 1")
        self._total = total
        self._label = label
        self._stream = stream or sys.stdout
        self._width = width
        self._live = redraws(self._stream)
        self._done = 0
        self._drawn = ""
        self._next = 0.0

    def advance(self, note: str = "") -> None:
        """Count one more step, with a note to show beside the bar."""
        self._done += 1
        done = min(self._total, self._done)
        tenth = done == self._total or done * 10 // self._total > (done - 1) * 10 // self._total
        # A terminal is drawn ten times a second at most: steps may be short.
        if tenth or (self._live and time.monotonic() >= self._next):
            self._next = time.monotonic() + 0.1
            self._draw(done, note)

    def _draw(self, done: int, note: str) -> None:
        bar = ("#" * (self._width * done // self._total)).ljust(self._width, ".")
        line = (
            f"[{bar}] {self._label} {done:{len(str(self._total))}d}/{self._total}  {note}"
        ).rstrip()
        self._stream.write(f"\r{line.ljust(len(self._drawn))}" if self._live else f"{line}\n")
        self._stream.flush()
        self._drawn = line

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self._live and self._drawn:
            self._stream.write("\n")
            self._stream.flush()


class BatchCount:
    """Counts batches on standard error: by tqdm if it is installed, else with a line of text.

    Args:
        total: How many there are; None if that is not known.
    """

    def __init__(self, total: int | None) -> None:
        self._total = total
        self._done = 0
        self._next = 0.0
        self._stream = sys.stderr
        self._bar: Any = None
        try:
            tqdm = importlib.import_module("tqdm")
        except ImportError:
            return
        self._bar = tqdm.tqdm(total=total, desc="map", unit="batch", file=self._stream)

    def advance(self) -> None:
        """Count one more batch."""
        self._done += 1
        if self._bar is not None:
            self._bar.update()
        elif redraws(self._stream) and time.monotonic() >= self._next:
            self._next = time.monotonic() + 0.1
            self._stream.write(f"\r{self._text()}")
            self._stream.flush()

    def close(self) -> None:
        """Leave the last count on the screen."""
        if self._bar is not None:
            self._bar.close()
            return
        start = "\r" if redraws(self._stream) else ""
        self._stream.write(f"{start}{self._text()}\n")
        self._stream.flush()

    def _text(self) -> str:
        of = "" if self._total is None else f" of {self._total}"
        return f"map: {self._done}{of} batches"


class Waiting:
    """Says what a start waits for, once it takes longer than `_PATIENCE`.

    Args:
        what: What it waits for, shown with how much of it is there; or a function that returns
            this text anew each time.
        total: How much there will be.
        stream: The terminal to draw on, by default standard error.
        level: At which level it is logged: at first, and then each ten seconds.
    """

    def __init__(
        self,
        what: str | Callable[[], str],
        total: int,
        stream: TextIO | None = None,
        level: int = logging.INFO,
    ) -> None:
        self._what = what
        self._total = total
        self._level = level
        self._stream = stream or sys.stderr
        self._start = time.monotonic()
        self._said = 0.0
        self._drawn = False

    def tell(self, done: int) -> None:
        """Show that ``done`` of the total are there."""
        waited = time.monotonic() - self._start
        if waited < _PATIENCE:
            return
        due, live = not self._said or waited >= self._said + _OFTEN, self._stream.isatty()
        if not due and not live:
            return
        what = self._what if isinstance(self._what, str) else self._what()
        text = f"{what}: {done} of {self._total} after {waited:.0f} s"
        if due:
            self._said = waited
            log.log(self._level, "waiting for %s", text)
        if live:
            self._drawn = True
            self._stream.write(f"\rraydp_parallel: waiting for {text}\x1b[K")
            self._stream.flush()

    def __enter__(self) -> Callable[[int], None]:
        return self.tell

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self._drawn:
            self._stream.write("\r\x1b[K")
            self._stream.flush()


def redraws(stream: TextIO) -> bool:
    """Whether text on a stream can be written over: on a terminal, and in a notebook."""
    return stream.isatty() or type(stream).__module__.startswith("ipykernel.")
