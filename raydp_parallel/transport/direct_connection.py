"""A direct line between the driver and a replica: a socket instead of a Ray call.

A Ray call of two actors takes 1 ms however little it carries, and a step pays two; the same trip
over sockets takes a fifth (`benchmarks/step_latency.py`). And a Ray call takes what is larger than
100 KB through the object store, which to another machine costs 7 ms and more. A replica that has a
line gets all its calls over it. What lies in the object store, once for all replicas of a node, Ray
brings beside the line (`links.Delivered`).

[Note: calls that wait]
The replica reads nothing while it computes, nor while it sends an answer that is not taken. A
thread that sent it more than the socket holds would wait for it, with locks in hand. So a call that
does not fit beside those that are not answered yet waits in `Line`, and so do those behind it; they
are sent by the thread that reads the answers, one by one.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from raydp_parallel.devices import forks
from raydp_parallel.transport import handshake, process_end
from raydp_parallel.transport.frames import (
    QUIETLY,
    LineCut,
    StoodStill,
    read_frame,
    size_of,
    write_frame,
)

_PULSE, _NO_PULSE = b"p", b"-"
_ROOM = 1 << 15
"""Bytes that a socket takes in whether or not anything reads them."""

_TURN = 0.2
"""Seconds after which a thread that waits for another's reading looks by itself. Ctrl-C may have
hit that one before it could say that it reads no more."""

_SIGNAL_TURN = 0.5
"""Seconds of a wait between two looks for signals."""

_GLANCE = 0.001
"""Seconds that `Line.look` leaves to another thread that reads."""

_LATE = "no answer in time"

_GREETING = 5.0
"""Seconds in which the other end has to say that it holds the pulse. It is awake: it has just said
where it listens.
"""


class Connection:
    """The driver's end.

    Args:
        address: Where the replica listens.
        unread: Takes the buffers of answers that nobody waits for.

    Attributes:
        near: Whether the replica is on this machine.
    """

    def __init__(self, address: str, unread: Callable[[list[Any]], object]) -> None:
        self._socket, _, self.near = handshake.call(address)
        forks.close_in_child(self._socket)
        forks.tell_child(self)
        self._ending = threading.Lock()
        if self.near:
            self._listen_for_its_end()
        self._unread = unread
        self._sends = self._reads = True
        self._stood_still = False
        # What follows changes under this lock. Entered as it is, and not as the condition, whose
        # way there is Python that Ctrl-C may leave with the lock in hand.
        self._state = threading.Lock()
        self._changed = threading.Condition(self._state)
        self._reader: object = None
        # Taken before that one, and held while something is sent, so that calls keep their order.
        self._sending = threading.Lock()
        self._held: deque[tuple[int, Sequence[Any]]] = deque()
        self._owed: dict[int, int] = {}
        self._waiting: set[int] = set()
        self._arrived: dict[int, list[Any]] = {}

    def _listen_for_its_end(self) -> None:
        """Hand over a pulse, and cut the line as soon as that stops: long before the kernel
        would.
        """
        file = process_end.make()
        felt = None
        try:
            felt = process_end.Pulse(file) if file is not None else None
            socket.send_fds(self._socket, [_PULSE], [file] if file is not None else [], QUIETLY)
        finally:
            if file is not None:
                os.close(file)
        self._socket.settimeout(_GREETING)
        greeting = self._socket.recv(1)
        self._socket.settimeout(None)
        if not greeting:
            raise LineCut("the other end hung up at once")
        if felt is not None and greeting == _PULSE:
            threading.Thread(
                target=self._cut_after, args=(felt,), name="raydp-pulse", daemon=True
            ).start()

    def _cut_after(self, felt: process_end.Pulse) -> None:
        if felt.wait():
            self.cut()

    def after_fork(self) -> None:
        """The socket is closed already, and not shut down: it is the parent's as well."""
        self._ending, self._state, self._sending = (threading.Lock() for _ in range(3))
        self._changed = threading.Condition(self._state)
        self._reader = None

    def process(self, number: int) -> int | None:
        """A descriptor of the process at the other end, if it is the one that calls itself so. See
        `handshake`.
        """
        return handshake.descriptor(self._socket, number) if self.near else None

    def limit(self, seconds: float) -> None:
        """Take the line for cut when a frame stands still for so long: the other end hangs in the
        midst of it.
        """
        interval = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._socket.setsockopt(socket.SOL_SOCKET, option, interval)

    @property
    def intact(self) -> bool:
        """Whether frames begin where they should. What breaks off in the midst of one ends that
        direction.
        """
        return self._sends and self._reads

    def send(self, number: int, buffers: Sequence[Any]) -> None:
        """Send a call, or keep it back until it fits; its answer comes under the same number."""
        size = size_of(buffers)
        if self._owed and not self._fits(size) and not self._owed.keys() <= self._waiting:
            self.look(())  # nobody waits for some of what is owed; it may have come
        with self._sending:
            with self._state:
                self._waiting.add(number)
                if self._held or not self._fits(size):
                    self._held.append((number, buffers))
                    return
                self._owed[number] = size
            self._write(number, buffers)

    def _write(self, number: int, buffers: Sequence[Any]) -> None:
        try:
            write_frame(self._socket, number, buffers)
        except OSError as error:
            self._sends = False
            self._stood_still |= isinstance(error, BlockingIOError)
            self.cut()  # the reader finds it so, and says so as for any death
        except BaseException:
            self._sends = False
            raise

    def _fits(self, size: int) -> bool:
        """Whether the socket takes so many bytes now. What was given up is owed all the same."""
        return not self._owed or size + sum([*self._owed.values()]) <= _ROOM

    @property
    def holds_back(self) -> bool:
        """Whether calls wait here to be sent, until somebody reads what comes before."""
        return bool(self._held)

    def _send_held(self) -> None:
        """Send what fits now, after an answer was read."""
        while self._held:
            with self._sending:
                with self._state:
                    if not (self._sends and self._held and self._fits(size_of(self._held[0][1]))):
                        return
                    number, buffers = self._held.popleft()
                    self._owed[number] = size_of(buffers)
                self._write(number, buffers)

    def receive(self, number: int, timeout: float | None) -> list[Any]:
        """The answer to a call.

        Raises:
            LineCut: The replica's process ended.
            TimeoutError: No answer came in time.
            StoodStill: A frame stood still for longer than `limit` allows; there will be no answer.
        """
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        me = object()
        try:
            while True:
                with self._state:
                    if number in self._arrived:
                        self._waiting.discard(number)
                        return self._arrived.pop(number)
                    if self._reader not in (None, me):
                        self._await_reader(deadline)
                        continue
                    self._reader = me
                self._await_frame(deadline)
                self._take_in()
        finally:
            self._leave(me)

    def _leave(self, reader: object) -> None:
        # nothing is called on the way, so that Ctrl-C cannot come between
        if self._reader is reader:
            self._reader = None
        with self._state:
            self._changed.notify_all()

    def _await_reader(self, deadline: float) -> None:
        """Wait a turn for the thread that reads."""
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(_LATE)
        self._changed.wait(min(left, _TURN))

    def _await_frame(self, deadline: float) -> None:
        """Wait until there is something to read. Ctrl-C does no harm here: most of the time is
        spent so.

        The wait is in turns: a signal that comes just before a wait begins does not end it, and
        Python looks for signals between two of them.
        """
        try:
            while self._reads:
                left = max(0.0, deadline - time.monotonic())
                if self._readable(min(left, _SIGNAL_TURN)):
                    return
                if left <= _SIGNAL_TURN:
                    raise TimeoutError(_LATE)
        except ValueError as error:  # a closed socket has no number to wait for
            raise LineCut("the line was closed") from error

    def _take_in(self) -> None:
        """Read a frame, and put it where the one who waits for it looks."""
        if not self._reads:
            raise self._why()
        try:
            found, buffers = read_frame(self._socket)
            with self._state:
                self._owed.pop(found, None)
                wanted = found in self._waiting
                if wanted:
                    self._arrived[found] = buffers
                self._changed.notify_all()
        except OSError as error:
            self._reads = False
            self._stood_still |= isinstance(error, BlockingIOError)
            raise self._why() from error
        except BaseException:
            self._reads = False
            raise
        if not wanted:  # the answer to a call that was given up
            self._unread(buffers)
        self._send_held()

    def _why(self) -> Exception:
        """What to raise where nothing can be read any more."""
        return (
            StoodStill(_LATE) if self._stood_still else LineCut("the other end of the line is gone")
        )

    def look(self, numbers: Collection[int]) -> set[int]:
        """Read what has come. Returns which answers are here: `receive` would not wait; all if the
        line is cut.
        """
        me = object()
        try:
            with self._state:
                if self._reader is not None and not self._arrived.keys() & {*numbers}:
                    self._changed.wait(_GLANCE)
                if self._reader is None:
                    self._reader = me
            if self._reader is me:
                while self._reads and self._readable(0):
                    self._take_in()
        except (OSError, ValueError):  # a closed socket has no number to wait for
            self._reads = False
        finally:
            self._leave(me)
        return (
            {number for number in numbers if number in self._arrived} if self._reads else {*numbers}
        )

    def file(self) -> int:
        """The number of the socket, for who waits for several; -1 once it is closed."""
        return self._socket.fileno()

    def waits_for(self) -> int:
        """How many answers are waited for, by whomever."""
        return len(self._waiting)

    def _readable(self, timeout: float) -> bool:
        waiting = select.poll()
        waiting.register(self._socket, select.POLLIN)
        return bool(waiting.poll(timeout * 1e3))

    def give_up(self, number: int) -> None:
        """Nothing waits for this answer any more. It is owed all the same, and read when it
        comes.
        """
        with self._state:
            self._waiting.discard(number)
            arrived = self._arrived.pop(number, None)
        if arrived is not None:
            self._unread(arrived)

    def close(self) -> None:
        """Hang up, also if a thread waits for an answer. May be called twice."""
        self.cut()
        with self._ending:
            self._socket.close()

    def cut(self) -> None:
        """Nobody is there any more: nothing is read but what has come already."""
        with self._ending, contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # what came before can still be read


