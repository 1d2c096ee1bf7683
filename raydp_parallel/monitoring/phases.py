"""The phases of a call: their names, a stopwatch for them, and the difference between two machines'
clocks.

In the replica a call has four phases, one after the other, with no time between them: adopt (undo
what the last forward changed, adopt what the driver changed), copy in, forward or backward, copy
out. The driver adds three that only it can measure: a replica waits (its call is on its way, or
other replicas are not done yet), the driver reduces gradients, or the replica is idle, without a
call.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple

FORWARD = ("adopt", "copy in", "forward", "copy out")
BACKWARD = ("adopt", "copy in", "backward", "copy out")
IN_REPLICA = {"forward": FORWARD, "backward": BACKWARD}
"""The phases of a replica's call, by the method that is called."""

OpenSpan = Callable[[str], contextlib.AbstractContextManager[Any] | None]
"""Opens a span for a phase, for a profiler; None where no profiler runs."""


def unseen(_phase: str) -> None:
    """No span: no profiler runs."""


class Laps:
    """The stopwatch of one call.

    Args:
        names: Its phases, in order.
        span: Opens a span for each.
    """

    def __init__(self, names: tuple[str, ...], span: OpenSpan = unseen) -> None:
        self._names = names
        self._span = span
        self._open: contextlib.AbstractContextManager[Any] | None = None
        self._stamps: list[float] = []

    def begin(self, number: int) -> None:
        """Begin the phase with this number, and end the one before."""
        if len(self._stamps) == number:
            self._stamps.append(time.perf_counter())
            if self._span is not unseen:
                self._close()
                self._open = self._span(self._names[number])
                if self._open is not None:
                    self._open.__enter__()

    def end(self) -> tuple[float, ...]:
        """When each phase began, and when the last ended. Phases that an exception skipped took no
        time.
        """
        now = time.perf_counter()
        self._close()
        return (*self._stamps, *[now] * (len(self._names) + 1 - len(self._stamps)))

    def _close(self) -> None:
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None


class Clock:
    """The difference between a replica's clock and the driver's, worked out from calls alone.

    A call is sent before it begins and answered after it ends, which bounds the difference from
    both sides. Processes of one machine have one clock: as long as the bounds allow 0, the
    difference is 0.
    """

    def __init__(self) -> None:
        self._least = float("-inf")
        self._most = float("inf")

    def heard(self, sent: float, stamps: tuple[float, ...], received: float) -> None:
        """Take a call into account.

        Args:
            sent: When it was sent, by the driver's clock.
            stamps: Its phases, by the replica's clock.
            received: When its answer was received, by the driver's clock.
        """
        self._least = max(self._least, sent - stamps[0])
        self._most = min(self._most, received - stamps[-1])

    @property
    def offset(self) -> float:
        """What to add to the replica's times to get the driver's."""
        if self._least <= 0 <= self._most or self._least == float("-inf"):
            return 0.0
        return (self._least + self._most) / 2


class ChunkSpan(NamedTuple):
    """One chunk of a call, as it happened.

    Attributes:
        replica: The number of the replica that ran it.
        sent: When it was sent, by the driver's clock.
        laps: When each of its phases began, and when the last ended, by the driver's clock; empty
            if it failed.
    """

    replica: int
    sent: float
    laps: tuple[float, ...]


class CallSpan(NamedTuple):
    """One call, as it happened. Times are by the driver's clock, in seconds.

    Attributes:
        method: ``"forward"``, ``"backward"`` or ``"reduce"``.
        number: Its number among calls of this method.
        model: The name of the model.
        began: When the driver began to prepare it.
        sent: When all chunks were sent.
        ended: When all had answered.
        chunks: Its chunks.
    """

    method: str
    number: int
    model: str
    began: float
    sent: float
    ended: float
    chunks: tuple[ChunkSpan, ...]
