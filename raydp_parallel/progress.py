"""Progress for people: a line that is drawn over on a terminal or in a notebook, a few lines
elsewhere.
"""

from __future__ import annotations

import importlib
import logging
import os
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

_SHORT = 12
"""Characters of a bar that has a long text beside it."""


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
        self._width = width
        self._line = _Line(stream or sys.stdout)
        self._done = 0

    def advance(self, note: str = "") -> None:
        """Count one more step, with a note to show beside the bar."""
        self._done += 1
        done = min(self._total, self._done)
        tenth = done == self._total or done * 10 // self._total > (done - 1) * 10 // self._total
        if tenth or self._line.due():
            count = f"{self._label} {done:{len(str(self._total))}d}/{self._total}"
            self._line.draw(f"{_bar(done, self._total, self._width)} {count}  {note}".rstrip())

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._line.end()


class BatchCount:
    """Counts batches on standard error: by tqdm if it is installed, else with a bar of text.

    Args:
        total: How many there are; None if that is not known.
    """

    def __init__(self, total: int | None) -> None:
        self._total = total
        self._done = 0
        self._line = _Line(sys.stderr)
        self._bar: Any = None
        try:
            tqdm = importlib.import_module("tqdm")
        except ImportError:
            return
        self._bar = tqdm.tqdm(total=total, desc="map", unit="batch", file=sys.stderr)

    def advance(self) -> None:
        """Count one more batch."""
        self._done += 1
        if self._bar is not None:
            self._bar.update()
        elif self._line.due():
            self._line.draw(self._text())

    def close(self) -> None:
        """Leave the last count on the screen."""
        if self._bar is not None:
            self._bar.close()
            return
        self._line.draw(self._text())
        self._line.end()

    def _text(self) -> str:
        if not self._total:
            return f"map: {self._done} batches"
        bar = _bar(min(self._done, self._total), self._total)
        return f"{bar} map: {self._done} of {self._total} batches"


class Waiting:
    """Says what a start waits for, once it takes longer than `_PATIENCE`.

    Args:
        what: What it waits for, shown with how much of it is there; or a function that returns
            this text anew each time.
        total: How much there will be.
        stream: Where to draw a bar, on a terminal or in a notebook; by default standard error.
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
        self._line = _Line(stream or sys.stderr)
        self._start = time.monotonic()
        self._said = 0.0

    def tell(self, done: int) -> None:
        """Show that ``done`` of the total are there."""
        waited = time.monotonic() - self._start
        if waited < _PATIENCE:
            return
        due = not self._said or waited >= self._said + _OFTEN
        if not due and not self._line.live:
            return
        what = self._what if isinstance(self._what, str) else self._what()
        text = f"{what}: {done} of {self._total} after {waited:.0f} s"
        if due:
            self._said = waited
            log.log(self._level, "waiting for %s", text)
        if self._line.live:
            bar = _bar(min(done, self._total), self._total, _SHORT)
            self._line.draw(f"{bar} raydp_parallel: waiting for {text}")

    def __enter__(self) -> Callable[[int], None]:
        return self.tell

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._line.clear()


class _Line:
    """The last line of a stream, drawn over where that can be done; elsewhere each is a new one.

    Attributes:
        live: Whether it can be drawn over: on a terminal, and in a notebook.
    """

    def __init__(self, stream: TextIO) -> None:
        self._terminal = stream.isatty()
        self.live = self._terminal or type(stream).__module__.startswith("ipykernel.")
        self._stream = stream
        self._drawn = 0
        self._next = 0.0

    def due(self) -> bool:
        """Whether it may be drawn again: ten times a second, because steps may be short."""
        return self.live and time.monotonic() >= self._next

    def draw(self, text: str) -> None:
        """Show a text in place of the one before. Blanks cover what was longer: notebooks know no
        command that does.
        """
        if self.live:
            self._next = time.monotonic() + 0.1
            text = text[: self._width()]
        self._stream.write(f"\r{text.ljust(self._drawn)}" if self.live else f"{text}\n")
        self._stream.flush()
        self._drawn = len(text)

    def _width(self) -> int | None:
        """Characters that fit on a terminal's line: what stands on the next is not drawn over."""
        try:
            columns = os.get_terminal_size(self._stream.fileno()).columns if self._terminal else 0
        except (OSError, ValueError):
            return None
        return columns - 1 if columns > 1 else None

    def clear(self) -> None:
        """Take the text away."""
        if self.live and self._drawn:
            self.draw("")
            self._stream.write("\r")
            self._stream.flush()

    def end(self) -> None:
        """Leave the text on the screen."""
        if self.live and self._drawn:
            self._stream.write("\n")
            self._stream.flush()
            self._drawn = 0


def _bar(done: int, total: int, width: int = 30) -> str:
    return f"[{('#' * (width * done // total)).ljust(width, '.')}]"
