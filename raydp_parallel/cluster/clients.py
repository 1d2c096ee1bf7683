"""Two ways to call a replica: over a socket on this machine, and by Ray."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import re
import select
import signal
import socket
import struct
import time
import weakref
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

from raydp_parallel.cluster import ray_api
from raydp_parallel.cluster.ray_api import Actor
from raydp_parallel.devices import threads
from raydp_parallel.devices.cuda import Hello
from raydp_parallel.wire.channel import Channel
from raydp_parallel.wire.codec import Flat, flat, unflat
from raydp_parallel.wire.messages import Answer
from raydp_parallel.wire.trial import try_ipc

T = TypeVar("T")
_GONE = (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.EBADF)
"""Errors that say that the other end is gone. Others say what this process lacks, or are those of a
signal's handler, as Ctrl-C is.
"""
_GRACE = 0.5
"""Seconds in which Ray may end a process; it takes far less."""
_CAUSE = 5.0
"""Seconds that Ray may take to say why a process ended."""
_GET_INFO, _EXIT, _INFO = 0xC040FF0B, 8, struct.Struct("Q52xi")
"""The kernel's question for a process, with its form: what is asked for, and the exit status."""
OWN = re.compile("no answer|its process ended (with|by) (?!SIGKILL)")
"""Tells causes that lie in what a replica did. SIGKILL comes from outside, or for want of memory.
"""


class Gone(Exception):
    """The replica is gone, by a cause as far as it is known at once."""


class Client:
    """A replica that is called through Ray: of another machine, or of another user. Its life is the
    Ray call that lasts as long as it does.
    """

    link = "ray"  # how bytes go
    unsent: int | None = None  # see `Channel`
    _answer: object = None  # the one that is owed; a slot has no more than one request at a time

    def __init__(self, actor: Actor, hello: Hello, life: object) -> None:
        self.actor, self.hello, self._life = actor, hello, life
        self._in_session = ray_api.session()
        self.traffic = [0, 0]  # bytes of tensors, sent and received

    def _carry(self, timeout: float | None, carry: Callable[..., T], *parts: object) -> T:
        """Carry a message; hang up if it cannot be carried as a whole: another process takes
        over.
        """
        if not self._in_session():  # a call by Ray would start another cluster
            raise Gone("its connection was closed")
        until = time.monotonic() + (timeout or math.inf)
        try:
            return carry(*parts)
        except Exception as error:
            if isinstance(error, TimeoutError) and time.monotonic() >= until:
                why = f"no answer within {timeout:g} s, Options(call_timeout), or of a process's "
                why += "first call placement_timeout"
            elif isinstance(error, ray_api.RayError):
                why = ray_api.in_short(error)
            elif isinstance(error, EOFError) or getattr(error, "errno", None) in _GONE:
                why = self.ended()
            else:
                raise
            self.close()
            raise Gone(why) from error

    def send(self, request: object, timeout: float | None) -> None:
        """Send a request; raises `Gone`."""
        self._carry(timeout, self._send, request)

    def _send(self, request: object) -> None:
        parts = flat(request)
        self.traffic[0] += parts[2].nbytes
        self.unsent = len(parts)
        self._answer = self.actor.answer.remote(*parts)
        self.unsent = 0

    def has_answer(self, seconds: float) -> bool:
        """Tell if an answer comes, or the process ends, within some seconds."""
        gone = self.unsent != 0 or not self._in_session()
        return gone or not ray_api.late([self._answer], seconds)

    def receive(self, timeout: float | None, device: torch.device) -> Answer:
        """Return the next answer, with its tensors on a device, in the order of requests; raises
        `Gone`.
        """
        found: Flat = self._carry(timeout, ray_api.get, self._answer, timeout)
        self.unsent = self._answer = None
        self.traffic[1] += found[2].nbytes
        answer: Answer = unflat(found, device)
        return answer

    def deliver(self, number: int, ref: object) -> None:
        """Let Ray bring an object of its store for a request that names the number."""
        self.actor.deliver.remote(number, [ref])  # in a list: Ray would wait with the call for it

    def show(self, text: str) -> None:
        """Let the dashboard show a text as the replica's work."""
        if self._in_session():
            self.actor.work.options(name=text).remote()

    def ended(self) -> str:
        """Say how the process ended, as far as the kernel knows."""
        return "its process ended"

    def cause(self) -> str | None:
        """Ask Ray why the process ended; None if it runs, or nobody knows.

        Waits outside of Ray, which ends a program that leaves while one of its threads is inside.
        """
        begun = time.monotonic()
        while self._in_session() and ray_api.late([self._life]):
            if time.monotonic() > begun + (_GRACE if self.alive() else _CAUSE):
                return None
            time.sleep(ray_api.TURN / 10)
        try:
            if self._in_session():
                ray_api.get(self._life)
        except ray_api.RayError as error:
            return ray_api.in_short(error)
        return None

    def alive(self) -> bool:
        """Tell if it still runs, without waiting."""
        return self._in_session() and bool(ray_api.late([self._life]))

    def close(self) -> None:
        """Hang up: there is nothing to hang up."""

    def kill(self) -> None:
        """Hang up, and let Ray end the process."""
        self.close()
        if self._in_session():
            ray_api.kill(self.actor)

    end = kill


