"""The lock that tells of a death, and the line that is cut by it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from raydp_parallel.transport import direct_connection, handshake

HOLDER = """
import os, sys, time
from raydp_parallel.transport import direct_connection, handshake
found = handshake.listen()
print(found[0], flush=True)
def answer(number, buffers):
    if number == 1 and not os.fork():  # as a data loader's worker would, it keeps the socket open
        print(os.getpid(), flush=True)
        time.sleep(60)
    if number == 2:
        print("hangs", flush=True)
        time.sleep(60)
    return buffers
direct_connection.serve(found[1], answer)
"""


@contextmanager
def holder() -> Iterator[tuple[direct_connection.Connection, subprocess.Popen[str], int]]:
    """A line to a process with a child, which keeps the process's side of the line open."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    caller = direct_connection.Connection(process.stdout.readline().strip(), list)
    caller.send(1, [b"first"])
    child = int(process.stdout.readline())
    try:
        yield caller, process, child
    finally:
        caller.close()
        process.kill()
        process.wait()
        os.kill(child, signal.SIGKILL)
        process.stdout.close()


def waiting() -> list[threading.Thread]:
    """Threads that wait for a pulse to stop."""
    return [thread for thread in threading.enumerate() if thread.name == "raydp-pulse"]


@pytest.mark.long
def test_a_death_cuts_the_line_though_its_socket_is_open() -> None:
    """A child of the replica's keeps the socket open; without the pulse the death would never be
    noticed.
    """
    with holder() as (caller, process, _):
        assert bytes(caller.receive(1, 10)[0]) == b"first"
        caller.send(2, [b"never answered"])
        process.kill()
        with pytest.raises(direct_connection.LineCut):
            caller.receive(2, 60)


@pytest.mark.long
def test_what_was_sent_before_the_death_is_read() -> None:
    """An answer that arrived is an answer."""
    others = set(waiting())
    with holder() as (caller, process, _):
        (new,) = set(waiting()) - others
        caller.send(2, [b"never answered"])
        assert process.stdout is not None and process.stdout.readline() == "hangs\n"
        process.kill()
        new.join(60)
        assert not new.is_alive()
        assert bytes(caller.receive(1, 10)[0]) == b"first"
        with pytest.raises(direct_connection.LineCut):
            caller.receive(2, 60)


def served(
    answer: Callable[[int, list[Any]], Sequence[Any]],
) -> tuple[direct_connection.Connection, threading.Thread]:
    """A line to a thread of this process."""
    found = handshake.listen()
    assert found is not None
    thread = threading.Thread(target=direct_connection.serve, args=(found[1], answer), daemon=True)
    thread.start()
    return direct_connection.Connection(found[0], list), thread


def test_hanging_up_ends_who_waits() -> None:
    """No thread is left by a line that was closed."""
    before = set(waiting())
    caller, thread = served(lambda number, buffers: buffers)
    (new,) = set(waiting()) - before
    caller.close()
    thread.join(10)
    new.join(10)
    assert not thread.is_alive() and not new.is_alive()


def test_without_such_a_lock_the_socket_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are no robust locks the line works, and its end is seen when the socket
    closes.
    """
    monkeypatch.delattr(os, "memfd_create")
    assert direct_connection.make_pulse() is None
    before = set(waiting())

    def answer(number: int, buffers: list[Any]) -> Sequence[Any]:
        if number == 2:
            raise OSError
        return buffers

    caller, thread = served(answer)
    assert set(waiting()) == before
    caller.send(1, [b"first"])
    assert bytes(caller.receive(1, 10)[0]) == b"first"
    caller.send(2, [b""])
    with pytest.raises(direct_connection.LineCut):
        caller.receive(2, 10)
    caller.close()
    thread.join(10)


def test_who_answers_the_call_with_silence_is_no_line() -> None:
    """A process that was stopped before it greeted is not waited for without end."""
    address = f"\0raydp-parallel-silent-{os.getpid()}"
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(handshake, "_AUTHENTICATION", 0.05)
        silent.bind(address)
        silent.listen(1)
        with pytest.raises(OSError, match="timed out"):
            direct_connection.Connection(f"{address[1:]} secret", list)


def test_a_lock_that_does_not_get_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other side has no file left for it: there is a line, and its socket tells."""
    receive = socket.recv_fds
    monkeypatch.setattr(
        socket, "recv_fds", lambda *arguments: (receive(*arguments)[0], [], 0, None)
    )
    before = set(waiting())
    caller, thread = served(lambda number, buffers: buffers)
    assert set(waiting()) == before
    caller.send(1, [b"first"])
    assert bytes(caller.receive(1, 10)[0]) == b"first"
    caller.close()
    thread.join(10)


def test_who_hangs_up_at_once_is_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a process that cannot map the lock does."""

    def full(_file: int) -> direct_connection.Pulse:
        raise OSError("no memory")

    found = handshake.listen()
    assert found is not None
    thread = threading.Thread(
        target=direct_connection.serve,
        args=(found[1], lambda number, buffers: buffers),
        daemon=True,
    )
    make = direct_connection.Pulse
    mine = threading.current_thread()
    monkeypatch.setattr(
        direct_connection,
        "Pulse",
        lambda file: make(file) if threading.current_thread() is mine else full(file),
    )
    thread.start()
    with pytest.raises(direct_connection.LineCut):
        direct_connection.Connection(found[0], list)
    thread.join(10)
