"""Another process's memory, seen from here: as it is, or through a window that keeps to itself what is written to it.

[Note: what is written stays here]
A window is a private mapping (``MAP_PRIVATE``): it shows the file, and a page that is written to becomes this
process's own. Such a page no longer follows the file; `Private.refresh` drops it, so that the file shows again.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections import deque

import numpy as np

from raydp_parallel.links.base import PAGE, Packet, Piece
from raydp_parallel.links.segments import Descriptor

_PATIENCE = 64
"""A mapping that was not used while so many others were goes."""

_CROWD = 64
"""So many packets may be in use where they lie. More are copied: each keeps a file of its owner's open."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, *[ctypes.c_size_t] * 1, *[ctypes.c_int] * 3, ctypes.c_long)
_MAP_FIXED = 0x10
_WRITABLE = mmap.PROT_READ | mmap.PROT_WRITE


class Found:
    """Memory of another process that a message brought here.

    Args:
        descriptor: Which.
        mappings: Where it is mapped.
    """

    def __init__(self, descriptor: Descriptor, mappings: Mappings) -> None:
        self.descriptor = descriptor
        self._mappings = mappings

    def piece(self) -> Piece:
        """The memory itself."""
        array = self._mappings.map(self.descriptor)
        return Piece(array.__array_interface__["data"][0], self.descriptor.size, (array, self))

    def take(self) -> Piece | None:
        """The memory for one's own use; None if too much is in use already."""
        if not self._mappings.admit(self):
            return None
        return self.piece() if self.descriptor.given else Private(self, 0, self.descriptor.size).piece


class Private:
    """A window on a run of found memory.

    Args:
        found: The memory.
        offset: Where the run begins.
        size: Its bytes.
    """

    def __init__(self, found: Found, offset: int, size: int) -> None:
        self._found, self._offset, self._size = found, offset, size
        begin = offset // PAGE * PAGE
        file = open_file(found.descriptor)
        try:
            length = offset - begin + size
            self._map = mmap.mmap(file, length, flags=mmap.MAP_PRIVATE, prot=_WRITABLE, offset=begin)
        finally:
            os.close(file)
        whole = np.frombuffer(self._map, dtype=np.uint8)
        self._address = whole.__array_interface__["data"][0] + offset - begin

    @property
    def piece(self) -> Piece:
        """The memory of the window; the window lives as long as anybody uses it."""
        return Piece(self._address, self._size, self)

    def again(self) -> Private:
        """Another window on the same bytes."""
        return Private(self._found, self._offset, self._size)

    def refresh(self) -> None:
        """Drop what was written."""
        self._map.madvise(mmap.MADV_DONTNEED)

    def turn_to(self, packet: Packet, offset: int, size: int) -> bool:
        """Show other memory at the same address, if it lies there as this does."""
        if not isinstance(packet, Found) or size != self._size or offset % PAGE != self._offset % PAGE:
            return False
        file = open_file(packet.descriptor)
        try:
            within = offset % PAGE
            address = self._address - within
            fixed = mmap.MAP_PRIVATE | _MAP_FIXED
            if _libc.mmap(address, size + within, _WRITABLE, fixed, file, offset - within) != address:
                raise OSError(ctypes.get_errno(), f"{packet.descriptor.path} cannot be mapped")
        finally:
            os.close(file)
        self._found, self._offset = packet, offset
        return True

    def source(self) -> Piece:
        """The memory itself."""
        whole = self._found.piece()
        return Piece(whole.address + self._offset, self._size, whole.owner)


class Mappings:
    """Memory of another process, mapped once each, and the word which of it is no longer used."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[np.ndarray, int]] = {}
        self._clock = 0
        self._found: weakref.WeakValueDictionary[int, Found] = weakref.WeakValueDictionary()
        self._times: dict[int, int] = {}
        self._used: weakref.WeakSet[Found] = weakref.WeakSet()
        self._released: deque[tuple[int, int]] = deque()

    def find(self, descriptor: Descriptor) -> Found:
        """What a message brought."""
        if not descriptor.lease:
            return Found(descriptor, self)
        found = self._found.get(descriptor.lease)
        if found is None:
            self._found[descriptor.lease] = found = Found(descriptor, self)
            weakref.finalize(found, self._release, descriptor.lease).atexit = False
        self._times[descriptor.lease] = self._times.get(descriptor.lease, 0) + 1
        return found

    def _release(self, lease: int) -> None:
        self._released.append((lease, self._times.pop(lease, 0)))

    def released(self) -> list[tuple[int, int]]:
        """The leases that nobody here uses any more, and how often each had come. Each is told once."""
        return [self._released.popleft() for _ in range(len(self._released))]

    def held(self) -> dict[int, int]:
        """The leases in use, and how often each came; what `released` had to tell is contained in that."""
        self._released.clear()
        return dict(self._times)

    def admit(self, found: Found) -> bool:
        """Whether this may be used where it lies."""
        if len(self._used) >= _CROWD:
            return False
        self._used.add(found)
        return True

    def map(self, descriptor: Descriptor) -> np.ndarray:
        """All of the memory that a descriptor is about."""
        self._clock += 1
        if self._clock % _PATIENCE == 0:
            self._known = {t: known for t, known in self._known.items() if known[1] > self._clock - _PATIENCE}
        whole = self._known[descriptor.token][0] if descriptor.token in self._known else _map(descriptor)
        self._known[descriptor.token] = whole, self._clock
        return whole


def open_file(descriptor: Descriptor) -> int:
    """The file of a descriptor, to be closed by the caller."""
    file = os.open(descriptor.path, os.O_RDWR | os.O_CLOEXEC)
    if os.fstat(file).st_ino != descriptor.inode:
        os.close(file)
        raise OSError(f"{descriptor.path} is not the memory that was meant")
    return file


def _map(descriptor: Descriptor) -> np.ndarray:
    file = open_file(descriptor)
    try:
        return np.frombuffer(mmap.mmap(file, descriptor.length), dtype=np.uint8)
    finally:
        os.close(file)
