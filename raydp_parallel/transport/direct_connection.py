"""The direct connection between the driver and a replica: a socket instead of Ray calls.

A Ray call to two actors takes at least 1 ms, and a step makes two; the same calls over sockets take
a fifth of that (`benchmarks/step_latency.py`). Also, Ray sends arguments over 100 KB through the
object store, which takes 7 ms and more to another machine. A replica that has a direct connection
gets all its calls over it. Buffers in the object store, which are there once for all replicas of a
node, are delivered by Ray beside the connection (`links.Delivered`).

[Note: frames]
A frame begins with the number of buffers, the call's number, and the size of the body. The body
holds each buffer's length and the small buffers; the large buffers follow it. For a buffer in
shared memory only the descriptor is sent, which the highest bit of its length marks; for a buffer
that Ray delivers only its number, which the next bit marks.

[Note: calls that wait]
The replica does not read while it computes, nor while it sends an answer that the driver does not
read. A thread that sent more than the socket's buffer holds would block, with locks held. So a call
that does not fit beside the calls that are not answered yet waits in `Connection`, and so do the
calls behind it; the thread that reads the answers sends them, one by one.

[Note: the end of a process]
The sockets of a killed process close late: the kernel frees its memory first, which takes 20 to
80 ms for a process with torch, and a forked child may keep them open. Locks that its threads held
are freed before that. So a replica's thread holds a lock in shared memory for as long as it serves
its connection, and a thread of the driver waits for that lock, and gets it 0.3 ms after a SIGKILL.
POSIX calls such a lock a robust mutex: a thread that takes it after its owner's death gets an error
code instead of waiting for ever.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import math
import mmap
import os
import pickle
import select
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np

from raydp_parallel.devices import forks
from raydp_parallel.devices.buffers import Descriptor, SharedBuffer
from raydp_parallel.devices.process import Waiters
from raydp_parallel.transport import handshake
from raydp_parallel.transport.links.object_store import Delivered
from raydp_parallel.transport.links.shared import Exposed

_HEAD = struct.Struct("<IQQ")
_LENGTH = 8
_LARGE = 1 << 16
_DROPPED_AT_ONCE = 1 << 12
_IN_SHARED = 1 << 63
_DELIVERED = 1 << 62
_NUMBER = struct.Struct("<Q")

QUIETLY = getattr(socket, "MSG_NOSIGNAL", 0)
"""Without this flag, sending to a process that died would end a program that has restored the
default action of SIGPIPE.
"""


class LineCut(ConnectionError):
    """The other end is gone."""


class StoodStill(TimeoutError):
    """The other end stopped in the middle of a frame, and the connection was shut down."""


def write_frame(connection: socket.socket, number: int, buffers: Sequence[Any]) -> None:
    """Send the buffers of a call with its number."""
    lengths: list[int] = []
    small: list[Any] = []
    large: list[Any] = []
    for buffer in buffers:
        flag = 0
        if type(buffer) is bytes:
            data: Any = buffer
        elif isinstance(buffer, (SharedBuffer, Exposed)):
            data, flag = pickle.dumps(tuple(buffer.descriptor)), _IN_SHARED
        elif isinstance(buffer, Delivered):
            data, flag = _NUMBER.pack(buffer.number), _DELIVERED
        else:
            data = memoryview(buffer).cast("B")
        size = len(data)
        lengths.append(size | flag)
        (small if size <= _LARGE else large).append(data)
    words = struct.pack(f"<{len(lengths)}Q", *lengths)
    head = _HEAD.pack(len(lengths), number, len(words) + sum(map(len, small)))
    connection.sendall(b"".join([head, words, *small]), QUIETLY)
    for data in large:
        connection.sendall(data, QUIETLY)


def size_of(buffers: Sequence[Any]) -> int:
    """Bytes of the buffers that are sent in the frame, without those in shared memory."""
    elsewhere = (SharedBuffer, Exposed, Delivered)
    return sum(memoryview(buffer).nbytes for buffer in buffers if not isinstance(buffer, elsewhere))


def read_frame(connection: socket.socket) -> tuple[int, list[Any]]:
    """Wait for a frame; returns the call's number and the buffers.

    A buffer is bytes, an array if it is large, a descriptor of shared memory, or the number of a
    buffer that Ray delivers.

    Where there is no memory for a buffer, the `MemoryError` takes its place: the frame is read to
    its end, so that the next one can be read.
    """
    count, number, size = _HEAD.unpack(_read(connection, _HEAD.size))
    lengths, small = _read_body(connection, count, size)
    buffers: list[Any] = []
    for length in lengths:
        plain = length & ~(_IN_SHARED | _DELIVERED)
        if plain > _LARGE:
            buffers.append(_read_array(connection, plain))
            continue
        found = next(small)
        buffers.append(found if isinstance(found, MemoryError) else _described(found, length))
    return number, buffers


def _read_body(
    connection: socket.socket, count: int, size: int
) -> tuple[Sequence[int], Iterator[bytes | MemoryError]]:
    """The lengths of all buffers, and the small buffers. If there is no memory for all of these at
    once, they are read one by one.
    """
    words = f"<{count}Q"
    try:
        body = _read(connection, size)
    except MemoryError:
        lengths = struct.unpack(words, _read(connection, count * _LENGTH))
        sizes = [plain for plain in map(_plain, lengths) if plain <= _LARGE]
        return lengths, iter([_read_or_drop(connection, plain) for plain in sizes])
    lengths = struct.unpack_from(words, body)
    return lengths, _parts(body, count * _LENGTH, lengths)


def _parts(body: bytearray, at: int, lengths: Sequence[int]) -> Iterator[bytes | MemoryError]:
    view = memoryview(body)
    for plain in map(_plain, lengths):
        if plain <= _LARGE:
            yield _copied(view[at : at + plain])
            at += plain


def _plain(length: int) -> int:
    """A length without its marks."""
    return length & ~(_IN_SHARED | _DELIVERED)


def _described(found: bytes, length: int) -> bytes | Descriptor | Delivered:
    """A small buffer, or the object that it describes, by the two highest bits of its length."""
    if length & _IN_SHARED:
        return Descriptor(*pickle.loads(found))
    if length & _DELIVERED:
        return Delivered(*_NUMBER.unpack(found))
    return found


def _read(connection: socket.socket, size: int) -> bytearray:
    """So many bytes. If there is no memory for them, none is read."""
    data = bytearray(size)
    _fill(connection, memoryview(data))
    return data


def _fill(connection: socket.socket, view: memoryview) -> None:
    """Read as many bytes as there is space for."""
    at, size = 0, len(view)
    while at < size:  # more than once after a signal, or if the socket's buffer is smaller
        got = connection.recv_into(view[at:], size - at, socket.MSG_WAITALL)
        if not got:
            raise LineCut("the other end of the line is gone")
        at += got


def _drop(connection: socket.socket, size: int) -> None:
    """Read so many bytes, and keep none."""
    while size:
        size -= len(_read(connection, min(size, _DROPPED_AT_ONCE)))


def _read_or_drop(connection: socket.socket, size: int) -> bytes | MemoryError:
    """So many bytes; the error, and the bytes are read all the same, if there is no memory."""
    try:
        found = _read(connection, size)
    except MemoryError as error:
        _drop(connection, size)
        return error
    return _copied(found)


def _copied(found: bytearray | memoryview) -> bytes | MemoryError:
    try:
        return bytes(found)
    except MemoryError as error:
        return error


def _read_array(connection: socket.socket, size: int) -> np.ndarray | MemoryError:
    try:
        whole = np.empty(size, dtype=np.uint8)
    except MemoryError as error:
        _drop(connection, size)
        return error
    _fill(connection, memoryview(whole.data))
    return whole


_PULSE_SIZE = 4096
_ATTRIBUTES_SIZE = 64
"""Bytes for a lock's attributes; both C libraries of Linux need less. A lock needs far less than a
page.
"""

_PROCESS_SHARED = 1
_ROBUST = 1


class Pulse:
    """A robust mutex in an anonymous file that two processes have mapped.

    Args:
        file: The file's descriptor, which may be closed afterwards.
    """

    def __init__(self, file: int) -> None:
        self._memory = mmap.mmap(file, _PULSE_SIZE)
        self._lock = ctypes.c_char.from_buffer(self._memory)
        self._library = ctypes.CDLL(None)

    def hold(self) -> bool:
        """Take the lock, until `let_go` or the end of this thread; returns whether that worked."""
        return self._library.pthread_mutex_lock(ctypes.byref(self._lock)) in (0, errno.EOWNERDEAD)

    def let_go(self) -> None:
        """Free the lock, in the thread that holds it."""
        self._library.pthread_mutex_unlock(ctypes.byref(self._lock))

    def wait(self) -> bool:
        """Wait until no thread holds the lock, because it was freed or its holder died. Returns
        False if that cannot be told.
        """
        held = self.hold()
        if held:
            self.let_go()
        return held


def make_pulse() -> int | None:
    """A new file with a free lock, which the caller closes; None where there are no robust
    mutexes.
    """
    if not sys.platform.startswith("linux"):
        return None
    with contextlib.suppress(OSError, AttributeError):
        file = os.memfd_create("raydp-pulse")
        try:
            os.ftruncate(file, _PULSE_SIZE)
            if _prepare(Pulse(file)):
                return file
            os.close(file)
        except BaseException:
            os.close(file)
            raise
    return None


def _prepare(pulse: Pulse) -> bool:
    """Initialize the lock; returns whether this system has such locks."""
    library, attributes = pulse._library, (ctypes.c_char * _ATTRIBUTES_SIZE)()
    if library.pthread_mutexattr_init(attributes):
        return False
    set_up = [
        library.pthread_mutexattr_setpshared(attributes, _PROCESS_SHARED),
        library.pthread_mutexattr_setrobust(attributes, _ROBUST),
        library.pthread_mutex_init(ctypes.byref(pulse._lock), attributes),
    ]
    library.pthread_mutexattr_destroy(attributes)
    return not any(set_up)


_PULSE, _NO_PULSE = b"p", b"-"
_ROOM = 1 << 15
"""Bytes that a socket's buffer holds even if the other end does not read."""

