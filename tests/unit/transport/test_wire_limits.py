"""What a line does where something breaks off: aborted calls, timeouts, want of memory, and many
threads.
"""

from __future__ import annotations

import inspect
import itertools
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from threaded import Scaled, together

from raydp_parallel import DataParallel, TransferError, parallel_apply, replicate
from raydp_parallel.cluster import ReplicaClient
from raydp_parallel.replica.server import ReplicaServer
from raydp_parallel.transport import direct_connection, handshake
from raydp_parallel.transport.collective import store
from raydp_parallel.transport.direct_connection import LineCut, StoodStill, read_frame, write_frame
from raydp_parallel.transport.links import InlineLink
from raydp_parallel.transport.message_bytes import METHODS, pack, unseal
from raydp_parallel.transport.messages import Forget

LARGE = 8_000_000
"""Bytes that no socket takes in before they are read."""


@contextmanager
def ends() -> Iterator[tuple[direct_connection.Connection, socket.socket]]:
    """The driver's end of a line, and the other one's bare socket."""
    found = handshake.listen("127.0.0.1")
    assert found is not None
    calls: list[handshake.CallAddress] = []
    thread = threading.Thread(target=lambda: calls.append(found[1].accept()))
    thread.start()
    caller = direct_connection.Connection(found[0], list)
    thread.join(60)
    with calls[0].connection as other:
        yield caller, other
    caller.close()


@contextmanager
def served(answer: Any) -> Iterator[direct_connection.Connection]:
    """A line to a thread that answers."""
    found = handshake.listen()
    assert found is not None
    thread = threading.Thread(target=direct_connection.serve, args=(found[1], answer), daemon=True)
    thread.start()
    caller = direct_connection.Connection(found[0], list)
    yield caller
    caller.close()
    thread.join(60)
    assert not thread.is_alive()


def test_a_call_that_was_sent_in_part_is_not_completed_by_the_next() -> None:
    """The other end stands still for longer than a frame may, and would go on when another call is
    sent.
    """
    with ends() as (caller, other):
        caller.wire.limit(0.1)
        caller.send(1, [np.full(LARGE, 1, dtype=np.uint8)])
        assert not caller.intact
        caller.send(2, [np.full(LARGE, 2, dtype=np.uint8)])
        for number in (1, 2):
            with pytest.raises(StoodStill):
                caller.receive(number, 60)
        with pytest.raises(LineCut):
            while True:
                read_frame(other)


def test_an_answer_that_stood_still_is_not_completed_by_the_next() -> None:
    """What follows is no frame any more."""
    with ends() as (caller, other):
        caller.wire.limit(0.1)
        caller.send(1, [b"one"])
        other.sendall(direct_connection._HEAD.pack(1, 1, 100) + b"half")
        with pytest.raises(StoodStill):
            caller.receive(1, None)
        assert not caller.intact
        caller.send(2, [b"two"])
        write_frame(other, 2, [b"answer"])
        with pytest.raises(StoodStill):
            caller.receive(2, 60)
        assert caller.look([2]) == {2}


