"""Waits for answers: over direct connections or from Ray, of one replica or of several at once."""

from __future__ import annotations

import errno
import math
import select
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from raydp_parallel.cluster.backend import Death
from raydp_parallel.cluster.ray_api import TURN, RayError, get, in_short, late
from raydp_parallel.transport.direct_connection import Connection, LineCut, StoodStill

_SHORT_TURN = 0.02
"""Seconds of a turn, if several threads read from one connection."""

_OWN = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Errors that say what this process or its machine lacks. They are no sign that a replica died."""


class Called(Protocol):
    """The driver's side of a replica that was called.

    Attributes:
        line: Its direct connection, if it has one.
        unanswered: The numbers of the calls that it has still to answer.
    """

    line: Connection | None
    unanswered: set[int]

    def opened(self, answer: Sequence[Any]) -> Any:
        """An answer, with its attachments where this process can read them."""

    def give_up(self, ref: Any) -> None:
        """Stop waiting for a Ray task."""

    def look_after(self) -> None:
        """Check the replica, after a turn without an answer."""


class Pending:
    """A call that was sent, over the direct connection or as a Ray task.

    Args:
        client: The client that sent it.
        number: Its number at that client.
        ref: The Ray task, None if it went over the connection.

    Attributes:
        turn: How many calls the replica had to answer when this one was sent, itself and those of
            other threads included.
        through_ray: Whether it is a Ray task.
    """

    def __init__(self, client: Called, number: int, ref: Any) -> None:
        self.client = client
        client.unanswered.add(number)
        self.turn = len(client.unanswered)
        self._line = client.line if ref is None else None
        self._number = number
        self._ref = ref
        self._answer: Any = None
        self.through_ray = ref is not None

    def result(self, timeout: float | None) -> Any:
        """Wait for the answer."""
        try:
            return self._result(timeout)
        finally:
            self.client.unanswered.discard(self._number)

    def _result(self, timeout: float | None) -> Any:
        if self._answer is None:
            try:
                self._answer = self._receive(timeout)
            except LineCut:
                return Death("its direct line was cut")
        answer, self._answer = self._answer, None
        try:
            return self.client.opened(answer)
        except OSError as error:
            if error.errno in _OWN:
                raise  # else other replicas would seem to die of it, too
            return Death(f"its memory is gone: {error}")  # it ended right after its answer

    def _receive(self, timeout: float | None) -> Any:
        """The answer as it arrived."""
        if self._line is None:
            return get(self._ref, timeout)
        if not self._line.near:
            return self._receive_from_afar(self._line, timeout)
        return self._line.receive(self._number, timeout)

    @property
    def held_back(self) -> bool:
        """Whether it, or another call to that replica, is sent only once a thread reads answers."""
        return self._line is not None and self._line.holds_back

    def _receive_from_afar(self, line: Connection, timeout: float | None) -> Any:
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            left = deadline - time.monotonic()
            try:
                return line.receive(self._number, max(0.0, min(left, TURN)))
            except StoodStill:
                raise
            except TimeoutError:
                if left <= TURN:
                    raise
                self.client.look_after()

    def give_up(self) -> None:
        """Stop waiting for the answer."""
        self.client.unanswered.discard(self._number)
        if self._line is not None:
            self._line.give_up(self._number)
        else:
            self.client.give_up(self._ref)


class Lost:
    """A call that could not be sent, because the replica is gone.

    Args:
        client: The client that was to send it.
        error: The error of sending.
    """

    through_ray = held_back = False
    turn = 1

    def __init__(self, client: Called, error: Exception) -> None:
        self.client = client
        self._error = error

    def result(self, timeout: float | None) -> Death:
        """The death of the replica."""
        return Death(in_short(self._error))

    def give_up(self) -> None:
        """Do nothing: the call was not sent."""


def await_each(
    calls: Sequence[Pending | Lost], deadlines: Sequence[float], take: Callable[[int, bool], None]
) -> None:
    """Wait for calls, and take each answer as soon as it arrives, in any order.

    Args:
        calls: The calls.
        deadlines: When each is taken at the latest.
        take: Takes the result of a call, by its number and whether its answer arrived.
    """
    left = dict(enumerate(calls))
    while left:
        found = {number for number, call in left.items() if isinstance(call, Lost)}
        for line, numbers in _by_line(left).items():
            found.update(numbers[at] for at in line.look(numbers))
        now = time.monotonic()
        late = {number for number in left if deadlines[number] <= now} - found
        if not found and not late:
            come = _await_some(left, min(deadlines[number] for number in left) - now)
            found = come or set()
            if come is None:
                for call in left.values():
                    call.client.look_after()
        for number in sorted(found | late):
            del left[number]
            take(number, number in found)


def _by_line(left: dict[int, Pending | Lost]) -> dict[Connection, dict[int, int]]:
    """The calls that went over direct connections, by connection and by their numbers there."""
    found: dict[Connection, dict[int, int]] = {}
    for number, call in left.items():
        if isinstance(call, Pending) and call._line is not None:
            found.setdefault(call._line, {})[call._number] = number
    return found


def _await_some(left: dict[int, Pending | Lost], seconds: float) -> set[int] | None:
    """Wait for one turn. Returns the calls that Ray answered; the caller looks for those that
    connections answered. None if no answer arrived.
    """
    refs = {
        number: call._ref
        for number, call in left.items()
        if isinstance(call, Pending) and call._ref is not None
    }
    if refs:
        return _fetch(left, refs, min(TURN, seconds)) or None
    lines = _by_line(left)
    waiting = select.poll()
    # Another thread may have read what this one is about to wait for.
    alone = all(line.waits_for() <= len(numbers) for line, numbers in lines.items())
    turn = TURN if alone else _SHORT_TURN
    for line in lines:
        if line.file() >= 0:
            waiting.register(line.file(), select.POLLIN)
    return set() if waiting.poll(max(1.0, min(turn, seconds) * 1e3)) else None


def _fetch(left: dict[int, Pending | Lost], refs: dict[int, Any], seconds: float) -> set[int]:
    """Get the answers that Ray carries in one call, which costs a fifth of getting each alone."""
    try:
        answers = get([*refs.values()], seconds)
    except RayError:  # one died, or some are late: the others are taken one by one
        missing = late([*refs.values()])
        return {number for number, ref in refs.items() if ref not in missing}
    for number, answer in zip(refs, answers, strict=True):
        left[number]._answer = answer  # type: ignore[union-attr]  # only those that Ray carries
    return {*refs}
