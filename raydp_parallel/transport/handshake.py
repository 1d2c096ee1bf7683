"""How the two ends of a direct connection find each other, and authenticate each other.

On one machine they use a Unix socket that has no name in the file system, and takes one connection
of the same user. Between two machines they use TCP. The secret came through Ray and is never sent:
each end sends a random number, and answers the other's number with a code that depends on the
secret (HMAC, SHA-256). Before that no bytes of the other end are read as a message. The messages
are not encrypted, like those of torch's groups and of Ray. If Ray is configured to encrypt, there
are no direct connections between machines.

The standard library's `multiprocessing.connection` authenticates too, but accepts one client after
the other and waits for each without a limit, and uses MD5 before Python 3.12.
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
"""``SO_PEERPIDFD``, since Linux 6.5."""

_NONCE = 16
_CODE = 32

_CONNECT = 2.0
"""Seconds for a connection to another machine. A firewall may allow Ray's ports, and not this
one.
"""

_AUTHENTICATION = 5.0
"""Seconds in which each end has to prove that it knows the secret."""

_OPEN = 60.0
"""Seconds after which the listener closes. The driver connects as soon as it knows the address."""

_MOST_CLIENTS = 64
"""The most clients that may authenticate at the same time. If there are more, the first ones are
disconnected.
"""

_KEEPALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4}
"""A firewall drops connections without traffic, and a connection has none while the driver does
other things. Bytes that were sent and not read have no time limit (``TCP_USER_TIMEOUT``): the other
end may be busy."""

_QUIETLY = getattr(socket, "MSG_NOSIGNAL", 0)
"""A closed other end raises an error, and sends no signal that may end this process."""


class CallAddress(NamedTuple):
    """An authenticated socket.

    Attributes:
        connection: The socket.
        process: The id of the process at the other end in this process's namespace; 0 if it has
            none here.
        near: Whether that process is on this machine.
    """

    connection: socket.socket
    process: int
    near: bool


class _Client:
    """A connected client that has not proved yet that it knows the secret.

    Args:
        connection: The socket.
        secret: The secret.
    """

    def __init__(self, connection: socket.socket, secret: bytes) -> None:
        self._connection = connection
        self._secret = secret
        self._nonce = os.urandom(_NONCE)
        self._received = b""
        self.until = time.monotonic() + _AUTHENTICATION
        connection.setblocking(False)
        connection.send(self._nonce, _QUIETLY)  # which fits into a new socket's buffer

    def receive(self) -> bool | None:
        """Read the bytes that have arrived. Returns whether the client knows the secret; None if
        that is not known yet. Raises `OSError`.
        """
        more = self._connection.recv(_NONCE + _CODE - len(self._received))
        if not more:
            return False
        self._received += more
        if len(self._received) < _NONCE + _CODE:
            return None
        theirs, code = self._received[:_NONCE], self._received[_NONCE:]
        if not hmac.compare_digest(code, _code(self._secret, b"caller", self._nonce, theirs)):
            return False
        self._connection.send(_code(self._secret, b"listener", self._nonce, theirs), _QUIETLY)
        self._connection.setblocking(True)
        return True


class Listener:
    """Waits for one client that knows the secret.

    Args:
        listening: The socket.
        secret: The secret.
        near: Whether the client is a process of this machine.
    """

    def __init__(self, listening: socket.socket, secret: bytes, near: bool) -> None:
        self._listening = listening
        self._secret = secret
        self._near = near
        self._until = time.monotonic() + _OPEN

    def accept(self) -> CallAddress | None:
        """Wait for the client that knows the secret, and then close; None if it does not come.
        Other clients do not delay it.
        """
        with contextlib.ExitStack() as cleanup, selectors.DefaultSelector() as waiting:
            cleanup.callback(self.close)
            clients: dict[socket.socket, _Client] = {}
            cleanup.callback(lambda: [*map(socket.socket.close, clients)])
            self._listening.setblocking(False)
            waiting.register(self._listening, selectors.EVENT_READ)

            def disconnect(connection: socket.socket) -> None:
                waiting.unregister(connection)
                del clients[connection]
                connection.close()

            while (now := time.monotonic()) < self._until:
                for connection in [late for late, client in clients.items() if client.until <= now]:
                    disconnect(connection)
                until = min([self._until, *(client.until for client in clients.values())])
                for key, _ in waiting.select(max(0.0, until - now)):
                    if key.fileobj is self._listening:
                        if (found := self._accept_one()) is not None:
                            clients[found[0]] = found[1]
                            waiting.register(found[0], selectors.EVENT_READ)
                        continue
                    connection = key.fileobj  # type: ignore[assignment]
                    authentic: bool | None = False
                    with contextlib.suppress(OSError):
                        authentic = clients[connection].receive()
                    if authentic:
                        del clients[connection]
                        return _ready(connection, self._near)
                    if authentic is False:
                        disconnect(connection)
                while len(clients) > _MOST_CLIENTS:
                    disconnect(next(iter(clients)))
        return None

    def _accept_one(self) -> tuple[socket.socket, _Client] | None:
        """Accept a connection; None if it is closed already, or of another user."""
        with contextlib.suppress(OSError):
            connection, _ = self._listening.accept()
            try:
                if not self._near or _peer(connection)[1] == os.getuid():
                    return connection, _Client(connection, self._secret)
            except OSError:
                pass
            connection.close()
        return None

    def close(self) -> None:
        """Close the listening socket. May be called twice."""
        self._listening.close()


def listen(host: str | None = None) -> tuple[str, Listener] | None:
    """Open an address to connect to; returns it with its listener. None where that is impossible.

    Args:
        host: This machine's address for clients on another machine; None for clients on this one.
            An address that is none of this machine's own, as in a container with forwarded ports,
            cannot be opened.
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
    listening.listen(_MOST_CLIENTS)
    return listening, address


