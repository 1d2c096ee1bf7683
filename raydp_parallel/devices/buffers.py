"""Segments: memory of this process that others of the machine can map, lent out in slices and
recycled.

A segment is an anonymous file of its owner (``memfd_create``); the other side maps
``/proc/<pid>/fd/<n>``. It has no name that could be left behind: the kernel frees it with its last
mapping, whoever is killed. It is not bound by the size of ``/dev/shm``, which is 64 MB in a default
container.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from raydp_parallel.devices import forks

_SMALLEST = 1 << 16
_PATIENCE = 64
"""A segment that so many others were preferred to goes back to the system."""

Pin = Callable[[int, int], Callable[[], object] | None]
"""Lets a device read and write so many bytes from an address by itself; returns what ends that,
None if refused.
"""

_tokens = itertools.count(1)
_leases = itertools.count(1)


def new_token() -> int:
    """A name for some memory of this process."""
    return next(_tokens)


def new_lease() -> int:
    """A name for one use of it."""
    return next(_leases)


class Descriptor(NamedTuple):
    """What another process needs to see some memory.

    Attributes:
        token: Names the memory, for good, among its owner's.
        path: Where to map it from.
        inode: What must be found there. The owner may have closed the file and opened another
            since.
        length: Bytes of the memory.
        size: Bytes of it that count.
        lease: Names this use of a segment, for the word that it is no longer read; 0 for memory
            that is not lent.
        device: For a GPU's memory: the handle to open it with.
        volume: Where the inode counts.
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
    return Descriptor(next(_tokens), path, found.st_ino, length, size, volume=found.st_dev)


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
        self.descriptor = Descriptor(0, "", 0, length, length)  # which leads nowhere


class SharedBuffer:
    """A segment lent out; free again when this is garbage.

    Args:
        segment: The memory.
        size: Bytes that count.
        free: Takes the segment back.
    """

    def __init__(
        self, segment: _Segment | _Scratch, size: int, free: Callable[[Any], None]
    ) -> None:
        self.array = segment.array[:size]
        self.descriptor = segment.descriptor._replace(size=size, lease=next(_leases))
        self.segment: Any = segment
        self._return = weakref.finalize(self, free, segment)
        self._return.atexit = False

    def cut(self, size: int) -> SharedBuffer:
        """This, of which only the first bytes count after all."""
        self.array, self.descriptor = self.array[:size], self.descriptor._replace(size=size)
        return self

    def spend(self) -> None:
        """Lend the segment to nobody after this: somebody may still write to it."""
        self._return.detach()


class Arena:
    """Segments of this process, recycled by size: pages that were touched before are many times
    faster than new ones.

    Args:
        shared: Whether other processes can map them.
        pin: What to do with memory that a GPU is to copy to; None where there is none.
    """

    def __init__(self, shared: bool = True, pin: Pin | None = None) -> None:
        self._make: Callable[[int, Pin | None], Any] = _Segment if shared else _Scratch
        self._pin = pin
        # One thread at a time takes; finalizers give back at any moment, also while this very
        # thread takes. They need no lock, which might be held then: they only append.
        self._taking = threading.Lock()
        self._free: dict[int, deque[Any]] = defaultdict(deque)
        self._clock = 0
        forks.tell_child(self)

    def after_fork(self) -> None:
        """No other thread has the lock."""
        self._taking = threading.Lock()

    def take(self, size: int) -> SharedBuffer:
        """Memory for ``size`` bytes."""
        return SharedBuffer(
            self._segment(max(_SMALLEST, 1 << (size - 1).bit_length())), size, self._give_back
        )

    def _segment(self, length: int) -> Any:
        """One of so many bytes that is not in use."""
        with self._taking:
            self._clock += 1
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

    def _give_back(self, segment: Any) -> None:
        self._free[segment.descriptor.length].append(segment)

    def _sweep(self) -> None:
        """Let go of what was not used for long; under the lock, and in place, where finalizers
        append meanwhile.
        """
        for free in [*self._free.values()]:
            for _ in range(len(free)):
                segment = free.popleft()
                if segment.used > self._clock - _PATIENCE:
                    free.append(segment)

    def close(self) -> None:
        """Free what is not lent out."""
        self._free.clear()


class LeaseTable:
    """What of this process's memory another one may still use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lent: dict[int, tuple[SharedBuffer, int]] = {}
        forks.tell_child(self)

    def after_fork(self) -> None:
        """No other thread has the lock."""
        self._lock = threading.Lock()

    def lend(self, lent: SharedBuffer) -> None:
        """A slice is on its way, perhaps once more."""
        with self._lock:
            _, times = self._lent.get(lent.descriptor.lease, (lent, 0))
            self._lent[lent.descriptor.lease] = (lent, times + 1)

    def returned(self, lease: int, times: int) -> None:
        """The other one no longer uses what it got so many times."""
        with self._lock:
            lent, left = self._lent.pop(lease, (None, 0))
            if lent is not None and left > times:
                self._lent[lease] = (lent, left - times)

    def settle(self, held: dict[int, int]) -> None:
        """The other one says all that it holds, and how often it got it; with the rest it
        is done.
        """
        with self._lock:
            self._lent = {
                lease: (self._lent[lease][0], times)
                for lease, times in held.items()
                if lease in self._lent
            }

    def end(self) -> None:
        """Nothing will be heard of the other one again."""
        with self._lock:
            for lent, _ in self._lent.values():
                lent.spend()
            self._lent.clear()

    def __len__(self) -> int:
        return len(self._lent)
