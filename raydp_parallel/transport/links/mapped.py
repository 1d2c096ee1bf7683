"""Mappings of another process's memory: shared with it, or private to this process.

[Note: private mappings]
A private mapping (``MAP_PRIVATE``) shows the file, and a page that is written to becomes a copy of
this process. Such a page no longer follows the file; `Private.refresh` drops it, so that the
mapping shows the file again.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable

from raydp_parallel.devices import forks
from raydp_parallel.devices.buffers import Descriptor, Pin
from raydp_parallel.devices.ranges import PAGE, Attachment, DeviceRange, MemoryRange

_PATIENCE = 64
"""A mapping that was not used in so many requests is removed."""

_MOST_IN_USE = 64
"""The most packets that are used without a copy. Each keeps a file open on both sides."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_MAP_FIXED = 0x10
_POPULATE_READ, _POPULATE_WRITE = 22, 23
_WRITABLE = mmap.PROT_READ | mmap.PROT_WRITE


class _Region:
    """A mapping of a part of a file, removed when this object is garbage. Python's ``mmap`` would
    keep the file open for each mapping.

    Args:
        file: The file.
        offset: The first byte, at the beginning of a page.
        length: The number of bytes.
        flags: Private or shared.
        pin: See `Mappings`.
    """

    def __init__(
        self, file: int, offset: int, length: int, flags: int, pin: Pin | None = None
    ) -> None:
        self.length = length
        self.address = _mmap(None, length, flags, file, offset)
        unpin = pin(self.address, length) if pin is not None else None
        weakref.finalize(self, _unmap, self.address, length, unpin).atexit = False


def _unmap(address: int, length: int, unpin: Callable[[], object] | None) -> None:
    if unpin is not None:
        unpin()
    _libc.munmap(address, length)


def keep_to_itself(address: int, length: int, file: int) -> None:
    """Make mapped memory private: it shows its file, and writes of this process do not reach the
    file any more.
    """
    _mmap(address, length, mmap.MAP_PRIVATE | _MAP_FIXED, file, 0)


def _mmap(address: int | None, length: int, flags: int, file: int, offset: int) -> int:
    found: int = _libc.mmap(address, length, _WRITABLE, flags, file, offset)
    if found == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(
            number,
            f"{length} bytes of another process's memory cannot be mapped: {os.strerror(number)}",
        )
    return found


class ForeignMemory:
    """Memory of another process that a message describes.

    Args:
        descriptor: The description.
        mappings: The mappings of that process's memory.
    """

    def __init__(self, descriptor: Descriptor, mappings: Mappings) -> None:
        self.descriptor = descriptor
        self._mappings = mappings
        self._file: int | None = None
        self._region: _Region | None = None

    def keep_copy(self) -> None:
        """In a forked child: keep the contents as they are now, whatever the owner and the parent
        do with the memory.
        """
        if self._region is not None and self._file is not None:
            keep_to_itself(self._region.address, self._region.length, self._file)
            _libc.madvise(self._region.address, self._region.length, _POPULATE_WRITE)

    def piece(self) -> MemoryRange:
        """The memory as a range, without a copy."""
        if self.on_device:
            opened = self._mappings.opener(self.descriptor)
            whole = MemoryRange(0, self.descriptor.length, self, opened)
            return whole.part(0, self.descriptor.size)
        region = self._region = self._mappings.map(self)
        return MemoryRange(region.address, self.descriptor.size, (region, self))

    @property
    def on_device(self) -> bool:
        """Whether it is a GPU's memory, which has to be copied."""
        return bool(self.descriptor.device)

    def take(self) -> MemoryRange | None:
        """The memory for this process to write to; None if too many are in use already."""
        return self.piece() if self._mappings.admit(self) else None

    def file(self) -> int:
        """The file, which stays open as long as this object lives: its owner may close its own."""
        if self._file is None:
            file = os.open(self.descriptor.path, os.O_RDWR | os.O_CLOEXEC)
            weakref.finalize(self, os.close, file).atexit = False
            seen = os.fstat(file)
            if (seen.st_dev, seen.st_ino) != (self.descriptor.volume, self.descriptor.inode):
                raise OSError(f"{self.descriptor.path} is not the memory that was meant")
            self._file = file
        return self._file


