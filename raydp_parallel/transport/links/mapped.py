"""Another process's memory, seen from here: as it is, or through a window that keeps to itself what
is written to it.

[Note: what is written stays here]
A window is a private mapping (``MAP_PRIVATE``): it shows the file, and a page that is written to
becomes this process's own. Such a page no longer follows the file; `Private.refresh` drops it, so
that the file shows again.
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
"""A mapping that was not used while so many others were goes."""

_CROWD = 64
"""So many packets may be in use where they lie. More are copied: each keeps a file open on both
sides.
"""

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
    """A mapped run of a file, until it is garbage. Python's own ``mmap`` would keep the file open
    for each.

    Args:
        file: The file.
        offset: Where the run begins, on a page.
        length: Its bytes.
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
    """Let mapped memory show what its file shows, and not be seen there any more when this process
    writes to it.
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
    """Memory of another process that a message brought here.

    Args:
        descriptor: Which.
        mappings: Where it is mapped.
    """

    def __init__(self, descriptor: Descriptor, mappings: Mappings) -> None:
        self.descriptor = descriptor
        self._mappings = mappings
        self._file: int | None = None
        self._region: _Region | None = None

    def keep_copy(self) -> None:
        """In a forked child: show from now on what lies there now, whatever its owner and the
        parent do with it.
        """
        if self._region is not None and self._file is not None:
            keep_to_itself(self._region.address, self._region.length, self._file)
            _libc.madvise(self._region.address, self._region.length, _POPULATE_WRITE)

    def piece(self) -> MemoryRange:
        """The memory itself."""
        if self.on_device:
            whole = MemoryRange(
                0, self.descriptor.length, self, self._mappings.opener(self.descriptor)
            )
            return whole.part(0, self.descriptor.size)
        region = self._region = self._mappings.map(self)
        return MemoryRange(region.address, self.descriptor.size, (region, self))

    @property
    def on_device(self) -> bool:
        """Whether it is a GPU's memory, to be copied from there."""
        return bool(self.descriptor.device)

    def take(self) -> MemoryRange | None:
        """The memory for one's own use; None if too much is in use already."""
        return self.piece() if self._mappings.admit(self) else None

    def file(self) -> int:
        """The file, open as long as this is in use: its owner may close it before."""
        if self._file is None:
            file = os.open(self.descriptor.path, os.O_RDWR | os.O_CLOEXEC)
            weakref.finalize(self, os.close, file).atexit = False
            seen = os.fstat(file)
            if (seen.st_dev, seen.st_ino) != (self.descriptor.volume, self.descriptor.inode):
                raise OSError(f"{self.descriptor.path} is not the memory that was meant")
            self._file = file
        return self._file


class Private:
    """A window on a run of found memory.

    Args:
        found: The memory.
        offset: Where the run begins.
        size: Its bytes.
    """

    def __init__(self, found: ForeignMemory, offset: int, size: int) -> None:
        self._found, self._offset, self._size = found, offset, size
        within = offset % PAGE
        self._region = region = _Region(
            found.file(), offset - within, size + within, mmap.MAP_PRIVATE
        )
        # All pages at once, to be read; where the kernel does not know how, they come one by one.
        _libc.madvise(region.address, region.length, _POPULATE_READ)

    @property
    def piece(self) -> MemoryRange:
        """The memory of the window; the window lives as long as anybody uses it."""
        return MemoryRange(self._region.address + self._offset % PAGE, self._size, self)

    def again(self) -> Private:
        """Another window on the same bytes."""
        return Private(self._found, self._offset, self._size)

    def refresh(self) -> None:
        """Drop what was written."""
        _libc.madvise(self._region.address, self._region.length, mmap.MADV_DONTNEED)

    def turn_to(self, packet: Attachment, offset: int, size: int) -> bool:
        """Show other memory at the same address, if it lies there as this does."""
        within = offset % PAGE
        if (
            not isinstance(packet, ForeignMemory)
            or size != self._size
            or within != self._offset % PAGE
        ):
            return False
        region = self._region
        _mmap(
            region.address,
            region.length,
            mmap.MAP_PRIVATE | _MAP_FIXED,
            packet.file(),
            offset - within,
        )
        self._found, self._offset = packet, offset
        return True

    def source(self) -> MemoryRange:
        """The memory itself."""
        whole = self._found.piece()
        return MemoryRange(whole.address + self._offset, self._size, whole.owner)


def _unopened(descriptor: Descriptor) -> DeviceRange:
    raise OSError("a GPU's memory came, and this process has not agreed to open any")


class Mappings:
    """Memory of another process, mapped once each, and the word which of it is no longer used.

    Args:
        pin: What to do with memory that a GPU is to copy from; None where there is none.

    Attributes:
        opener: Opens a GPU's memory, once both sides have seen that this works.
    """

    def __init__(self, pin: Pin | None = None) -> None:
        self._pin = pin
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
        """What is in use is the child's own from now on."""
        self._mapping = threading.Lock()
        for found in [*self._found.values()]:
            found.keep_copy()

    def find(self, descriptor: Descriptor) -> ForeignMemory:
        """What a message brought."""
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
        """The leases that nobody here uses any more, and how often each had come. Each is told
        once.
        """
        found: list[tuple[int, int]] = []
        while self.ended:
            found.append(self.ended.popleft())
        return found

    def held(self) -> dict[int, int]:
        """The leases in use, and how often each came; what `released` had to tell is contained in
        that.
        """
        self.ended.clear()
        return dict(self._times)

    def admit(self, found: ForeignMemory) -> bool:
        """Whether this may be used where it lies."""
        if len(self._used) >= _CROWD:
            return False
        self._used.add(found)
        return True

    def map(self, found: ForeignMemory) -> _Region:
        """All of some memory."""
        with self._mapping:
            self._clock += 1
            if self._clock % _PATIENCE == 0:
                self._known = {
                    t: known
                    for t, known in self._known.items()
                    if known[1] > self._clock - _PATIENCE
                }
            token = found.descriptor.token
            known = self._known.get(token)
            if known is None:
                known = (
                    _Region(found.file(), 0, found.descriptor.length, mmap.MAP_SHARED, self._pin),
                    self._clock,
                )
            self._known[token] = known[0], self._clock
            return known[0]