_TURN = 0.2
"""Seconds after which a thread that waits for another's reading looks by itself. Ctrl-C may have
hit that one before it could say that it reads no more."""

_SIGNAL_TURN = 0.5
"""Seconds of a wait between two looks for signals."""

_GLANCE = 0.001
"""Seconds that `Line.look` leaves to another thread that reads."""

_LATE = "no answer in time"

_GREETING = 5.0
"""Seconds in which the other end has to answer that it holds the lock. It runs: it has just given
its address.
"""


def _kept(buffer: Any) -> Any:
    """A buffer that can be sent later: a link writes the next call into the same array."""
    return buffer.copy() if isinstance(buffer, np.ndarray) else buffer


class LineSocket:
    """The driver's socket to a replica. Its two directions end apart, each when a frame breaks off
    in the middle, and both at once with the other process.

    Args:
        address: The replica's address.

    Attributes:
        socket: The socket.
        near: Whether the replica is on this machine.
        sends: Whether calls can be sent.
        reads: Whether answers can be read.
    """

    def __init__(self, address: str) -> None:
        self.socket, _, self.near = handshake.call(address)
        forks.close_in_child(self.socket)
        forks.tell_child(self)
        self.sends = self.reads = True
        self._stood_still = False
        self._ending = threading.Lock()
        if self.near:
            self._watch_process()

    def after_fork(self) -> None:
        """Replace the lock. The socket is closed already; it is not shut down, because the parent
        uses it.
        """
        self._ending = threading.Lock()

    def _watch_process(self) -> None:
        """Send the replica a lock, and shut the connection down as soon as that lock is free: long
        before the kernel closes the socket.
        """
        file = make_pulse()
        lock = None
        try:
            lock = Pulse(file) if file is not None else None
            files = array.array("i", [file] if file is not None else [])
            # `socket.send_fds` ignores its flags.
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)]
            self.socket.sendmsg([_PULSE], rights, QUIETLY)
        finally:
            if file is not None:
                os.close(file)
        self.socket.settimeout(_GREETING)
        greeting = self.socket.recv(1)
        self.socket.settimeout(None)
        if not greeting:
            raise LineCut("the other end hung up at once")
        if lock is not None and greeting == _PULSE:
            threading.Thread(
                target=self._cut_after, args=(lock,), name="raydp-pulse", daemon=True
            ).start()

    def _cut_after(self, lock: Pulse) -> None:
        if lock.wait():
            self.cut()

    def process(self, number: int) -> int | None:
        """A descriptor of the process at the other end, if its id is ``number``. See
        `handshake.descriptor`.
        """
        return handshake.descriptor(self.socket, number) if self.near else None

    def limit(self, seconds: float) -> None:
        """Shut the connection down if no byte of a begun frame comes for so long: the other end
        hangs.
        """
        interval = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self.socket.setsockopt(socket.SOL_SOCKET, option, interval)

    def write(self, number: int, buffers: Sequence[Any]) -> None:
        """Send a frame."""
        try:
            write_frame(self.socket, number, buffers)
        except OSError as error:
            self.sends = False
            self._stood_still |= isinstance(error, BlockingIOError)
            self.cut()  # the reader then reports it like any death

    def why(self, error: OSError | None = None) -> Exception:
        """The exception to raise when nothing can be read any more, because of this error or of an
        earlier one.
        """
        self._stood_still |= isinstance(error, BlockingIOError)
        if self._stood_still:
            return StoodStill(_LATE)
        return LineCut("the other end of the line is gone")

    def file(self) -> int:
        """The socket's file descriptor, to wait for several connections; -1 once it is closed."""
        return self.socket.fileno()

    def readable(self, timeout: float) -> bool:
        """Whether there is something to read, within so many seconds."""
        waiting = select.poll()
        waiting.register(self.socket, select.POLLIN)
        return bool(waiting.poll(timeout * 1e3))

    def close(self) -> None:
        """Shut the connection down, and close the socket."""
        self.cut()
        with self._ending:
            self.socket.close()

    def cut(self) -> None:
        """Shut the connection down: only what has arrived already is read."""
        with self._ending, contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # what came before can still be read


