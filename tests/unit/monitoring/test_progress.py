"""Progress for people: drawn over where that works, a few lines elsewhere, nothing about short
waits.
"""

from __future__ import annotations

import io
import logging

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
    """Whose output is no terminal, and can be drawn over all the same."""
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


def test_a_long_wait_says_what_for(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal each second, in the log now and then, and the line is gone at the end."""
    caplog.set_level(logging.INFO, "raydp_parallel")
    times = iter([0.0, 3.0, 4.0, 14.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(times))
    stream = Terminal()
    with Waiting("replicas", 2, stream) as tell:
        for done in (0, 1, 1):
            tell(done)
    assert "replicas: 1 of 2 after 4 s" in stream.getvalue()
    assert stream.getvalue().endswith("\r\x1b[K")
    assert [record.message for record in caplog.records] == [
        "waiting for replicas: 0 of 2 after 3 s",
        "waiting for replicas: 1 of 2 after 14 s",
    ]
