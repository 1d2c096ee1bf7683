"""Large amounts go through Ray's object store, as one flat buffer.

Never as torch tensors: Ray pickles the whole storage behind a view, and 100 MB take 115 ms where a flat buffer takes 8.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from raydp_parallel.links.base import Link, Piece, Room, fill, in_bytes


def _as_it_is(value: Any) -> Any:
    return value


class ObjectStoreLink(Link):
    """Flat NumPy buffers.

    Args:
        put: Stores a buffer and returns its reference: ``ray.put`` in the driver, which sends one buffer to many.
            A replica returns its buffer as it is, and Ray stores the return value.
        get: Fetches what ``put`` returned, for the one that stored it.
    """

    name = "object_store"

    def __init__(self, put: Callable[[Any], Any] = _as_it_is, get: Callable[[Any], Any] = _as_it_is) -> None:
        self._put = put
        self._get = get
        self._scratch: np.ndarray | None = None

    def send(self, pieces: Sequence[Piece], offsets: Sequence[int], size: int) -> Any:
        buffer = self._buffer(size)
        fill(buffer.ctypes.data, pieces, offsets)
        return self._put(buffer)

    def room(self, size: int) -> Room | None:
        if self._put is not _as_it_is:
            return None  # its buffer serves every call
        buffer = np.empty(size, dtype=np.uint8)
        return Room(buffer.ctypes.data, size, lambda counts: buffer[:counts])

    def open(self, packet: Any) -> Piece:
        if isinstance(packet, bytes):
            return in_bytes(packet)  # of a message without tensors, or small and from a line
        buffer = packet if isinstance(packet, np.ndarray) else self._get(packet)
        return Piece(buffer.__array_interface__["data"][0], buffer.nbytes, buffer)

    def close(self) -> None:
        self._scratch = None

    def _buffer(self, size: int) -> np.ndarray:
        if self._put is _as_it_is:
            return np.empty(size, dtype=np.uint8)
        # ``put`` copies, so one buffer serves every call; its pages are touched already, which halves the time.
        if self._scratch is None or len(self._scratch) < size:
            self._scratch = np.empty(size, dtype=np.uint8)
        return self._scratch[:size]
