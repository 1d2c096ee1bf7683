"""How the two ends of a socket find each other, and authenticate each other: of a direct connection
between the driver and a replica, and of the store by which members of a group find each other.

On one machine a direct connection uses a Unix socket that has no name in the file system, and takes
one connection of the same user. All others use TCP. The secret came through Ray and is never sent:
each end sends a random number, and answers the other's number with a code that depends on the
secret (HMAC, SHA-256). Before that no bytes of the other end are read as a message. The messages
are not encrypted, like those of torch's groups and of Ray. If Ray is configured to encrypt, there
are no direct connections between machines.

The standard library's `multiprocessing.connection` authenticates too, but accepts one client after
the other and waits for each without a limit, and uses MD5 before Python 3.12.

[Note: many clients]
A client that has not proved yet that it knows the secret costs one descriptor and a nonce. If there
are too many, the oldest ones are disconnected, because the right client needs one round trip only.
A program that connects faster than that may still make the listener disconnect it; it then connects
again.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import math
import os
import secrets
import selectors
import socket
import struct
import sys
import time
import uuid
from collections.abc import Generator
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

_TRIES = 3
"""Connections that a client tries, if the listener closes them before either end has proved
anything.
"""

_OPEN = 60.0
"""Seconds for which the listener of a direct connection waits, once it can answer. The driver
connects as soon as it knows the address.
"""

_MOST_CLIENTS = 512
"""The most clients that may authenticate at the same time, and the most connections that wait to be
accepted.
"""

_SHARE_OF_DESCRIPTORS = 4
"""The part of this process's descriptors that clients may use before they are authenticated: one in
so many.
"""

_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
_PAUSE = 0.01
"""Seconds until the next try to accept a client, where there are no descriptors."""

_HUNG_UP = "the other end closed the connection at once"

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


class _Refused(ConnectionError):
    """The listener closed the connection before it had read a proof, or because of the proof."""


class _Unproven:
    """The connected clients that have not proved yet that they know the secret.

    Args:
        waiting: Notices what they send.
    """

    def __init__(self, waiting: selectors.BaseSelector) -> None:
        self._waiting = waiting
        self._clients: dict[socket.socket, _Client] = {}

    def add(self, connection: socket.socket, client: _Client) -> None:
        """Wait for this client too."""
        while len(self._clients) >= _most_clients():
            self.disconnect_oldest()
        self._clients[connection] = client
        self._waiting.register(connection, selectors.EVENT_READ)

    def receive(self, connection: socket.socket) -> bool:
        """Read what a client has sent. Returns whether it knows the secret, and then lets go of it;
        a client that does not is disconnected.
        """
        client, authentic = self._clients.get(connection), None
        if client is None:  # it was disconnected meanwhile
            return False
        try:
            authentic = client.receive()
        except OSError:
            authentic = False
        if authentic:
            self._let_go(connection)
        elif authentic is False:
            self._disconnect(connection)
        return bool(authentic)

    def disconnect_late(self) -> float:
        """Disconnect the clients that are out of time; returns when the next one is."""
        now = time.monotonic()
        for connection, client in [*self._clients.items()]:
            if client.until <= now:
                self._disconnect(connection)
        return min([client.until for client in self._clients.values()], default=math.inf)

    def disconnect_oldest(self) -> bool:
        """Disconnect the client that came first; returns whether there was one."""
        for connection in self._clients:
            self._disconnect(connection)
            return True
        return False

    def close(self) -> None:
        """Disconnect all."""
        while self.disconnect_oldest():
            pass

    def _disconnect(self, connection: socket.socket) -> None:
        self._let_go(connection)
        connection.close()

    def _let_go(self, connection: socket.socket) -> None:
        self._waiting.unregister(connection)
        del self._clients[connection]


def _most_clients() -> int:
    """The most clients that may authenticate at the same time in this process."""
    descriptors = 0
    with contextlib.suppress(AttributeError, ValueError, OSError):  # where that is not known
        descriptors = os.sysconf("SC_OPEN_MAX")
    share = descriptors // _SHARE_OF_DESCRIPTORS
    return min(_MOST_CLIENTS, share) if share > 0 else _MOST_CLIENTS


class Listener:
    """Waits for clients that know the secret.

    Args:
        listening: The socket.
        secret: The secret.
        near: Whether clients are processes of this machine.
    """

    def __init__(self, listening: socket.socket, secret: bytes, near: bool) -> None:
        self._listening = listening
        self._secret = secret
        self._near = near
        # Closing a socket does not wake a thread that waits for it. The end of a pair does.
        self._open, self._closed = socket.socketpair()
        self._waits = False

    def accept(self) -> CallAddress | None:
        """Wait for one client that knows the secret, and then close; None if none comes within a
        minute. Other clients do not delay it.
        """
        with contextlib.closing(self), contextlib.closing(self.clients(_OPEN)) as clients:
            return next(clients, None)

    def clients(self, seconds: float = math.inf) -> Generator[CallAddress, None, None]:
        """The clients that know the secret, as they come, for so long, or until `close`."""
        self._waits = True
        end = time.monotonic() + seconds
        with self._closed, selectors.DefaultSelector() as waiting:
            unproven = _Unproven(waiting)
            with contextlib.closing(unproven):
                try:
                    waiting.register(self._closed, selectors.EVENT_READ)
                    self._listening.setblocking(False)
                    waiting.register(self._listening, selectors.EVENT_READ)
                except (OSError, ValueError):
                    return  # it was closed already
                while time.monotonic() < end:
                    until = min(end, unproven.disconnect_late())
                    left = None if until == math.inf else max(0.0, until - time.monotonic())
                    for key, _ in waiting.select(left):
                        if key.fileobj is self._closed:
                            return
                        if key.fileobj is self._listening:
                            self._accept_one(unproven)
                            continue
                        connection: socket.socket = key.fileobj  # type: ignore[assignment]
                        if not unproven.receive(connection):
                            continue
                        try:
                            found = _ready(connection, self._near)
                        except OSError:
                            connection.close()  # the client is gone already
                            continue
                        yield found

    def _accept_one(self, unproven: _Unproven) -> None:
        """Accept a connection, unless it is closed already, or of another user."""
        try:
            connection, _ = self._listening.accept()
        except OSError as error:
            if error.errno in _NO_DESCRIPTORS and not unproven.disconnect_oldest():
                time.sleep(_PAUSE)
            return
        try:
            if not self._near or _peer(connection)[1] == os.getuid():
                unproven.add(connection, _Client(connection, self._secret))
                return
        except OSError:
            pass
        connection.close()

    def close(self) -> None:
        """Close the listening socket, and end `clients`. May be called twice, from any thread."""
        self._listening.close()
        self._open.close()
        if not self._waits:
            self._closed.close()


def listen(host: str | None = None) -> tuple[str, Listener] | None:
    """Open an address to connect to; returns it with its listener. None where that is impossible.

    Args:
        host: This machine's address for clients on another machine; None for clients on this one.
            An address that is none of this machine's own, as in a container with forwarded ports,
            cannot be opened.
    """
    if not sys.platform.startswith("linux"):
        return None
    secret = new_secret()
    try:
        listening, address = _listen_far(host) if host is not None else _listen_near()
    except OSError:
        return None
    return f"{address} {secret}", Listener(listening, secret.encode(), host is None)


def new_secret() -> str:
    """A secret that no other process can guess."""
    return secrets.token_hex(_NONCE)


def listen_to_many(host: str, secret: str) -> tuple[int, Listener]:
    """Open a port of this machine's address for clients that know a secret; returns it with its
    listener. Raises `OSError`.
    """
    listening, _ = _listen_far(host)
    return listening.getsockname()[1], Listener(listening, secret.encode(), False)


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
    for left in reversed(range(_TRIES)):
        try:
            return _call(address)
        except _Refused:
            if not left:
                raise
    raise AssertionError("the last try returns, or raises")


def _call(address: str) -> CallAddress:
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
    try:
        connection.sendall(mine + _code(secret, b"caller", theirs, mine), _QUIETLY)
    except ConnectionError as error:
        raise _Refused(_HUNG_UP) from error
    if not hmac.compare_digest(
        _read(connection, _CODE, until), _code(secret, b"listener", theirs, mine)
    ):
        raise ConnectionError("the listener does not know the secret")


def _read(connection: socket.socket, size: int, until: float) -> bytes:
    received = b""
    while len(received) < size:
        connection.settimeout(max(0.001, until - time.monotonic()))
        try:
            more = connection.recv(size - len(received))
        except ConnectionError as error:
            raise _Refused(_HUNG_UP) from error
        if not more:
            raise _Refused(_HUNG_UP)
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
        if hasattr(socket, option):
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
