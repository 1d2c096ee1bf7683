"""Shared memory for processes of one machine: written once, read where it lies.

A segment is an anonymous file of its owner (``memfd_create``); the other side maps ``/proc/<pid>/fd/<n>``. It has no
name that could be left behind: the kernel frees it with its last mapping, whoever is killed. It is not bound by the
size of ``/dev/shm``, which is 64 MB in a default container.

[Note: who may write when]
A `Slice` is a segment lent out; when it is garbage, its segment is free for the next. The driver keeps a slice as long
as a call that was sent with it is on its way, or as its contents are current. A replica keeps what it sent until the
driver says that it has read it, which rides on the next call.
"""

from __future__ import annotations

import itertools
import mmap
import os
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from raydp_parallel.links.base import Piece, fill

_SMALLEST = 1 << 16
_tokens = itertools.count(1)
_leases = itertools.count(1)


class Descriptor(NamedTuple):
    """What the other process needs to read a slice.

    Attributes:
        token: Names the segment, for good.
        path: Where to map it from.
        length: Bytes of the segment.
        size: Bytes of it that count.
        lease: Names this use of the segment, for the word that it was read.
    """

    token: int
    path: str
    length: int
    size: int
    lease: int


class _Segment:
    """Anonymous memory that another process of the same user can map."""

    def __init__(self, length: int) -> None:
        self.token = next(_tokens)
        self.length = length
        self._file = os.memfd_create("raydp_parallel", os.MFD_CLOEXEC)
        os.ftruncate(self._file, length)
        self.array = np.frombuffer(mmap.mmap(self._file, length), dtype=np.uint8)
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"
        weakref.finalize(self, os.close, self._file)


class Slice:
    """A segment lent out; free again when this is garbage.

    Args:
        segment: The memory.
        size: Bytes that count.
        free: Takes the segment back.
    """

    def __init__(self, segment: _Segment, size: int, free: Callable[[_Segment], None]) -> None:
        self.array = segment.array[:size]
        self.descriptor = Descriptor(segment.token, segment.path, segment.length, size, next(_leases))
        weakref.finalize(self, free, segment).atexit = False


class Arena:
    """Segments of this process, recycled by size."""

    def __init__(self) -> None:
        self._free: dict[int, list[_Segment]] = defaultdict(list)

    def take(self, size: int) -> Slice:
        """Memory for ``size`` bytes."""
        length = max(_SMALLEST, 1 << (size - 1).bit_length())
        # No lock: finalizers give back at any moment, also while this runs; list operations are atomic.
        try:
            segment = self._free[length].pop()
        except IndexError:
            segment = _Segment(length)
        return Slice(segment, size, self._give_back)

    def _give_back(self, segment: _Segment) -> None:
        self._free[segment.length].append(segment)

    def close(self) -> None:
        """Free what is not lent out."""
        self._free.clear()


class SharedLink:
    """Slices of an arena, written once.

    Args:
        arena: Where the memory comes from.
    """

    name = "shared"

    def __init__(self, arena: Arena) -> None:
        self._arena = arena

    def send(self, pieces: Sequence[Piece], offsets: Sequence[int], size: int) -> Slice:
        lent = self._arena.take(size)
        fill(lent.array.ctypes.data, pieces, offsets)
        return lent

    def open(self, packet: Slice | np.ndarray) -> Piece:
        array = packet.array if isinstance(packet, Slice) else packet
        return Piece(array.__array_interface__["data"][0], array.nbytes, packet)

    def close(self) -> None:
        self._arena.close()


class Mappings:
    """Segments of another process, mapped once each."""

    def __init__(self) -> None:
        self._known: dict[int, np.ndarray] = {}

    def open(self, found: Descriptor) -> np.ndarray:
        """The bytes of the other process's slice."""
        whole = self._known.get(found.token)
        if whole is None:
            file = os.open(found.path, os.O_RDWR)
            try:
                whole = np.frombuffer(mmap.mmap(file, found.length), dtype=np.uint8)
            finally:
                os.close(file)
            self._known[found.token] = whole
        return whole[: found.size]


def exists() -> bool:
    """Whether this system has such memory at all."""
    return hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd")
