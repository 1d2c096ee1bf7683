"""How the two ends of a line find each other, and prove to each other that they are meant.

On one machine by a Unix socket that has no name in the file system, and takes one connection of the
same user. Between two machines by TCP. The secret came by Ray, and is itself never said: each end
sends a number that was never used, and answers the other's by a code that only the secret gives
(HMAC, SHA-256). Until then nothing of the other end is taken for a message. What is said afterwards
is as plain to read as what torch's groups say, and Ray, unless that was told to
encrypt: then there are no lines between machines.

The standard library's `multiprocessing.connection` proves as much, but hears one caller after the
other and waits for each without a limit, and its codes are those of MD5 before Python 3.12.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import selectors
import socket
import struct
import sys
import time
import uuid
from typing import NamedTuple

_PEER = struct.Struct("3i")
_PEER_DESCRIPTOR = 77
"""``SO_PEERPIDFD``, which Linux has from 6.5 on."""

_NONCE = 16
_CODE = 32

_CONNECT = 2.0
"""Seconds for a connection to another machine. A firewall may let Ray through, and not this."""

_GREETING = 5.0
"""Seconds in which who connected has to prove that it knows the secret, and who listened in
turn.
"""

_OPEN = 60.0
"""Seconds after which nobody is waited for any more. The driver calls as soon as it knows the
address.
"""

_CALLERS = 64
"""So many may be in the midst of it; of more the one that came first is hung up on."""

_KEEPALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4}
"""A firewall forgets connections that are silent, and a line is for as long as the driver does
other things. There is no limit (``TCP_USER_TIMEOUT``) on what is sent and not taken: the other end
may just be busy."""

_QUIETLY = getattr(socket, "MSG_NOSIGNAL", 0)
"""An end that is gone is an error, and no signal that may end this process."""


class CallAddress(NamedTuple):
    """A line's socket.

    Attributes:
        connection: The socket.
        process: The process at the other end, as this one knows it; 0 if it cannot be seen from
            here.
        near: Whether that is on this machine.
    """

    connection: socket.socket
    process: int
    near: bool


class _Caller:
    """Somebody who connected, and has to prove that it is the right one.

    Args:
        connection: The socket.
        secret: What it has to know.
    """

    def __init__(self, connection: socket.socket, secret: bytes) -> None:
        self._connection = connection
        self._secret = secret
        self._nonce = os.urandom(_NONCE)
        self._said = b""
        self.until = time.monotonic() + _GREETING
        connection.setblocking(False)
        connection.send(self._nonce, _QUIETLY)  # which a new socket has room for

    def hear(self) -> bool | None:
        """Take in what came. Whether it is the right one; None if that is not known yet. Raises
        `OSError`.
        """
        more = self._connection.recv(_NONCE + _CODE - len(self._said))
        self._said += more
        if not more or len(self._said) < _NONCE + _CODE:
            return None if more else False
        theirs, code = self._said[:_NONCE], self._said[_NONCE:]
        if not hmac.compare_digest(code, _code(self._secret, b"caller", self._nonce, theirs)):
            return False
        self._connection.send(_code(self._secret, b"listener", self._nonce, theirs), _QUIETLY)
        self._connection.setblocking(True)
        return True


class Listener:
    """Waits for one caller.

    Args:
        listening: The socket.
        secret: What the caller has to know.
        near: Whether that is a process of this machine.
    """

    def __init__(self, listening: socket.socket, secret: bytes, near: bool) -> None:
        self._listening = listening
        self._secret = secret
        self._near = near
        self._until = time.monotonic() + _OPEN

    def accept(self) -> CallAddress | None:
        """Wait for the right one, and for no other after it; None if it does not come. Strangers
        are not in its way.
        """
        with contextlib.ExitStack() as leaving, selectors.DefaultSelector() as waiting:
            leaving.callback(self.close)
            callers: dict[socket.socket, _Caller] = {}
            leaving.callback(lambda: [*map(socket.socket.close, callers)])
            self._listening.setblocking(False)
            waiting.register(self._listening, selectors.EVENT_READ)

            def hang_up(connection: socket.socket) -> None:
                waiting.unregister(connection)
                del callers[connection]
                connection.close()

            while (now := time.monotonic()) < self._until:
                for connection in [late for late, caller in callers.items() if caller.until <= now]:
                    hang_up(connection)
                until = min([self._until, *(caller.until for caller in callers.values())])
                for key, _ in waiting.select(max(0.0, until - now)):
                    if key.fileobj is self._listening:
                        if (found := self._meet()) is not None:
                            callers[found[0]] = found[1]
                            waiting.register(found[0], selectors.EVENT_READ)
                        continue
                    connection = key.fileobj  # type: ignore[assignment]
                    right: bool | None = False
                    with contextlib.suppress(OSError):
                        right = callers[connection].hear()
                    if right:
                        del callers[connection]
                        return _ready(connection, self._near)
                    if right is False:
                        hang_up(connection)
                while len(callers) > _CALLERS:
                    hang_up(next(iter(callers)))
        return None

    def _meet(self) -> tuple[socket.socket, _Caller] | None:
        """Who just connected, unless it is gone, or of another user."""
        with contextlib.suppress(OSError):
            connection, _ = self._listening.accept()
            try:
                if not self._near or _peer(connection)[1] == os.getuid():
                    return connection, _Caller(connection, self._secret)
            except OSError:
                pass
            connection.close()
        return None

    def close(self) -> None:
        """Wait for nobody any more. May be called twice."""
        self._listening.close()


def listen(host: str | None = None) -> tuple[str, Listener] | None:
    """A place to call, and who waits there. None where there is no such thing.

    Args:
        host: This machine's address for the caller's, if that is another. It may be none of this
            machine's own, as in a container whose ports are forwarded: then nobody can be called
            here.
    """
    if not sys.platform.startswith("linux"):
        return None
    secret = secrets.token_hex(_NONCE)
    try:
        listening, address = _listen_far(host) if host is not None else _listen_near()
    except OSError:
        return None
    return f"{address} {secret}", Listener(listening, secret.encode(), host is None)


def _listen_near() -> tuple[socket.socket, str]:
    address = f"raydp-parallel-{uuid.uuid4().hex}"
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(f"\0{address}")
    listening.listen(_CALLERS)
    return listening, address


def _listen_far(host: str) -> tuple[socket.socket, str]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, 0), family=family, backlog=_CALLERS)
    return listening, f"{host} {listening.getsockname()[1]}"


def far_lines() -> bool:
    """Whether other machines may be called at all."""
    return os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true")


def call(address: str) -> CallAddress:
    """Call a place. Raises `OSError` if nobody is there, or somebody else."""
    host, *port, secret = address.split()
    if port:
        connection = socket.create_connection((host, int(port[0])), timeout=_CONNECT)
    else:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if not port:
            connection.settimeout(_CONNECT)
            connection.connect(f"\0{host}")
        _prove(connection, secret.encode())
        connection.settimeout(None)
        return _ready(connection, not port)
    except BaseException:
        connection.close()
        raise


def _prove(connection: socket.socket, secret: bytes) -> None:
    """Show who listens that this process knows the secret, and see that it does, too."""
    until = time.monotonic() + _GREETING
    theirs, mine = _read(connection, _NONCE, until), os.urandom(_NONCE)
    connection.sendall(mine + _code(secret, b"caller", theirs, mine), _QUIETLY)
    if not hmac.compare_digest(
        _read(connection, _CODE, until), _code(secret, b"listener", theirs, mine)
    ):
        raise ConnectionError("who listens there does not know the secret")


def _read(connection: socket.socket, size: int, until: float) -> bytes:
    said = b""
    while len(said) < size:
        connection.settimeout(max(0.001, until - time.monotonic()))
        more = connection.recv(size - len(said))
        if not more:
            raise ConnectionError("the other end hung up at once")
        said += more
    return said


def _code(secret: bytes, end: bytes, listener: bytes, caller: bytes) -> bytes:
    """What proves that an end knows the secret, for these two numbers and no others."""
    return hmac.digest(secret, end + listener + caller, "sha256")


def _ready(connection: socket.socket, near: bool) -> CallAddress:
    """A socket both of whose ends are who they should be."""
    if near:
        return CallAddress(connection, _peer(connection)[0], True)
    # Send what there is, and do not wait for more.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return CallAddress(connection, 0, False)


def _peer(connection: socket.socket) -> tuple[int, int]:
    """The process at the other end, 0 if it cannot be seen from here, and its user."""
    process, user, _ = _PEER.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    )
    return process, user


def descriptor(connection: socket.socket, process: int) -> int | None:
    """A descriptor of the process at the other end of a near line, if it is this one; None if that
    cannot be told.

    Args:
        connection: The line's socket.
        process: The number that the process has for itself. In another namespace another process
            may have it.
    """
    if not process or _peer(connection)[0] != process:
        return None
    with contextlib.suppress(OSError):
        return connection.getsockopt(socket.SOL_SOCKET, _PEER_DESCRIPTOR)
    with contextlib.suppress(OSError, AttributeError):
        return os.pidfd_open(process)
    return None