class Private:
    """A private mapping of a part of another process's memory.

    Args:
        memory: The memory.
        offset: The first byte.
        size: The number of bytes.
    """

    def __init__(self, memory: ForeignMemory, offset: int, size: int) -> None:
        self._memory, self._offset, self._size = memory, offset, size
        within = offset % PAGE
        self._region = region = _Region(
            memory.file(), offset - within, size + within, mmap.MAP_PRIVATE
        )
        # Read all pages at once; where the kernel does not support that, they come one by one.
        _libc.madvise(region.address, region.length, _POPULATE_READ)

    @property
    def piece(self) -> MemoryRange:
        """The mapped memory, which keeps the mapping alive."""
        return MemoryRange(self._region.address + self._offset % PAGE, self._size, self)

    def again(self) -> Private:
        """Another mapping of the same bytes."""
        return Private(self._memory, self._offset, self._size)

    def refresh(self) -> None:
        """Discard what was written."""
        _libc.madvise(self._region.address, self._region.length, mmap.MADV_DONTNEED)

    def turn_to(self, packet: Attachment, offset: int, size: int) -> bool:
        """Show other memory at the same address, if its size and its place in a page are the
        same.
        """
        within = offset % PAGE
        if not isinstance(packet, ForeignMemory):
            return False
        if size != self._size or within != self._offset % PAGE:
            return False
        region, flags = self._region, mmap.MAP_PRIVATE | _MAP_FIXED
        _mmap(region.address, region.length, flags, packet.file(), offset - within)
        self._memory, self._offset = packet, offset
        return True

    def source(self) -> MemoryRange:
        """The other process's memory itself."""
        whole = self._memory.piece()
        return MemoryRange(whole.address + self._offset, self._size, whole.owner)


def _unopened(descriptor: Descriptor) -> DeviceRange:
    raise OSError("a GPU's memory came, and this process has not agreed to open any")


class Mappings:
    """The memory of another process that is mapped here, each segment once, and the leases that
    have ended.

    Args:
        pin: Registers memory that a GPU copies from; None where there is no GPU.

    Attributes:
        pin: As given.
        opener: Opens a GPU's memory, once both sides have tested that this works.
    """

    def __init__(self, pin: Pin | None = None) -> None:
        self.pin = pin
        self.opener: Callable[[Descriptor], DeviceRange] = _unopened
        self._mapping = threading.Lock()
        self._known: dict[int, tuple[_Region, int]] = {}
        self._clock = 0
        self._found: weakref.WeakValueDictionary[int, ForeignMemory] = weakref.WeakValueDictionary()
        self._times: dict[int, int] = {}
        self._used: weakref.WeakSet[ForeignMemory] = weakref.WeakSet()
        self.ended: deque[tuple[int, int]] = deque()
        forks.tell_child(self)

    def after_fork(self) -> None:
        """Replace the lock, and make the memory in use private to the child."""
        self._mapping = threading.Lock()
        for found in [*self._found.values()]:
            found.keep_copy()

    def find(self, descriptor: Descriptor) -> ForeignMemory:
        """The memory for a descriptor that a message contains."""
        if not descriptor.lease:
            return ForeignMemory(descriptor, self)
        found = self._found.get(descriptor.lease)
        if found is None:
            self._found[descriptor.lease] = found = ForeignMemory(descriptor, self)
            weakref.finalize(found, self._release, descriptor.lease).atexit = False
        self._times[descriptor.lease] = self._times.get(descriptor.lease, 0) + 1
        return found

    def _release(self, lease: int) -> None:
        self.ended.append((lease, self._times.pop(lease, 0)))

    def released(self) -> list[tuple[int, int]]:
        """The leases that this process no longer uses, and how often each was received. Each is
        returned once.
        """
        found: list[tuple[int, int]] = []
        while self.ended:
            found.append(self.ended.popleft())
        return found

    def held(self) -> dict[int, int]:
        """The leases in use, and how often each was received. After that `released` has no older
        ones to return.
        """
        self.ended.clear()
        return dict(self._times)

    def admit(self, found: ForeignMemory) -> bool:
        """Whether some memory may be used without a copy."""
        if len(self._used) >= _MOST_IN_USE:
            return False
        self._used.add(found)
        return True

    def map(self, found: ForeignMemory) -> _Region:
        """The shared mapping of a whole segment."""
        with self._mapping:
            self._clock += 1
            if self._clock % _PATIENCE == 0:
                oldest = self._clock - _PATIENCE
                self._known = {t: known for t, known in self._known.items() if known[1] > oldest}
            token = found.descriptor.token
            if token in self._known:
                region, _ = self._known[token]
            else:
                length = found.descriptor.length
                region = _Region(found.file(), 0, length, mmap.MAP_SHARED, self.pin)
            self._known[token] = region, self._clock
            return region
