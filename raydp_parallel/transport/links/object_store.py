"""The link through Ray's object store, for large amounts, as one flat buffer.

Tensors are never put there: Ray pickles the whole storage behind a view, and 100 MB take 115 ms
where a flat buffer takes 8 ms.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from raydp_parallel.devices import forks
from raydp_parallel.devices.ranges import MemoryRange, fill, in_bytes
from raydp_parallel.transport.links.link import Link, ReservedMemory


def _as_it_is(value: Any) -> Any:
    return value


class ObjectStoreLink(Link):
    """Sends flat NumPy buffers through Ray's object store.

    Args:
        put: Stores a buffer and returns its reference: ``ray.put`` in the driver, which sends one
            buffer to many. A replica returns its buffer as it is, and Ray stores the return value.
        get: Fetches the buffer for a reference that ``put`` returned, in the process that stored
        it.
    """

    name = "object_store"

    def __init__(
        self, put: Callable[[Any], Any] = _as_it_is, get: Callable[[Any], Any] = _as_it_is
    ) -> None:
        self._put = put
        self._get = get
        self._scratch: np.ndarray | None = None

    def send(self, pieces: Sequence[MemoryRange], offsets: Sequence[int], size: int) -> Any:
        buffer = self._buffer(size)
        fill(buffer.ctypes.data, pieces, offsets)
        return self._put(buffer)

    def room(self, size: int) -> ReservedMemory | None:
        if self._put is not _as_it_is:
            return None  # one buffer serves every call
        buffer = np.empty(size, dtype=np.uint8)
        return ReservedMemory(buffer.ctypes.data, size, lambda counts: buffer[:counts])

    def open(self, packet: Any) -> MemoryRange:
        if isinstance(packet, bytes):
            return in_bytes(packet)  # without tensors, or small and from a direct connection
        buffer = packet if isinstance(packet, np.ndarray) else self._get(packet)
        return MemoryRange(buffer.__array_interface__["data"][0], buffer.nbytes, buffer)

    def close(self) -> None:
        self._scratch = None

    def _buffer(self, size: int) -> np.ndarray:
        if self._put is _as_it_is:
            return np.empty(size, dtype=np.uint8)
        # One buffer serves every call: its pages were touched before, which halves the time.
        # ``put`` copies it, or it is sent before the next call; a connection that has to hold a
        # call back copies it.
        if self._scratch is None or len(self._scratch) < size:
            self._scratch = np.empty(size, dtype=np.uint8)
        return self._scratch[:size]


class Delivered(NamedTuple):
    """A buffer of a message that Ray delivers from its object store, beside the direct connection.

    Attributes:
        number: Its number among the buffers for one receiver; later buffers have higher numbers.
    """

    number: int


class Deliveries:
    """The buffers that Ray has delivered and no message has asked for yet."""

    def __init__(self) -> None:
        self._arrived: dict[int, Any] = {}
        self._taken = 0
        self._changed = threading.Condition()
        forks.tell_child(self)

    def after_fork(self) -> None:
        """Replace the lock, which a thread that the child does not have may hold."""
        self._changed = threading.Condition()

    def arrive(self, number: int, buffer: Any) -> None:
        """Keep a buffer for its message, unless a later buffer was taken: then its message was
        lost.
        """
        with self._changed:
            if number > self._taken:
                self._arrived[number] = buffer
                self._changed.notify_all()

    def take(self, wanted: Delivered, patience: float) -> Any:
        """Wait for a buffer.

        Raises:
            TimeoutError: Ray has not delivered it in time.
        """
        number = wanted.number
        with self._changed:
            if not self._changed.wait_for(lambda: number in self._arrived, patience):
                raise TimeoutError(f"Ray's object store brought no weights within {patience:g} s")
            self._taken = max(self._taken, number)
            found = self._arrived[number]
            self._arrived = {n: kept for n, kept in self._arrived.items() if n > number}
            return found
