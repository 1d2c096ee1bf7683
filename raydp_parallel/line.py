"""A direct line between the driver and a replica: a socket instead of a Ray call.

A Ray call of two actors takes 1 ms however little it carries, and a step pays two; the same trip over sockets takes a
fifth (`benchmarks/step_latency.py`). And a Ray call takes what is larger than 100 KB through the object store, which to
another machine costs 7 ms and more. Messages that Ray has to carry, because their bytes lie in its object store, still
go by Ray; numbers keep the order between the two ways.

A frame: how many buffers, the call's number, the size of what follows in one piece: each buffer's length, and the small
buffers; then the large ones. Of a buffer in shared memory only the descriptor travels, which its length says in its
highest bit.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import socket
import struct
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np

from raydp_parallel import dial, pulse
from raydp_parallel.links import Descriptor, Exposed, Slice

_HEAD = struct.Struct("<IIQ")
_LENGTH = 8
_LARGE = 1 << 16
_SHARED = 1 << 63
_PULSE, _NO_PULSE = b"p", b"-"
_GREETING = 5.0
"""Seconds in which the other end has to say that it holds the pulse. It is awake: it has just said where it listens."""


class LineCut(ConnectionError):
    """The other end is gone."""


class Line:
    """The driver's end.

    Args:
        address: Where the replica listens.
        unread: Takes the buffers of answers that nobody waits for.

    Attributes:
        intact: Whether frames begin where they should. Ctrl-C in the middle of one leaves a line that cannot be used.
        near: Whether the replica is on this machine.
    """

    def __init__(self, address: str, unread: Callable[[list[Any]], object]) -> None:
        self._socket, self.near = dial.call(address)
        self._ending = threading.Lock()
        if self.near:
            self._listen_for_its_end()
        self._unread = unread
        self._reading = threading.Lock()
        self.intact = True
        self._waiting: set[int] = set()
        self._arrived: dict[int, list[Any]] = {}

    def _listen_for_its_end(self) -> None:
        """Hand over a pulse, and cut the line as soon as that stops: long before the kernel would."""
        file = pulse.make()
        felt = None
        try:
            felt = pulse.Pulse(file) if file is not None else None
            socket.send_fds(self._socket, [_PULSE], [file] if file is not None else [])
        finally:
            if file is not None:
                os.close(file)
        self._socket.settimeout(_GREETING)
        greeting = self._socket.recv(1)
        self._socket.settimeout(None)
        if not greeting:
            raise LineCut("the other end hung up at once")
        if felt is not None and greeting == _PULSE:
            threading.Thread(target=self._cut_after, args=(felt,), name="raydp-pulse", daemon=True).start()

    def _cut_after(self, felt: pulse.Pulse) -> None:
        felt.wait()
        self.cut()

    def limit(self, seconds: float) -> None:
        """Take the line for cut when a frame stands still for so long: the other end hangs in the midst of it."""
        interval = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._socket.setsockopt(socket.SOL_SOCKET, option, interval)

    def send(self, number: int, buffers: Sequence[Any]) -> None:
        """Send a call; its answer comes under the same number."""
        self._waiting.add(number)
        try:
            write_frame(self._socket, number, buffers)
        except OSError:
            pass  # the reader finds the line cut, and says so as for any death
        except BaseException:
            self.intact = False
            raise

    def receive(self, number: int, timeout: float | None) -> list[Any]:
        """The answer to a call.

        Raises:
            LineCut: The replica's process ended.
            TimeoutError: No answer came in time.
        """
        with self._reading:
            while number not in self._arrived:
                self._take_in(timeout)
            self._waiting.discard(number)
            return self._arrived.pop(number)

    def _take_in(self, timeout: float | None) -> None:
        found, buffers = self._read_frame(timeout)
        if found in self._waiting:
            self._arrived[found] = buffers
        else:
            # The answer to a call that was given up (Ctrl-C); nobody waits for it.
            self._unread(buffers)

    def look(self, numbers: Collection[int]) -> set[int]:
        """Read what has come. Returns which answers are here: `receive` would not wait; all if the line is cut."""
        with self._reading:
            try:
                while self._readable(0):
                    self._take_in(None)
            except (OSError, ValueError):  # a closed socket has no number to wait for
                self.intact = False  # perhaps in the middle of a frame
                return {*numbers}
            return {number for number in numbers if number in self._arrived}

    def file(self) -> int:
        """The number of the socket, for who waits for several; -1 once it is closed."""
        return self._socket.fileno()

    def waits_for(self) -> int:
        """How many answers are waited for, by whomever."""
        return len(self._waiting)

    def _read_frame(self, timeout: float | None) -> tuple[int, list[Any]]:
        if not self.intact:
            raise LineCut("the line was left in the middle of a frame")
        try:
            if timeout is not None and not self._readable(timeout):
                raise TimeoutError(f"no answer within {timeout:g} s")
            return read_frame(self._socket)
        except TimeoutError:
            raise
        except (OSError, ValueError) as error:  # a closed socket has no number to wait for
            raise LineCut("the other end of the line is gone") from error
        except BaseException:
            self.intact = False
            raise

    def _readable(self, timeout: float) -> bool:
        waiting = select.poll()
        waiting.register(self._socket, select.POLLIN)
        return bool(waiting.poll(timeout * 1e3))

    @property
    def busy(self) -> bool:
        """Whether an answer is still to come, which the replica may be sending."""
        return bool(self._waiting)

    def give_up(self, number: int) -> None:
        """Nobody waits for this answer any more."""
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
    listener: dial.Listener,
    answer: Callable[[int, list[Any]], Sequence[Any]],
    meet: Callable[[int], None] = lambda process: None,
) -> None:
    """Answer one caller's calls, until it hangs up.

    Args:
        listener: Where it calls.
        answer: Answers a call.
        meet: Is told the caller's process, as this one knows it; 0 if it cannot be seen from here.
    """
    connection, process, near = listener.accept()
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
        connection.sendall(_NO_PULSE)
        yield
        return
    held = pulse.Pulse(files[0])
    os.close(files[0])
    held.hold()
    try:
        connection.sendall(_PULSE)
        yield
    finally:
        held.let_go()


def write_frame(connection: socket.socket, number: int, buffers: Sequence[Any]) -> None:
    """Send some buffers under a number."""
    lengths: list[int] = []
    small: list[Any] = []
    large: list[Any] = []
    for buffer in buffers:
        flag = 0
        if type(buffer) is bytes:
            data: Any = buffer
        elif isinstance(buffer, (Slice, Exposed)):
            data, flag = pickle.dumps(tuple(buffer.descriptor)), _SHARED
        else:
            data = memoryview(buffer).cast("B")
        size = len(data)
        lengths.append(size | flag)
        (small if size <= _LARGE else large).append(data)
    words = struct.pack(f"<{len(lengths)}Q", *lengths)
    head = _HEAD.pack(len(lengths), number, len(words) + sum(map(len, small)))
    connection.sendall(b"".join([head, words, *small]))
    for data in large:
        connection.sendall(data)


def read_frame(connection: socket.socket) -> tuple[int, list[Any]]:
    """Wait for a frame: its number, and its buffers: bytes, arrays if they are large, descriptors of shared memory."""
    count, number, size = _HEAD.unpack(_read(connection, _HEAD.size))
    body = _read(connection, size)
    at = count * _LENGTH
    buffers: list[Any] = []
    for length in struct.unpack_from(f"<{count}Q", body):
        plain = length & ~_SHARED
        if plain > _LARGE:
            buffers.append(_read_array(connection, plain))
            continue
        found = body[at : at + plain]
        at += plain
        buffers.append(Descriptor(*pickle.loads(found)) if length & _SHARED else found)
    return number, buffers


def _read(connection: socket.socket, size: int) -> bytes:
    data = connection.recv(size, socket.MSG_WAITALL)
    while len(data) < size:  # a signal, or more than the socket's buffer holds
        more = connection.recv(size - len(data), socket.MSG_WAITALL)
        if not more:
            raise LineCut("the other end of the line is gone")
        data += more
    return data


def _read_array(connection: socket.socket, size: int) -> np.ndarray:
    whole = np.empty(size, dtype=np.uint8)
    view, at = memoryview(whole.data), 0
    while at < size:
        got = connection.recv_into(view[at:], size - at, socket.MSG_WAITALL)
        if not got:
            raise LineCut("the other end of the line is gone")
        at += got
    return whole


class Turnstile:
    """Lets calls through one at a time, in the order of their numbers, whichever way they come."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._next = 0
        self._taken = False

    def take(self, number: int) -> _Turn:
        """Wait for one's turn, and hold it for the block."""
        return _Turn(self, number)

    def enter(self, number: int) -> None:
        """Wait for a turn, and take it."""
        with self._changed:
            if self._next != number or self._taken:
                self._changed.wait_for(lambda: self._next >= number and not self._taken)
            if self._next > number:
                raise LookupError(f"call {number} came after its time")
            self._taken = True

    def leave(self, number: int) -> None:
        """The turn is over."""
        with self._changed:
            self._next, self._taken = number + 1, False
            self._changed.notify_all()

    def skip_to(self, number: int) -> None:
        """Wait for no call before ``number`` any more, once the one that runs has ended."""
        with self._changed:
            self._changed.wait_for(lambda: not self._taken)
            self._next = max(self._next, number)
            self._changed.notify_all()


class _Turn:
    """A turn, held for a block. Not a generator, which takes longer."""

    def __init__(self, stile: Turnstile, number: int) -> None:
        self._stile = stile
        self._number = number

    def __enter__(self) -> None:
        self._stile.enter(self._number)

    def __exit__(self, *_: object) -> None:
        self._stile.leave(self._number)