class Connection:
    """The driver's end: calls in their order, and the answers for the threads that wait.

    Args:
        address: The replica's address.
        unread: Takes the buffers of answers that no thread waits for.

    Attributes:
        near: Whether the replica is on this machine.
        wire: The socket.
        attendants: What looks for answers besides the threads that wait for one.
    """

    def __init__(self, address: str, unread: Callable[[list[Any]], object]) -> None:
        self.wire = LineSocket(address)
        forks.tell_child(self)
        self.near = self.wire.near
        self._unread = unread
        self.attendants: set[object] = set()
        # The attributes below change under this lock.
        self._state = threading.Lock()
        self._waiters = Waiters()
        self._reader: object = None
        # Taken before the other lock, and held while a call is sent, so that calls keep their
        # order.
        self._sending = threading.Lock()
        self._held: deque[tuple[int, Sequence[Any]]] = deque()
        self._owed: dict[int, int] = {}
        self._waiting: set[int] = set()
        self._arrived: dict[int, list[Any]] = {}

    def after_fork(self) -> None:
        """Replace the locks."""
        self._state, self._sending = threading.Lock(), threading.Lock()
        self._waiters = Waiters()
        self._reader = None

    @property
    def intact(self) -> bool:
        """Whether both directions work. A direction ends when a frame breaks off in the middle."""
        return self.wire.sends and self.wire.reads

    def send(self, number: int, buffers: Sequence[Any]) -> None:
        """Send a call, or hold it back until it fits; its answer has the same number."""
        size = size_of(buffers)
        if self._owed and not self._fits(size) and not self._owed.keys() <= self._waiting:
            self.look(())  # no thread waits for some of the answers; they may have arrived
        with self._sending, self._unbroken():
            with self._state:
                self._waiting.add(number)
                if self._held or not self._fits(size):
                    self._held.append((number, [_kept(buffer) for buffer in buffers]))
                    return
                self._owed[number] = size
            self.wire.write(number, buffers)

    @contextlib.contextmanager
    def _unbroken(self) -> Iterator[None]:
        """End this direction if Ctrl-C comes between noting that a call is sent, and the end of
        sending it.
        """
        try:
            yield
        except BaseException:
            self.wire.sends = False
            raise

    def _fits(self, size: int) -> bool:
        """Whether the socket has space for so many bytes now. Calls that were given up count
        too.
        """
        return not self._owed or size + sum([*self._owed.values()]) <= _ROOM

    @property
    def holds_back(self) -> bool:
        """Whether calls wait here to be sent, until earlier answers are read."""
        return bool(self._held)

    def _send_held(self) -> None:
        """Send what fits now, after an answer was read.

        Ctrl-C between the two leaves it to the next that waits.
        """
        while self._held:
            with self._sending, self._unbroken():
                with self._state:
                    if not (
                        self.wire.sends and self._held and self._fits(size_of(self._held[0][1]))
                    ):
                        return
                    number, buffers = self._held.popleft()
                    self._owed[number] = size_of(buffers)
                self.wire.write(number, buffers)

    def receive(self, number: int, timeout: float | None) -> list[Any]:
        """The answer to a call.

        Raises:
            LineCut: The replica's process ended.
            TimeoutError: No answer came in time.
            StoodStill: A frame stopped for longer than `LineSocket.limit` allows; there will be no
                answer.
        """
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        me = object()
        try:
            while True:
                turn = None
                with self._state:
                    if number in self._arrived:
                        self._waiting.discard(number)
                        return self._arrived.pop(number)
                    if self._reader in (None, me):
                        self._reader = me
                    else:
                        turn = self._waiters.enter()
                if turn is not None:
                    self._await_reader(turn, deadline)
                    continue
                self._await_frame(deadline)
                self._take_in()
        finally:
            # Nothing is called before the reset: Ctrl-C is raised as a function begins or ends.
            if self._reader is me:
                self._reader = None
            with self._state:
                self._waiters.wake()

    def _await_reader(self, turn: threading.Lock, deadline: float) -> None:
        """Wait for the thread that reads, at most `_TURN` seconds."""
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(_LATE)
        self._wait(turn, min(left, _TURN))

    def _wait(self, turn: threading.Lock, seconds: float) -> None:
        if not turn.acquire(timeout=seconds):
            with self._state:
                self._waiters.leave(turn)

    def _await_frame(self, deadline: float) -> None:
        """Wait until there is something to read. Ctrl-C does no harm here: most of the time is
        spent so.

        The wait is in turns: a signal that comes just before a wait begins does not end it, and
        Python looks for signals between two of them.
        """
        try:
            while self.wire.reads:
                left = max(0.0, deadline - time.monotonic())
                if self.wire.readable(min(left, _SIGNAL_TURN)):
                    return
                self._send_held()
                if left <= _SIGNAL_TURN:
                    raise TimeoutError(_LATE)
        except ValueError as error:  # a closed socket has no number to wait for
            raise LineCut("the line was closed") from error

    def _take_in(self) -> None:
        """Read a frame, and keep it for the thread that waits for it."""
        if not self.wire.reads:
            raise self.wire.why()
        try:
            found, buffers = read_frame(self.wire.socket)
            with self._state:
                self._owed.pop(found, None)
                wanted = found in self._waiting
                if wanted:
                    self._arrived[found] = buffers
                self._waiters.wake()
        except OSError as error:
            # Before anything is called: Ctrl-C is raised as a function begins or ends.
            self.wire.reads = False
            raise self.wire.why(error) from error
        except BaseException:
            self.wire.reads = False
            raise
        if not wanted:  # the answer to a call that was given up
            self._unread(buffers)
        self._send_held()

    def look(self, numbers: Collection[int]) -> set[int]:
        """Read the frames that have arrived. Returns the numbers for which `receive` would not
        wait; all if the connection is shut down.
        """
        me = object()
        try:
            turn = None
            with self._state:
                if self._reader is not None and not self._arrived.keys() & {*numbers}:
                    turn = self._waiters.enter()
            if turn is not None:
                self._wait(turn, _GLANCE)
            with self._state:
                if self._reader is None:
                    self._reader = me
            if self._reader is me:
                while self.wire.reads and self.wire.readable(0):
                    self._take_in()
                self._send_held()
        except (OSError, ValueError):  # a closed socket has no number to wait for
            self.wire.reads = False
        finally:
            if self._reader is me:  # as in `receive`
                self._reader = None
            with self._state:
                self._waiters.wake()
        if not self.wire.reads:
            return {*numbers}
        return {number for number in numbers if number in self._arrived}

    def waits_for(self) -> int:
        """The number of answers that are waited for, by all threads."""
        return len(self._waiting)

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
        """Close the connection, also if a thread waits for an answer. May be called twice."""
        self.wire.close()


