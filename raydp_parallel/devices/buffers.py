"""Segments: memory of this process that other processes of the machine can map, lent and recycled.

A segment is an anonymous file of its owner (``memfd_create``); the other side maps
``/proc/<pid>/fd/<n>``. It has no name in the file system that could be left behind: the kernel
frees it with its last mapping, whichever process is killed. It is not limited by the size of
``/dev/shm``, which is 64 MB in a default container.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from raydp_parallel.devices import forks
from raydp_parallel.devices.process import Freed, number

_SMALLEST = 1 << 16
_PATIENCE = 64
"""A segment that was not used in so many requests for memory goes back to the system."""

Pin = Callable[[int, int], Callable[[], object] | None]
"""Registers memory (address, size) with a device, which then copies it directly; returns a function
that ends this, None if it is refused.
"""


def new_token() -> int:
    """A number that names some memory of this process."""
    return number("memory")


def new_lease() -> int:
    """A number that names one use of that memory."""
    return number("lease")


class Descriptor(NamedTuple):
    """What another process needs to see some memory.

    Attributes:
        token: Names the memory among all memory of its owner; never used again.
        path: The file to map.
        inode: The inode that the file must have. The owner may have closed the file and opened
            another since.
        length: Bytes of the memory.
        size: Bytes of it that are in use.
        lease: Names this use of a segment, so that the other side can say that it has ended; 0 for
            memory that is not lent.
        device: For a GPU's memory: the handle to open it with.
        volume: The device number of the file system that the inode belongs to.
    """

    token: int
    path: str
    inode: int
    length: int
    size: int
    lease: int = 0
    device: bytes = b""
    volume: int = 0


def describe(file: int, length: int, size: int) -> Descriptor:
    """The descriptor of a file that this process holds open."""
    found = os.fstat(file)
    path = f"/proc/{os.getpid()}/fd/{file}"
    return Descriptor(new_token(), path, found.st_ino, length, size, volume=found.st_dev)


class _Segment:
    """Anonymous memory that another process of the same user can map."""

    def __init__(self, length: int, pin: Pin | None = None) -> None:
        self.used = 0
        self._file = os.memfd_create("raydp_parallel", os.MFD_CLOEXEC)
        os.ftruncate(self._file, length)
        self.array = np.frombuffer(mmap.mmap(self._file, length), dtype=np.uint8)
        self.descriptor = describe(self._file, length, length)
        if pin is not None:
            unpin = pin(self.array.__array_interface__["data"][0], length)
            if unpin is not None:
                weakref.finalize(self, unpin).atexit = False
        weakref.finalize(self, os.close, self._file)


class _Scratch:
    """Memory of this process alone, in huge pages where the system has them."""

    def __init__(self, length: int, pin: Pin | None = None) -> None:
        self.used = 0
        memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel built without them
                memory.madvise(mmap.MADV_HUGEPAGE)
        self.array = np.frombuffer(memory, dtype=np.uint8)
        self.descriptor = Descriptor(0, "", 0, length, length)  # no file


class SharedBuffer:
    """A segment that is lent; free again when this object is garbage.

    Args:
        segment: The memory.
        size: Bytes that are in use.
        freed: Gets the segment back.
    """

    def __init__(self, segment: _Segment | _Scratch, size: int, freed: Freed[Any]) -> None:
        self.array = segment.array[:size]
        self.descriptor = segment.descriptor._replace(size=size, lease=new_lease())
        self.segment: Any = segment
        self.stored: Any = None
        """Its copy in Ray's object store, if replicas on other nodes need one."""
        self._freed = freed
        self._watch = freed.watch(self, segment)

    @property
    def size(self) -> int:
        """Bytes that are in use."""
        return self.descriptor.size

    def cut(self, size: int) -> SharedBuffer:
        """This buffer, shortened to its first ``size`` bytes."""
        self.array, self.descriptor = self.array[:size], self.descriptor._replace(size=size)
        return self

    def spend(self) -> None:
        """Never lend the segment again: another process may still write to it."""
        self._freed.forget(self._watch)


class Arena:
    """Segments of this process, recycled by size: pages that were touched before are many times
    faster than new pages.

    Args:
        shared: Whether other processes can map them.
        pin: Registers memory that a GPU copies to; None where there is no GPU.
    """

    def __init__(self, shared: bool = True, pin: Pin | None = None) -> None:
        self._make: Callable[[int, Pin | None], Any] = _Segment if shared else _Scratch
        self._pin = pin
        self._taking = threading.Lock()
        self._free: dict[int, deque[Any]] = defaultdict(deque)
        self._freed: Freed[Any] = Freed()
        self._clock = 0
        forks.tell_child(self)

    def after_fork(self) -> None:
        """Replace the lock, which a thread that the child does not have may hold."""
        self._taking = threading.Lock()

    def take(self, size: int) -> SharedBuffer:
        """Memory for ``size`` bytes."""
        return SharedBuffer(
            self._segment(max(_SMALLEST, 1 << (size - 1).bit_length())), size, self._freed
        )

    def _segment(self, length: int) -> Any:
        """A segment of ``length`` bytes that is not in use."""
        with self._taking:
            self._clock += 1
            self._collect()
            if self._clock % _PATIENCE == 0:
                self._sweep()
            clock, free = self._clock, self._free[length]
            segment = free.pop() if free else None
        if segment is None:
            segment = self._new(length)
        segment.used = clock
        return segment

    def _new(self, length: int) -> Any:
        return self._make(length, self._pin)

    def _collect(self) -> None:
        for segment in self._freed.take():
            self._give_back(segment)

    def idle(self) -> dict[int, int]:
        """How many segments are not lent, by length."""
        with self._taking:
            self._collect()
            return {length: len(free) for length, free in self._free.items()}

    def _give_back(self, segment: Any) -> None:
        self._free[segment.descriptor.length].append(segment)

    def _sweep(self) -> None:
        """Free segments that were not used recently."""
        for free in [*self._free.values()]:
            for _ in range(len(free)):
                segment = free.popleft()
                if segment.used > self._clock - _PATIENCE:
                    free.append(segment)

    def close(self) -> None:
        """Free the segments that are not lent."""
        self._freed.take()
        self._free.clear()


class LeaseTable:
    """The memory of this process that one other process may still use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lent: dict[int, tuple[SharedBuffer, int]] = {}
        forks.tell_child(self)

    def after_fork(self) -> None:
        """Replace the lock, which a thread that the child does not have may hold."""
        self._lock = threading.Lock()

    def lend(self, lent: SharedBuffer) -> None:
        """Record that a buffer is sent, for the first time or once more."""
        with self._lock:
            _, times = self._lent.get(lent.descriptor.lease, (lent, 0))
            self._lent[lent.descriptor.lease] = (lent, times + 1)

    def returned(self, lease: int, times: int) -> None:
        """Record that the other process has ended ``times`` uses of a lease."""
        with self._lock:
            lent, left = self._lent.pop(lease, (None, 0))
            if lent is not None and left > times:
                self._lent[lease] = (lent, left - times)

    def settle(self, held: dict[int, int]) -> None:
        """Keep only what the other process still holds: its leases, and how often it received
        each.
        """
        with self._lock:
            self._lent = {
                lease: (self._lent[lease][0], times)
                for lease, times in held.items()
                if lease in self._lent
            }

    def end(self) -> None:
        """End all leases without an answer: the other process is gone."""
        with self._lock:
            for lent, _ in self._lent.values():
                lent.spend()
            self._lent.clear()

    def __len__(self) -> int:
        return len(self._lent)
