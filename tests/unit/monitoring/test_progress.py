"""Progress for people: drawn over where that works, a few lines elsewhere, nothing about short
waits.
"""

from __future__ import annotations

import fcntl
import io
import logging
import os
import pty
import struct
import termios

import pytest

from raydp_parallel import Progress, progress
from raydp_parallel.progress import Waiting


class Terminal(io.StringIO):
    """A stream that can be drawn over."""

    def isatty(self) -> bool:
        return True


def test_ten_lines_where_nothing_can_be_drawn_over() -> None:
    stream = io.StringIO()
    with Progress(100, stream=stream) as bar:
        for number in range(100):
            bar.advance(f"loss {number}")
    lines = stream.getvalue().splitlines()
    assert len(lines) == 10
    assert lines[-1] == f"[{'#' * 30}] step 100/100  loss 99"


@pytest.mark.parametrize("total", [1, 3, 7, 11])
def test_the_last_step_is_always_shown(total: int) -> None:
    stream = io.StringIO()
    with Progress(total, "batch", stream=stream) as bar:
        for _ in range(total):
            bar.advance()
    assert stream.getvalue().splitlines()[-1].endswith(f"batch {total}/{total}")


def test_one_line_on_a_terminal() -> None:
    """Shorter lines cover longer ones; at the end the cursor is on a line of its own."""
    stream = Terminal()
    with Progress(10, stream=stream) as bar:
        for number in range(10):
            bar.advance("a long note" if number == 0 else "")
    text = stream.getvalue()
    assert text.count("\n") == 1 and text.endswith("\n")
    first, *others = text.strip("\r\n").split("\r")
    assert len(others[0]) >= len(first.rstrip())


def test_one_line_in_a_notebook() -> None:
    """With output that is no terminal, and can be drawn over all the same."""
    stream = type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})()
    with Progress(20, stream=stream) as bar:
        for _ in range(20):
            bar.advance()
    assert stream.getvalue().count("\n") == 1


def test_nothing_to_count_is_an_error() -> None:
    with pytest.raises(ValueError, match="total=0"):
        Progress(0)


def test_a_short_wait_is_not_worth_a_word(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "raydp_parallel")
    stream = Terminal()
    with Waiting("replicas", 2, stream) as tell:
        tell(0)
    assert not stream.getvalue() and not caplog.text


class Clock:
    """What time it is, as the test says."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        """As that of `time`."""
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Stands in for the time."""
    found = Clock()
    monkeypatch.setattr(progress, "time", found)
    return found


def test_a_long_wait_says_what_for(caplog: pytest.LogCaptureFixture, clock: Clock) -> None:
    """On a terminal each second, as a bar; in the log now and then; and the line is gone at the
    end.
    """
    caplog.set_level(logging.INFO, "raydp_parallel")
    stream = Terminal()
    with Waiting("replicas", 2, stream) as tell:
        for at, done in ((3.0, 0), (4.0, 1), (14.0, 1)):
            clock.now = at
            tell(done)
    first, second, *_, last, end = stream.getvalue().removeprefix("\r").split("\r")
    assert first.strip() == "[............] raydp_parallel: waiting for replicas: 0 of 2 after 3 s"
    assert second.strip() == "[######......] raydp_parallel: waiting for replicas: 1 of 2 after 4 s"
    assert last.isspace() and len(last) >= len(second) and not end
    assert [record.message for record in caplog.records] == [
        "waiting for replicas: 0 of 2 after 3 s",
        "waiting for replicas: 1 of 2 after 14 s",
    ]


def test_a_long_wait_is_drawn_in_a_notebook_and_not_in_a_file(clock: Clock) -> None:
    """A notebook knows no command that clears a line: blanks cover it."""
    notebook = type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})()
    for stream, drawn in ((notebook, True), (io.StringIO(), False)):
        clock.now = 0.0
        with Waiting("replicas", 2, stream) as tell:
            clock.now = 5.0
            tell(1)
        assert ("[######......]" in stream.getvalue()) is drawn
        assert "\x1b" not in stream.getvalue()


def test_a_line_fits_the_terminal() -> None:
    """What is longer would begin a line of its own each time."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 25, 40, 0, 0))
    with open(theirs, "w") as stream, Progress(3, "step", stream=stream) as bar:
        bar.advance("a note that is longer than the rest of the line")
    drawn = os.read(ours, 1000).decode()
    os.close(ours)
    assert drawn.startswith("\r[##########....................] step 1")
    assert len(drawn.strip("\r\n")) == 39
