"""The store by which the members of one group find each other.

Torch's own `TCPStore` answers every program that can connect to it. Here a member proves by the
handshake of direct connections that it knows the executor's secret, before the store reads anything
that it says; and it checks that the store knows the secret too. All members use the store over
sockets, also the one that hosts it.

[Note: the protocol]
A request is a number that says what is asked, the seconds to wait for keys, and some byte strings;
an answer is a number and some byte strings. Nothing is unpickled. A member uses one connection for
each of its threads that asks at the same time, so that none waits behind another that waits for a
key; the store has one thread for each connection. A group needs its store while it is made. It
stays until the group is left, because torch may ask it later.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from torch import distributed

from raydp_parallel.devices import forks
from raydp_parallel.transport import handshake
from raydp_parallel.transport.direct_connection import QUIETLY

_HEAD = struct.Struct("<BdI")
"""What is asked, or whether it was done; the seconds to wait; the bytes that follow."""
_LENGTH = struct.Struct("<I")

_SET, _GET, _WAIT, _CHECK, _ADD, _APPEND, _COMPARE_SET, _DELETE, _COUNT = range(9)
_DONE, _LATE, _REFUSED = range(3)

_MOST_BYTES = 1 << 24
"""The most bytes of a request, of an answer, and of all values. A member of a thousand stores the
addresses of a thousand sockets, some 100 KB.
"""

_MOST_KEYS = 1 << 16

_LONGEST = 86_400.0
"""The most seconds that a request waits for keys."""

_ANSWER = 5.0
"""Seconds that the store may take to answer, beside those that it waits for keys."""

_TORCH_STORE: Any = getattr(distributed, "Store", object)
"""Torch's store, where torch was built with groups."""


class _Ended(ConnectionError):
    """The other end has closed the connection."""


class StoreServer:
    """The store of one group, in the member that hosts it.

    Args:
        host: The address of this machine at which it listens.
        secret: What members have to know.

    Attributes:
        port: The port at which it listens.
    """

    def __init__(self, host: str, secret: str) -> None:
        self.port, self._listener = handshake.listen_to_many(host, secret)
        forks.close_in_child(self._listener)
        self._values: dict[bytes, bytes] = {}
        self._changed = threading.Condition()
        self._connections: set[socket.socket] = set()
        self._over = False
        threading.Thread(target=self._accept, name="raydp-store", daemon=True).start()

    def close(self) -> None:
        """End the store: its threads end, and members get an error. From any thread."""
        self._listener.close()
        with self._changed:
            self._over = True
            self._values.clear()
            self._changed.notify_all()
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)  # its thread closes it

    def _accept(self) -> None:
        with contextlib.closing(self._listener.clients()) as clients:
            for client in clients:
                forks.close_in_child(client.connection)
                with self._changed:
                    if self._over:
                        client.connection.close()
                        return
                    self._connections.add(client.connection)
                threading.Thread(
                    target=self._serve, args=(client.connection,), name="raydp-store", daemon=True
                ).start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError, struct.error):
            while True:
                asked, seconds, parts = _read(connection)
                _write(connection, *self._answer(asked, seconds, parts))
        with self._changed:
            self._connections.discard(connection)
        connection.close()

    def _answer(
        self, asked: int, seconds: float, parts: Sequence[bytes]
    ) -> tuple[int, Sequence[bytes]]:
        """Do what a request asks for."""
        with self._changed:
            if asked in (_GET, _WAIT):
                limit = time.monotonic() + (min(seconds, _LONGEST) if seconds > 0 else 0.0)
                while not self._over and not self._has(parts):
                    left = limit - time.monotonic()
                    if left <= 0:
                        return _LATE, [part for part in parts if part not in self._values]
                    self._changed.wait(left)
            if self._over:
                raise _Ended("the group was left")
            try:
                return _DONE, self._work(asked, parts)
            except ValueError as error:
                return _REFUSED, [str(error).encode()]

    def _work(self, asked: int, parts: Sequence[bytes]) -> Sequence[bytes]:
        if asked == _SET:
            self._put(dict(zip(parts[::2], parts[1::2], strict=True)))
            return []
        if asked == _GET:
            return [self._values[key] for key in parts]
        if asked == _WAIT:
            return []
        if asked == _CHECK:
            return [b"1"] if self._has(parts) else []
        if asked == _COUNT:
            return [str(len(self._values)).encode()]
        if asked == _DELETE:
            (key,) = parts
            return [b"1"] if self._values.pop(key, None) is not None else []
        key, *given = parts
        now = self._values.get(key)
        if asked == _ADD:
            (text,) = given
            total = str(int(now or b"0") + int(text)).encode()
            self._put({key: total})
            return [total]
        if asked == _APPEND:
            (more,) = given
            self._put({key: (now or b"") + more})
            return []
        if asked == _COMPARE_SET:
            expected, desired = given
            if now == expected or (now is None and not expected):
                self._put({key: desired})
                return [desired]
            return [expected if now is None else now]
        raise ValueError(f"no request has the number {asked}")

    def _has(self, keys: Sequence[bytes]) -> bool:
        return all(key in self._values for key in keys)

    def _put(self, values: Mapping[bytes, bytes]) -> None:
        after = {**self._values, **values}
        if len(after) > _MOST_KEYS or sum(map(len, after.values())) > _MOST_BYTES:
            raise ValueError(f"the store holds at most {_MOST_KEYS} keys and {_MOST_BYTES} bytes")
        self._values = after
        self._changed.notify_all()