def test_a_wait_without_a_limit_looks_for_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Ctrl-C that comes just before a wait begins does not end the wait: it goes on in turns."""
    waits: list[float] = []
    with ends() as (caller, other):
        readable = caller.wire.readable

        def turn(seconds: float) -> bool:
            waits.append(seconds)
            if len(waits) == 3:
                write_frame(other, 1, [b"answer"])
            return readable(seconds) if len(waits) > 2 else False

        monkeypatch.setattr(caller.wire, "readable", turn)
        caller.send(1, [b"one"])
        waits.clear()
        assert caller.receive(1, None) == [b"answer"]
    assert len(waits) >= 3 and max(waits) <= 1


def test_a_call_that_waits_is_sent_as_it_was() -> None:
    """A link writes the next call into the same array."""
    with ends() as (caller, other):
        caller.send(1, [np.zeros(1 << 15, dtype=np.uint8)])
        scratch = np.full(1 << 15, 7, dtype=np.uint8)
        caller.send(2, [scratch])
        assert caller.holds_back
        scratch[:] = 9
        assert read_frame(other)[0] == 1
        write_frame(other, 1, [b"answer"])
        assert caller.receive(1, 60) == [b"answer"]
        number, (found,) = read_frame(other)
        assert number == 2 and {*bytes(found)} == {7}


class Interrupted(dict[int, int]):
    """Raises KeyboardInterrupt after the next change, as Ctrl-C may."""

    def __setitem__(self, key: int, value: int) -> None:
        super().__setitem__(key, value)
        raise KeyboardInterrupt


@pytest.mark.parametrize("held", [False, True])
def test_ctrl_c_between_the_books_and_the_socket(held: bool) -> None:
    """What is noted as sent was not: nothing goes that way any more, and calls do not wait for
    ever.
    """
    with ends() as (caller, other):
        if held:
            caller.send(1, [np.zeros(LARGE // 100, dtype=np.uint8)])
            caller.send(2, [np.zeros(LARGE // 100, dtype=np.uint8)])
            assert caller.holds_back and read_frame(other)[0] == 1
            write_frame(other, 1, [b"answer"])
        caller._owed = Interrupted(caller._owed)
        with pytest.raises(KeyboardInterrupt):
            if held:
                caller.receive(1, 60)
            else:
                caller.send(1, [b"one"])
        assert not caller.intact


@pytest.mark.parametrize("how", ["receive", "look"])
def test_ctrl_c_before_what_waits_is_sent(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer that it waited for has been read, and no other will come: the next that waits
    sends it.
    """
    with ends() as (caller, other):
        caller.send(1, [np.zeros(LARGE // 100, dtype=np.uint8)])
        caller.send(2, [np.full(LARGE // 100, 2, dtype=np.uint8)])
        assert caller.holds_back and read_frame(other)[0] == 1
        write_frame(other, 1, [b"answer"])
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(caller, "_send_held", _ctrl_c)
            caller.receive(1, 60)
        assert caller.intact
        caller.give_up(1)

        def answer() -> None:
            number, _ = read_frame(other)
            write_frame(other, number, [b"second"])

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        if how == "look":
            assert caller.look([2]) <= {2} and not caller.holds_back
        assert caller.receive(2, 60) == [b"second"]
        thread.join(60)


def test_what_came_before_a_send_failed_is_read() -> None:
    """Another thread's answer does not end with this one's call."""
    with ends() as (caller, other):
        caller.wire.limit(0.1)
        caller.send(1, [b"one"])
        write_frame(other, 1, [b"answer"])
        assert caller.look([1]) == {1}
        caller.send(2, [np.zeros(LARGE, dtype=np.uint8)])
        assert not caller.intact
        assert caller.receive(1, 60) == [b"answer"]
        with pytest.raises(StoodStill):
            caller.receive(2, 60)


def test_an_answer_that_was_given_up_is_owed() -> None:
    """Until it is read; meanwhile nothing large is sent, which would not be read, and nothing
    overtakes that.
    """
    with ends() as (caller, other):
        caller.send(1, [b"one"])
        caller.give_up(1)
        caller.send(2, [np.full(LARGE, 2, dtype=np.uint8)])
        assert caller.holds_back
        caller.send(3, [b"three"])
        assert read_frame(other) == (1, [b"one"])
        assert not select.select([other], [], [], 0)[0]
        write_frame(other, 1, [b"late"])
        found: list[Any] = []

        def serve() -> None:
            for _ in range(2):
                found.append(read_frame(other))
                write_frame(other, found[-1][0], [b"answer"])

        thread = threading.Thread(target=serve)
        thread.start()
        for number in (2, 3):
            assert caller.receive(number, 60) == [b"answer"]
        thread.join(60)
        assert [number for number, _ in found] == [2, 3] and not caller.holds_back


def test_small_calls_are_owed_together() -> None:
    """Many of them fill a socket, too."""
    with ends() as (caller, _):
        for number in range(direct_connection._ROOM // 1024):
            caller.send(number, [bytes(1024)])
            assert not caller.holds_back
        caller.send(99, [bytes(1024)])
        assert caller.holds_back


def test_limits_hold_where_another_thread_reads() -> None:
    """A thread that waits for nothing in particular keeps nothing from the others; frames of others
    prolong nothing.
    """
    over = threading.Event()
    with ends() as (caller, other):
        for number in (1, 2, 3):
            caller.send(number, [b""])
        reads = threading.Event()
        await_frame = caller._await_frame

        def waiting(deadline: float) -> None:
            reads.set()
            await_frame(deadline)

        caller._await_frame = waiting  # type: ignore[method-assign]

        def long() -> None:
            assert caller.receive(1, None) == [b"at last"]

        def short() -> None:
            reads.wait(60)
            write_frame(other, 2, [b"soon"])
            assert caller.receive(2, 60) == [b"soon"]  # which the other thread has read
            with pytest.raises(TimeoutError):
                caller.receive(3, 0.2)
            assert caller.look([3]) == set()
            over.set()

        def strange() -> None:
            while not over.wait(0.01):
                write_frame(other, 99, [b"not waited for"])
            write_frame(other, 1, [b"at last"])

        together(long, short, strange)


def test_frames_of_others_do_not_prolong_a_wait() -> None:
    """They come faster than the limit, one after the other."""
    over = threading.Event()
    with ends() as (caller, other):
        caller.send(1, [b""])

        def wait() -> None:
            try:
                with pytest.raises(TimeoutError):
                    caller.receive(1, 0.2)
            finally:
                over.set()

        def strange() -> None:
            while not over.wait(0.01):
                write_frame(other, 99, [b"not waited for"])

        together(wait, strange)


def test_a_thread_that_reads_no_more_is_replaced() -> None:
    """Ctrl-C may hit one before it has told the others: they look by themselves."""
    with ends() as (caller, other):
        for number in (1, 2):
            caller.send(number, [b""])
        stop = threading.Event()
        await_frame = caller._await_frame

        def interrupted(deadline: float) -> None:
            caller._await_frame = await_frame  # type: ignore[method-assign]
            stop.wait(60)
            caller._waiters.wake = lambda: None  # type: ignore[method-assign]
            raise KeyboardInterrupt

        caller._await_frame = interrupted  # type: ignore[method-assign]

        def first() -> None:
            with pytest.raises(KeyboardInterrupt):
                caller.receive(1, None)

        def second() -> None:
            while caller._reader is None:
                pass
            stop.set()
            write_frame(other, 2, [b"answer"])
            assert caller.receive(2, 60) == [b"answer"]

        together(first, second)


def interrupted_call(work: Callable[[], object], calls: int) -> bool:
    """Whether Ctrl-C came as the connection entered its function of that number, in ``work``."""
    left = calls
    file = direct_connection.__file__

    def trace(frame: FrameType, event: str, argument: object) -> None:
        nonlocal left
        code = (
            frame.f_code
        )  # a generator is also entered as it is freed: no signal is handled there
        if (
            event == "call"
            and code.co_filename == file
            and not code.co_flags & inspect.CO_GENERATOR
        ):
            left -= 1
            if left < 0:
                sys.settrace(None)
                raise KeyboardInterrupt

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return left < 0


@pytest.mark.parametrize("how", ["receive", "look"])
def test_ctrl_c_as_any_function_begins(how: str) -> None:
    """No thread stays the reader: each later call would wait for it. A frame that is half read
    ends the line.
    """
    for calls in itertools.count():
        with served(lambda number, buffers: [b"answer"]) as caller:
            caller.send(1, [b""])
            assert caller.wire.readable(60)
            if how == "receive":
                done = not interrupted_call(lambda line=caller: line.receive(1, 60), calls)
            else:
                done = not interrupted_call(lambda line=caller: line.look([1]), calls)
            assert caller._reader is None, calls
            if caller.intact:
                caller.give_up(1)
                caller.send(2, [b""])
                assert caller.receive(2, 60) == [b"answer"]
        if done:
            break
    assert calls > 3


class Owned:
    """A lock that notes a release by a thread that does not hold it, and tells when one waits."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None
        self.waited_for = threading.Event()
        self.stolen = False

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        taken = self._lock.acquire(blocking=False)
        if not taken and blocking:
            self.waited_for.set()
            taken = self._lock.acquire(blocking, timeout)
        if taken:
            self._owner = threading.get_ident()
        return taken

    def release(self) -> None:
        if self._owner != threading.get_ident():
            self.stolen = True
            self.waited_for.set()
            return
        self._owner = None
        self._lock.release()


@pytest.mark.parametrize("how", ["receive", "look"])
def test_ctrl_c_at_the_end_of_a_wait_gives_up_no_other_thread_s_lock(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes while the thread that waited takes the lock of the state again."""
    main, lock = threading.get_ident(), Owned()
    monkeypatch.setattr(direct_connection, "_GLANCE", 0.2)
    with ends() as (caller, _):
        caller._state = lock  # type: ignore[assignment]
        if hasattr(caller, "_changed"):
            caller._changed = threading.Condition(lock)  # type: ignore[arg-type]
        caller._reader = object()  # another thread reads
        entered = threading.Event()

        def disturb() -> None:
            entered.wait(60)
            while True:  # until the main thread waits for the one that reads
                with lock:
                    if caller._waiters._locks:
                        break
            with lock:
                lock.waited_for.clear()
                lock.waited_for.wait(60)
                lock.waited_for.clear()
                # A signal just before a wait begins does not end it.
                while not lock.waited_for.wait(0.05):
                    signal.pthread_kill(main, signal.SIGINT)

        def ctrl_c(*_: object) -> None:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGINT, ctrl_c)
        thread = threading.Thread(target=disturb, daemon=True)
        thread.start()
        try:
            with pytest.raises(KeyboardInterrupt):
                entered.set()
                caller.receive(1, None) if how == "receive" else caller.look([1])
        finally:
            signal.signal(signal.SIGINT, before)
        thread.join(60)
    assert not lock.stolen


@pytest.mark.parametrize("near", [True, False])
def test_sending_to_a_dead_process_raises_no_signal(near: bool) -> None:
    """A program may have given SIGPIPE its default back, which would end it."""
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPIPE})
    try:
        found = handshake.listen(None if near else "127.0.0.1")
        assert found is not None
        thread = threading.Thread(
            target=direct_connection.serve, args=(found[1], lambda *_: 1 / 0), daemon=True
        )
        thread.start()
        caller = direct_connection.Connection(found[0], list)
        caller.close()
        caller.send(1, [b"one"])
        one, other = socket.socketpair()
        other.close()
        for data in ([b"small"], [np.zeros(LARGE, dtype=np.uint8)]):
            with pytest.raises(OSError):
                write_frame(one, 1, data)
        greeted: Any = SimpleNamespace(socket=one, _cut_after=None)
        for work in (
            lambda: direct_connection.LineSocket._watch_process(greeted),
            lambda: handshake._Client(one, b"secret"),
            lambda: store._write(one, 1, [b"key"]),
        ):
            with pytest.raises(OSError):
                work()
        one.close()
        one, other = socket.socketpair()
        other.send(bytes(16))
        other.close()
        with pytest.raises(ConnectionError):
            handshake._prove(one, b"secret")
        one.close()
        thread.join(60)
        assert signal.SIGPIPE not in signal.sigpending()
    finally:
        if signal.SIGPIPE in signal.sigpending():
            signal.sigtimedwait([signal.SIGPIPE], 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        signal.signal(signal.SIGPIPE, before)


def test_calls_are_counted_beyond_32_bits() -> None:
    """At some hundred calls per second that is a few months."""
    with served(lambda number, buffers: [repr(number).encode()]) as caller:
        for number in (2**32 - 1, 2**32, 2**40):
            caller.send(number, [b""])
            assert caller.receive(number, 60) == [repr(number).encode()]


class Poor:
    """NumPy in a process that has no memory for so many bytes."""

    uint8, ndarray = np.uint8, np.ndarray

    def __init__(self, size: int) -> None:
        self.size = size
        self.asked = 0

    def empty(self, size: int, dtype: Any) -> Any:
        """An array, if there is memory."""
        if size == self.size:
            self.asked += 1
            raise MemoryError(f"no room for {size}")
        return np.empty(size, dtype)


def test_what_there_is_no_memory_for_is_read_and_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next frame begins where it should, at either end."""
    monkeypatch.setattr(direct_connection, "np", Poor(LARGE))
    one, other = socket.socketpair()
    sent = [b"small", np.zeros(LARGE, dtype=np.uint8), np.ones(LARGE // 2, dtype=np.uint8)]
    thread = threading.Thread(target=lambda: [write_frame(one, number, sent) for number in (1, 2)])
    thread.start()
    for number in (1, 2):
        found, (small, lost, kept) = read_frame(other)
        assert (found, small, type(lost), kept.sum()) == (number, b"small", MemoryError, LARGE // 2)
    thread.join(60)
    one.close()
    other.close()


@pytest.mark.parametrize("worst", [False, True])
def test_small_parts_that_there_is_no_memory_for(
    worst: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are read one by one, if there is no memory for all; of one alone the error is kept, and
    the next frame begins where it should.
    """

    def space(size: int) -> bytearray:
        if size > (1 << 15 if worst else 70_000):
            raise MemoryError(f"no room for {size}")
        return bytearray(size)

    monkeypatch.setattr(direct_connection, "bytearray", space, raising=False)
    one, other = socket.socketpair()
    sent = [b"small", b"x" * (1 << 16), np.ones(LARGE, dtype=np.uint8), b"y" * 50_000, b"last"]
    thread = threading.Thread(target=lambda: [write_frame(one, number, sent) for number in (1, 2)])
    thread.start()
    for number in (1, 2):
        found, (first, x, array, y, last) = read_frame(other)
        assert (found, first, array.sum(), last) == (number, b"small", LARGE, b"last")
        if worst:
            assert isinstance(x, MemoryError) and isinstance(y, MemoryError)
        else:
            assert (x, y) == (sent[1], sent[3])
    thread.join(60)
    one.close()
    other.close()


def test_want_of_memory_for_a_message_is_that_call_s_failure() -> None:
    """In a replica and in the driver: it is raised, and is no death."""
    client = ReplicaServer("cpu", InlineLink())
    none = MemoryError("no room")
    for parts in ([METHODS["forward"], pack(None), none], [METHODS["forward"], none], [none, b""]):
        _, *answer = client._answer_line(None, 0, [b"", *parts])
        reply, _ = unseal(tuple(answer), InlineLink())
        assert reply.failure is not None and "no room" in reply.failure.text
    # The word which memory is no longer used may be lost: it goes on being lent.
    ended = [MemoryError("no room"), METHODS["forget"], pack(Forget((), ()))]
    _, *answer = client._answer_line(None, 0, ended)
    assert unseal(tuple(answer), InlineLink())[0] == (0, 0)
    remote = ReplicaClient(SimpleNamespace())
    with pytest.raises(MemoryError, match="no room"):
        remote.opened([b"", b"header", MemoryError("no room")])
    assert remote.memory.take_note([MemoryError("no room"), b"header"]) == [b"header"]


@pytest.mark.usefixtures("cluster")
def test_a_driver_without_memory_for_an_answer(
    monkeypatch: pytest.MonkeyPatch, executors: Any
) -> None:
    """The error is raised, the replicas live, and the same call works when there is memory
    again.
    """
    size = 1 << 18
    executor = executors(link="inline")
    model = DataParallel(Scaled(size), executor=executor)
    expected = model(torch.ones(2, size))
    pids = [info.pid for info in executor.replicas()]

    class Empty(Poor):
        def empty(self, size: int, dtype: Any) -> Any:
            raise MemoryError(f"no room for {size}")

    monkeypatch.setattr(direct_connection, "np", Empty(0))
    with pytest.raises(MemoryError, match="no room"):
        model(torch.ones(2, size))
    monkeypatch.undo()
    assert torch.equal(model(torch.ones(2, size)), expected)
    assert [info.pid for info in executor.replicas()] == pids


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("how", ["ctrl-c", "transfer error"])
def test_the_same_call_again_after_one_that_was_aborted(
    how: str, monkeypatch: pytest.MonkeyPatch, executors: Any
) -> None:
    """The answer of the first is still on its way, larger than the socket, when the second is sent,
    as large.
    """
    size = 1 << 22
    executor = executors(link="inline")
    net = Scaled(size)
    model = DataParallel(net, executor=executor)
    x = torch.rand(2, size)
    model(x)
    backend, pids = executor.replica_set.backend, [info.pid for info in executor.replicas()]
    for _ in range(3):
        if how == "ctrl-c":
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(backend, "collect", _ctrl_c)
                model(x)
        else:
            replicas = replicate(net, ["cpu", "cpu"], executor=executor)
            with pytest.raises(TransferError):
                parallel_apply(replicas, [(x[:1],), (threading.Lock(),)])
        assert torch.equal(model(x), x)
    assert [info.pid for info in executor.replicas()] == pids


def _ctrl_c(*_arguments: Any) -> Any:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    "refused", ["pthread_mutexattr_setrobust", "pthread_mutex_init", "pthread_mutexattr_init"]
)
def test_a_system_that_refuses_such_a_lock(refused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is none then, and the socket tells."""
    monkeypatch.setattr(direct_connection.ctypes, "CDLL", _refusing(refused))
    assert direct_connection.make_pulse() is None


def test_a_lock_that_cannot_be_taken_is_no_pulse(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other end is told that there is none, and cuts nothing."""
    before = {*threading.enumerate()}
    with monkeypatch.context() as patch:
        patch.setattr(direct_connection.ctypes, "CDLL", _refusing("pthread_mutex_lock"))
        with served(lambda number, buffers: buffers) as caller:
            new = {*threading.enumerate()} - before
            assert "raydp-pulse" not in {thread.name for thread in new}
            caller.send(1, [b"one"])
            assert caller.receive(1, 60) == [b"one"]


def _refusing(refused: str) -> Any:
    """The C library, with one function that fails."""
    library = direct_connection.ctypes.CDLL(None)
    attributes = [f"mutexattr_{what}" for what in ("init", "setpshared", "setrobust", "destroy")]
    names = [
        f"pthread_{name}" for name in (*attributes, "mutex_init", "mutex_lock", "mutex_unlock")
    ]
    found = SimpleNamespace(**{name: getattr(library, name) for name in names})
    setattr(found, refused, lambda *_: 22)
    return lambda _name: found
