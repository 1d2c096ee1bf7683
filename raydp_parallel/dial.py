"""How the two ends of a line find each other.

On one machine by a Unix socket that has no name in the file system, and takes one connection of the same user. Between
two machines by TCP, and a secret that came by Ray: whoever does not say it first is hung up on. What is said then is
as plain to read as what torch's groups say, and Ray, unless that was told to encrypt: then there are no such lines.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import struct
import sys
import uuid
from typing import NamedTuple

_PEER = struct.Struct("3i")
_SECRET = 32
"""Letters of a secret."""

_CONNECT = 2.0
"""Seconds for a connection to another machine. A firewall may let Ray through, and not this."""

_GREETING = 5.0
"""Seconds in which who connected has to say the secret, or to hear that it was right."""

_WELCOME = b"+"


class Call(NamedTuple):
    """A line's socket, as the one who listened got it.

    Attributes:
        connection: The socket.
        process: The caller's process, as this one knows it; 0 if it cannot be seen from here.
        near: Whether the caller is on this machine.
    """

    connection: socket.socket
    process: int
    near: bool


class Listener:
    """Waits for one caller.

    Args:
        listening: The socket.
        secret: What a caller from another machine has to say; None for this machine.
    """

    def __init__(self, listening: socket.socket, secret: bytes | None) -> None:
        self._listening = listening
        self._secret = secret

    def accept(self) -> Call:
        """Wait for the right one, and for no other after it."""
        while True:
            connection, _ = self._listening.accept()
            found = self._near(connection) if self._secret is None else self._far(connection, self._secret)
            if found is not None:
                self._listening.close()
                return found
            connection.close()

    def _near(self, connection: socket.socket) -> Call | None:
        peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
        process, user, _ = _PEER.unpack(peer)
        return Call(connection, process, True) if user == os.getuid() else None

    def _far(self, connection: socket.socket, secret: bytes) -> Call | None:
        with contextlib.suppress(OSError):
            connection.settimeout(_GREETING)
            said = connection.recv(_SECRET, socket.MSG_WAITALL)
            if hmac.compare_digest(said, secret):
                connection.sendall(_WELCOME)
                connection.settimeout(None)
                _at_once(connection)
                return Call(connection, 0, False)
        return None


def listen(host: str | None = None) -> tuple[str, Listener] | None:
    """A place to call, and who waits there. None where there is no such thing.

    Args:
        host: This machine's address for the caller's, if that is another.
    """
    if not sys.platform.startswith("linux"):
        return None
    if host is None:
        address = f"raydp-parallel-{uuid.uuid4().hex}"
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listening.bind(f"\0{address}")
        listening.listen(1)
        return address, Listener(listening, None)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, 0), family=family)
    secret = secrets.token_hex(_SECRET // 2)
    return f"{host} {listening.getsockname()[1]} {secret}", Listener(listening, secret.encode())


def far_lines() -> bool:
    """Whether other machines may be called at all."""
    return os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true")


def call(address: str) -> tuple[socket.socket, bool]:
    """Call a place; returns the socket, and whether it is on this machine. Raises `OSError` if nobody is there."""
    host, _, rest = address.partition(" ")
    if not rest:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(f"\0{address}")
        return connection, True
    port, secret = rest.split()
    connection = socket.create_connection((host, int(port)), timeout=_CONNECT)
    try:
        connection.settimeout(_GREETING)
        connection.sendall(secret.encode())
        if connection.recv(1) != _WELCOME:
            raise ConnectionError("the other end hung up at once")
        connection.settimeout(None)
        _at_once(connection)
    except BaseException:
        connection.close()
        raise
    return connection, False


def _at_once(connection: socket.socket) -> None:
    """Send what there is, and do not wait for more."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