def _listen_far(host: str) -> tuple[socket.socket, str]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, 0), family=family, backlog=_MOST_CLIENTS)
    return listening, f"{host} {listening.getsockname()[1]}"


def far_lines() -> bool:
    """Whether direct connections to other machines are allowed."""
    return os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true")


def call(address: str) -> CallAddress:
    """Connect to an address. Raises `OSError` if no process listens there, or another process."""
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
    """Prove to the listener that this process knows the secret, and check that it knows it too."""
    until = time.monotonic() + _AUTHENTICATION
    theirs, mine = _read(connection, _NONCE, until), os.urandom(_NONCE)
    connection.sendall(mine + _code(secret, b"caller", theirs, mine), _QUIETLY)
    if not hmac.compare_digest(
        _read(connection, _CODE, until), _code(secret, b"listener", theirs, mine)
    ):
        raise ConnectionError("the listener does not know the secret")


def _read(connection: socket.socket, size: int, until: float) -> bytes:
    received = b""
    while len(received) < size:
        connection.settimeout(max(0.001, until - time.monotonic()))
        more = connection.recv(size - len(received))
        if not more:
            raise ConnectionError("the other end closed the connection at once")
        received += more
    return received


def _code(secret: bytes, end: bytes, listener: bytes, caller: bytes) -> bytes:
    """The code by which an end proves that it knows the secret, for these two random numbers."""
    return hmac.digest(secret, end + listener + caller, "sha256")


def _ready(connection: socket.socket, near: bool) -> CallAddress:
    """Set the options of an authenticated socket."""
    if near:
        return CallAddress(connection, _peer(connection)[0], True)
    # Send bytes at once, without waiting for more.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return CallAddress(connection, 0, False)


def _peer(connection: socket.socket) -> tuple[int, int]:
    """The id of the process at the other end, 0 if it has none here, and its user id."""
    process, user, _ = _PEER.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    )
    return process, user


def descriptor(connection: socket.socket, process: int) -> int | None:
    """A descriptor of the process at the other end of a Unix socket, if its id is ``process``; None
    otherwise.

    Args:
        connection: The socket.
        process: The id that the process has in its own namespace. In another namespace another
            process may have this id.
    """
    if not process or _peer(connection)[0] != process:
        return None
    with contextlib.suppress(OSError):
        return connection.getsockopt(socket.SOL_SOCKET, _PEER_DESCRIPTOR)
    with contextlib.suppress(OSError, AttributeError):
        return os.pidfd_open(process)
    return None