class StoreClient(_TORCH_STORE):  # type: ignore[misc]
    """One member's end of the store, in the form in which torch's groups use it: torch calls the
    methods that have the names of its own.

    Args:
        address: Host and port of the store.
        secret: What both ends have to know.
        patience: Seconds to wait for keys, unless said otherwise.
    """

    def __init__(self, address: tuple[str, int], secret: str, patience: float) -> None:
        super().__init__()
        self.set_timeout(timedelta(seconds=patience))
        self._address = f"{address[0]} {address[1]} {secret}"
        self._guard = threading.Lock()
        self._idle: list[socket.socket] = []
        self._busy: set[socket.socket] = set()
        self._over = False

    def close(self) -> None:
        """Close the connections; a thread that waits for the store gets an error. From any
        thread.
        """
        with self._guard:
            self._over = True
            for connection in self._busy:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)  # its thread closes it
        self.rest()

    def rest(self) -> None:
        """Close the connections that no thread uses; the next request opens another."""
        with self._guard:
            while self._idle:
                self._idle.pop().close()

    def set(self, key: str, value: bytes) -> None:
        """Store a value under a key."""
        self._ask(_SET, [key.encode(), value])

    def get(self, key: str) -> bytes:
        """A value; waits until it is stored."""
        return self._ask(_GET, [key.encode()], self.timeout)[0]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until values are stored under all keys."""
        self._ask(_WAIT, [key.encode() for key in keys], timeout or self.timeout)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether values are stored under all keys."""
        return bool(self._ask(_CHECK, [key.encode() for key in keys]))

    def add(self, key: str, amount: int) -> int:
        """Add to the number under a key; returns the sum."""
        return int(self._ask(_ADD, [key.encode(), str(amount).encode()])[0])

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Store a value if there is the expected one; returns what is there then."""
        return self._ask(_COMPARE_SET, [key.encode(), expected, desired])[0]

    def append(self, key: str, value: bytes) -> None:
        """Append to the value under a key."""
        self._ask(_APPEND, [key.encode(), value])

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Several values; waits until all are stored."""
        return [*self._ask(_GET, [key.encode() for key in keys], self.timeout)]

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes]) -> None:
        """Store several values."""
        pairs = zip(keys, values, strict=True)
        self._ask(_SET, [part for key, value in pairs for part in (key.encode(), value)])

    def has_extended_api(self) -> bool:
        """Whether there are `append`, `multi_get` and `multi_set`."""
        return True

    def deleteKey(self, key: str) -> bool:
        """Remove a key; returns whether it was there."""
        return bool(self._ask(_DELETE, [key.encode()]))

    def getNumKeys(self) -> int:
        """The number of keys."""
        return int(self._ask(_COUNT, [])[0])

    def clone(self) -> StoreClient:
        """This store: all threads may use it."""
        return self

    def _ask(
        self, what: int, parts: Sequence[bytes], timeout: timedelta | None = None
    ) -> Sequence[bytes]:
        """The store's answer. Raises torch's `DistStoreError`."""
        seconds = 0.0 if timeout is None else timeout.total_seconds()
        try:
            with self._connection() as connection:
                connection.settimeout(min(seconds, _LONGEST) + _ANSWER)
                _write(connection, what, parts, seconds)
                done, _, answer = _read(connection)
        except (OSError, ValueError) as error:
            raise _failure(f"the group's store: {str(error) or type(error).__name__}") from error
        if done == _LATE:
            keys = ", ".join(part.decode(errors="replace") for part in answer[:3])
            raise _failure(f"nothing was stored under {keys} within {seconds:g} s")
        if done == _REFUSED:
            raise _failure(answer[0].decode(errors="replace"))
        return answer

    @contextlib.contextmanager
    def _connection(self) -> Any:
        """A connection that no other thread uses. It is kept for later, unless it breaks."""
        with self._guard:
            connection = self._idle.pop() if self._idle else None
        if connection is None:
            connection = handshake.call(self._address).connection
            forks.close_in_child(connection)
        with self._guard:
            if self._over:
                connection.close()
                raise _Ended("the group was left")
            self._busy.add(connection)
        whole = False
        try:
            yield connection
            whole = True
        finally:
            with self._guard:
                self._busy.discard(connection)
                if whole and not self._over:
                    self._idle.append(connection)
                else:
                    connection.close()


def _failure(text: str) -> Exception:
    kind: Callable[[str], Exception] = getattr(distributed, "DistStoreError", RuntimeError)
    return kind(text)


def _write(
    connection: socket.socket, number: int, parts: Sequence[bytes], seconds: float = 0.0
) -> None:
    body = b"".join(_LENGTH.pack(len(part)) + part for part in parts)
    connection.sendall(_HEAD.pack(number, seconds, len(body)) + body, QUIETLY)


def _read(connection: socket.socket) -> tuple[int, float, list[bytes]]:
    number, seconds, size = _HEAD.unpack(_read_bytes(connection, _HEAD.size))
    if size > _MOST_BYTES:
        raise ValueError(f"a message of a group's store has {size} bytes")
    body, at = _read_bytes(connection, size), 0
    parts: list[bytes] = []
    while at < size:
        (length,) = _LENGTH.unpack_from(body, at)
        at += _LENGTH.size
        parts.append(body[at : at + length])
        at += length
    if at != size:
        raise ValueError("a message of a group's store breaks off")
    return number, seconds, parts


def _read_bytes(connection: socket.socket, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        more = connection.recv(size - len(found))
        if not more:
            raise _Ended("the other end of the group's store is gone")
        found += more
    return bytes(found)