def serve(
    listener: handshake.Listener,
    answer: Callable[[int, list[Any]], Sequence[Any]],
    meet: Callable[[int], None] = lambda process: None,
) -> None:
    """Answer one caller's calls, until it hangs up; nobody's, if it does not come in time.

    Args:
        listener: Where it calls.
        answer: Answers a call.
        meet: Is told the caller's process, as this one knows it; 0 if it cannot be seen from here.
    """
    forks.close_in_child(listener)
    caller = listener.accept()
    if caller is None:
        return
    connection, process, near = caller
    forks.close_in_child(connection)
    meet(process)
    beating = _pulse(connection) if near else contextlib.nullcontext()
    with contextlib.closing(connection), contextlib.suppress(OSError), beating:
        while True:
            number, buffers = read_frame(connection)
            write_frame(connection, number, answer(number, buffers))


@contextlib.contextmanager
def _pulse(connection: socket.socket) -> Iterator[None]:
    """Hold the caller's pulse, if it brings one, while this thread serves."""
    _, files, _, _ = socket.recv_fds(connection, 1, 1)
    if not files:
        connection.sendall(_NO_PULSE, QUIETLY)
        yield
        return
    held = process_end.Pulse(files[0])
    os.close(files[0])
    if not held.hold():
        connection.sendall(_NO_PULSE, QUIETLY)
        yield
        return
    try:
        connection.sendall(_PULSE, QUIETLY)
        yield
    finally:
        held.let_go()