class NearClient(Client):
    """A replica of this machine, called over a socket."""

    def __init__(self, actor: Actor, hello: Hello, life: object, sock: socket.socket) -> None:
        super().__init__(actor, hello._replace(near=True), life)
        self._channel = Channel(sock, summed=hello.device != "cpu")
        self.link, self.traffic = "windows", self._channel.traffic
        self._socket = sock.fileno()
        self._process = os.pidfd_open(hello.pid)
        weakref.finalize(self, os.close, self._process).atexit = False
        self._log = os.path.realpath(f"/proc/{hello.pid}/fd/2")
        self._poll = select.poll()
        # Children of a replica may hold its end of the socket open when it has ended.
        self._poll.register(self._process, select.POLLIN)
        self._poll.register(sock, select.POLLIN)

    def try_ipc(self, device: torch.device) -> None:
        """Let windows lie on a GPU that both processes have, if that works; else raise."""
        try_ipc(self._channel, device)
        self.link = "ipc"

    @property
    def unsent(self) -> int | None:  # type: ignore[override]
        """See `Channel`."""
        return self._channel.unsent

    def send(self, request: object, timeout: float | None) -> None:
        """Send a request; raises `Gone`."""
        self._carry(timeout, self._channel.send, request, timeout)

    def receive(self, timeout: float | None, device: torch.device) -> Answer:
        """Return the next answer, with its tensors on a device, in the order of requests; raises
        `Gone`.
        """
        if self.hello.device == "cpu":
            threads.rest()  # the replica computes on the same cores
        return self._carry(timeout, self._receive, timeout, device)

    def _receive(self, timeout: float | None, device: torch.device) -> Answer:
        ready = self._poll.poll(None if timeout is None else timeout * 1e3)
        if not ready:
            raise TimeoutError
        if self._socket not in dict(ready):
            raise EOFError
        found: Answer = self._channel.receive(timeout, device)
        return found

    def has_answer(self, seconds: float) -> bool:
        """Tell if an answer comes, or the process ends, within some seconds."""
        return self.unsent != 0 or bool(self._poll.poll(seconds * 1e3))

    def alive(self, seconds: float = 0) -> bool:
        """Tell if it still runs, and will in some seconds."""
        end = select.poll()  # of this thread: others may ask, too
        end.register(self._process, select.POLLIN)
        return not end.poll(seconds * 1e3)

    def ended(self) -> str:
        """Say how the process ended, which Linux knows since 6.15, and where its log is."""
        self.alive(_GRACE)  # its sockets end before
        how, info = "", bytearray(_INFO.pack(_EXIT, 0))
        with contextlib.suppress(OSError, ValueError):  # an older Linux; a signal without a name
            fcntl.ioctl(self._process, _GET_INFO, info)
            known, status = _INFO.unpack(info)
            if known & _EXIT:
                how = f" with exit code {status >> 8}"
            if known & _EXIT and status & 0x7F:
                how = f" by {signal.Signals(status & 0x7F).name}"
        return f"its process ended{how}; its log is {self._log}"

    def cause(self) -> str | None:
        """Say why the process ended: as the kernel says, else as Ray does."""
        found = self.ended()
        return found if OWN.match(found) else super().cause()

    def close(self) -> None:
        """Hang up."""
        self._channel.close()

    def end(self) -> None:
        """End the process: by Ray, which reports others' kills to the user as accidents. Ray takes
        5 s for a stopped process.
        """
        self.kill()
        if self.alive(_GRACE):
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self._process, signal.SIGKILL)


def end_all(clients: Iterable[Client]) -> None:
    """End processes, all at once."""
    chosen = [*clients]
    for client in chosen:
        client.kill()
    for client in chosen:
        client.end()