def serve(
    listener: handshake.Listener,
    answer: Callable[[int, list[Any]], Sequence[Any]],
    meet: Callable[[int], None] = lambda process: None,
    pause: Callable[[], None] = lambda: None,
) -> None:
    """Answer the calls of one client, until it closes the connection; return if none connects in
    time.

    Args:
        listener: The listener that the client connects to.
        answer: Answers a call.
        meet: Is called with the id of the client's process; 0 if it has none in this namespace.
        pause: Is called when an answer was sent.
    """
    forks.close_in_child(listener)
    client = listener.accept()
    if client is None:
        return
    connection, process, near = client
    forks.close_in_child(connection)
    meet(process)
    lock = _held_lock(connection) if near else contextlib.nullcontext()
    with contextlib.closing(connection), contextlib.suppress(OSError), lock:
        while True:
            number, buffers = read_frame(connection)
            write_frame(connection, number, answer(number, buffers))
            pause()


@contextlib.contextmanager
def _held_lock(connection: socket.socket) -> Iterator[None]:
    """Hold the lock that the client sends, if any, while this thread serves."""
    _, files, _, _ = socket.recv_fds(connection, 1, 1)
    if not files:
        connection.sendall(_NO_PULSE, QUIETLY)
        yield
        return
    held = Pulse(files[0])
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
