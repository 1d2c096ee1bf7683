"""The link between processes of one machine: bytes are written once, and used without a copy.

[Note: which process may write]
A buffer holds the bytes for one receiver, which may write to it. Its owner keeps it until the
receiver says, with its next message, that nothing there uses it any more (`Mappings.released`);
tensors that a graph saved, or that a user keeps, are such uses. When a connection is opened again,
both sides first compare what they hold. A buffer that was lent to a process that is taken for dead
is never lent again, because that process may still write to it. State for all replicas, and exposed
storages (`expose`), are seen by a receiver through a private mapping (`show`).

[Note: private mappings]
A private mapping (``MAP_PRIVATE``) shows the file, and a page that is written to becomes a copy of
this process. Such a page no longer follows the file; `Private.refresh` drops it, so that the
mapping shows the file again.

[Note: exposed storages]
Torch can move a storage into shared memory in place (``_share_fd_cpu_``), with all tensors over it:
views, tied parameters, parameters that an optimizer holds. NumPy arrays, and other code that holds
the address, do not follow. So a storage is moved only if torch allocated it and every tensor over
it is known; otherwise its bytes are sent.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import resource
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from raydp_parallel.devices import forks
from raydp_parallel.devices.buffers import Arena, Descriptor, Pin, SharedBuffer, describe
from raydp_parallel.devices.process import Freed
from raydp_parallel.devices.ranges import PAGE, Attachment, DeviceRange, MemoryRange, fill, in_bytes
from raydp_parallel.transport.links.link import Link, ReservedMemory

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
        freed: Memory that was freed.
        ended: The leases that `released` has to return besides those of freed memory.
    """

    def __init__(self, pin: Pin | None = None) -> None:
        self.pin = pin
        self.opener: Callable[[Descriptor], DeviceRange] = _unopened
        self._mapping = threading.Lock()
        self._known: dict[int, tuple[_Region, int]] = {}
        self._clock = 0
        self._found: dict[int, weakref.ref[ForeignMemory]] = {}
        self._times: dict[int, int] = {}
        self._used: set[int] = set()
        self.freed: Freed[tuple[int, int]] = Freed()
        self.ended: deque[tuple[int, int]] = deque()
        forks.tell_child(self)

    def after_fork(self) -> None:
        """Replace the lock, and make the memory in use private to the child."""
        self._mapping = threading.Lock()
        for known in [*self._found.values()]:
            if (found := known()) is not None:
                found.keep_copy()

    def find(self, descriptor: Descriptor) -> ForeignMemory:
        """The memory for a descriptor that a message contains."""
        lease = descriptor.lease
        if not lease:
            return ForeignMemory(descriptor, self)
        while True:
            self._settle()
            known = self._found.get(lease)
            if known is None:
                found = ForeignMemory(descriptor, self)
                self.freed.watch(found, (lease, id(found)))
                self._found[lease] = weakref.ref(found)
                break
            if (before := known()) is not None:  # else it was freed just now
                found = before
                break
        self._times[lease] = self._times.get(lease, 0) + 1
        return found

    def _settle(self) -> None:
        """Note which memory was freed."""
        for lease, number in self.freed.take():
            self._used.discard(number)
            if lease:
                self._found.pop(lease, None)
                self.ended.append((lease, self._times.pop(lease, 0)))

    def released(self) -> list[tuple[int, int]]:
        """The leases that this process no longer uses, and how often each was received. Each is
        returned once.
        """
        self._settle()
        found: list[tuple[int, int]] = []
        while self.ended:
            found.append(self.ended.popleft())
        return found

    def held(self) -> dict[int, int]:
        """The leases in use, and how often each was received. After that `released` has no older
        ones to return.
        """
        self._settle()
        self.ended.clear()
        return dict(self._times)

    def admit(self, found: ForeignMemory) -> bool:
        """Whether some memory may be used without a copy."""
        self._settle()
        if len(self._used) >= _MOST_IN_USE:
            return False
        if not found.descriptor.lease and id(found) not in self._used:
            self.freed.watch(found, (0, id(found)))
        self._used.add(id(found))
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


log = logging.getLogger("raydp_parallel")

_SHM = "/dev/shm"  # where torch makes its shared memory
_MOST = 8192
"""The most storages that are exposed. Each is a file, and a mapping in every replica, which may
have 65,530 mappings.
"""

_SPARE = 64 * 1024 * 1024
"""Bytes of ``/dev/shm`` that stay free. A process that writes to memory there, when none is left,
is ended by a signal.
"""

_MUCH = 1 << 16
"""Bytes from which a storage that finds no memory is logged. Copying less costs next to nothing."""


class Exposed:
    """A storage that other processes see.

    Args:
        storage: The storage, moved to shared memory.
        descriptor: The descriptor by which they map it.
    """

    def __init__(self, storage: Any, descriptor: Descriptor) -> None:
        self.storage = storage
        self.descriptor = descriptor

    def copy(self) -> np.ndarray:
        """A copy of its bytes as they are now."""
        return _seen_by_numpy(self.storage).copy()


class PassedOn(Exposed):
    """Memory that one process lent to this one, for others to read. This process holds its file, so
    it can be read when its owner is gone.

    Args:
        memory: The memory; its lease must not end before the others have read it.

    Raises:
        OSError: Its owner is gone already.
    """

    def __init__(self, memory: ForeignMemory) -> None:
        found, path = memory.descriptor, f"/proc/{os.getpid()}/fd/{memory.file()}"
        # Tokens of its owner mean other memory here; no other segment has its inode.
        super().__init__(memory, found._replace(token=-found.inode, path=path, lease=0))

    def copy(self) -> np.ndarray:
        """A copy of its bytes."""
        piece = self.storage.piece()
        return np.frombuffer(ctypes.string_at(piece.address, piece.size), dtype=np.uint8)


class _Exposures:
    """What of this process's memory is exposed.

    Attributes:
        known: The exposed storages, by the address of torch's object.
        moved: By address the storages that were moved: the file, which torch closes with the
            storage, and the descriptor.
        own: In a forked process the addresses of storages that were moved. Their files, which
            belong to the parent, no longer hold the child's contents.
        said: Whether it was said that there is no space.
    """

    def __init__(self) -> None:
        self.known: weakref.WeakValueDictionary[int, Exposed] = weakref.WeakValueDictionary()
        self.moved: dict[int, tuple[int, Descriptor]] = {}
        self.own: set[int] = set()
        self.said = False
        forks.tell_child(self)

    def note_moved(self, address: int, file: int, descriptor: Descriptor) -> None:
        """Note that a storage was moved, and forget some that are gone."""
        if len(self.moved) >= 2 * _MOST:
            for old in [*self.moved]:
                if not _is_there(*self.moved[old]):
                    del self.moved[old]
        self.moved[address] = file, descriptor

    def after_fork(self) -> None:
        """Make the child's moved storages private, so that its parent sees none of its writes."""
        for address, (file, meant) in self.moved.items():
            if _is_there(file, meant):
                keep_to_itself(address, meant.length, file)
                self.own.add(address)
        self.moved.clear()
        self.known.clear()


_exposures = _Exposures()


def expose(storage: Any, known: int, promised: int = 0) -> Exposed | None:
    """Move a storage to shared memory, if that is allowed and there is space. See `Link.expose`."""
    found = _exposures.known.get(storage._cdata)
    if found is not None:
        return found
    if _exposures.own and storage.data_ptr() in _exposures.own:
        return None
    already = _is_shared(storage)
    if not (already or (_may_move(storage, known) and _has_space(storage.nbytes(), promised))):
        return None
    file, size = storage._share_fd_cpu_()
    descriptor = describe(file, size, size)
    if not already:
        # Torch refuses to resize a storage that NumPy has an array over: in shared memory it would
        # resize, and the process would be ended by a signal.
        _seen_by_numpy(storage)
        _exposures.note_moved(storage.data_ptr(), file, descriptor)
    found = _exposures.known[storage._cdata] = Exposed(storage, descriptor)
    return found


def _is_there(file: int, meant: Descriptor) -> bool:
    try:
        found = os.fstat(file)
    except OSError:
        return False
    return (found.st_dev, found.st_ino) == (meant.volume, meant.inode)


def _seen_by_numpy(storage: Any) -> np.ndarray:
    tensor = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
    found: np.ndarray = torch._C.TensorBase.numpy(tensor)
    return found


def _is_shared(storage: Any) -> bool:
    """Whether a storage lies in shared memory already, and has a file descriptor and not a name."""
    strategy = torch.multiprocessing.get_sharing_strategy()
    return bool(storage.is_shared()) and strategy == "file_descriptor"


def _may_move(storage: Any, known: int) -> bool:
    # One reference is that of ``storage`` itself. Memory that torch did not allocate cannot be
    # resized.
    users = torch._C._storage_Use_Count(storage._cdata) - 1
    return (
        storage.device.type == "cpu"
        and storage.resizable()
        and not storage.is_shared()
        and users <= known
    )


def _has_space(size: int, promised: int) -> bool:
    if len(_exposures.known) >= min(_MOST, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4):
        return False
    try:
        found = os.statvfs(_SHM)
    except OSError:
        _tell_once(size, f"{_SHM} is missing")
        return False
    free = found.f_bavail * found.f_frsize - promised
    if free < size + _SPARE:
        mine = f"{max(0, free) / 1e6:.0f} MB left beside Ray's object store"
        _tell_once(size, f"{_SHM} has {mine}, and {size / 1e6:.1f} MB are wanted")
    return free >= size + _SPARE


def _tell_once(size: int, why: str) -> None:
    if size >= _MUCH and not _exposures.said:
        _exposures.said = True
        log.warning("weights are copied to the replicas instead of shared: %s", why)


_IN_PLACE = 1 << 18
"""Bytes from which using a packet without a copy is cheaper than copying it, by estimate."""

_EXPOSED = 1 << 16
"""Bytes from which a storage gets a file of its own the first time that it is sent."""


class SharedLink(Link):
    """Sends buffers of an arena of shared memory.

    Args:
        arena: The arena.
        exposes: Whether storages may be moved into shared memory and shown without a copy.
        always: Whether also the smallest packets are used without a copy.
        promised: Bytes of ``/dev/shm`` that are reserved for others, which have not used them yet.
    """

    name = "shared"

    def __init__(
        self, arena: Arena, exposes: bool = False, always: bool = False, promised: int = 0
    ) -> None:
        self._arena = arena
        self._promised = promised
        self._in_place = 1 if always else _IN_PLACE
        self._exposed = 1 if always else _EXPOSED
        self.exposes = exposes

    def send(
        self, pieces: Sequence[MemoryRange], offsets: Sequence[int], size: int
    ) -> SharedBuffer:
        lent = self._arena.take(size)
        fill(lent.array.ctypes.data, pieces, offsets)
        return lent

    def room(self, size: int) -> ReservedMemory:
        lent = self._arena.take(size)
        return ReservedMemory(lent.array.ctypes.data, size, lent.cut)

    def open(self, packet: SharedBuffer | ForeignMemory | np.ndarray | bytes) -> MemoryRange:
        if isinstance(packet, ForeignMemory):
            return packet.piece()
        if isinstance(packet, bytes):
            return in_bytes(packet)  # without tensors, or small and from a direct connection
        # This process's own buffer, or a copy that came without shared memory.
        array = packet.array if isinstance(packet, SharedBuffer) else packet
        return MemoryRange(array.__array_interface__["data"][0], array.nbytes, packet)

    def take(self, packet: Attachment) -> MemoryRange | None:
        if not isinstance(packet, ForeignMemory) or packet.on_device:
            return None
        if packet.descriptor.size < self._in_place:
            return None
        return packet.take()

    def show(self, packet: Attachment, offset: int, size: int) -> Private | None:
        if not isinstance(packet, ForeignMemory) or packet.on_device:
            return None
        # An exposed storage has no lease. It is never copied, because a copy would not follow it.
        worth = size >= self._exposed or (size and not packet.descriptor.lease)
        return Private(packet, offset, size) if worth else None

    def expose(
        self, storage: Any, known: Callable[[], int], often: bool = False
    ) -> Attachment | None:
        least = 1 if often else self._exposed
        if not self.exposes or storage.nbytes() < least:
            return None
        return expose(storage, known(), self._promised)

    def close(self) -> None:
        self._arena.close()


def exists() -> bool:
    """Whether this process can make shared memory: a container's filter of system calls may refuse
    it.
    """
    if not (hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd")):
        return False
    try:
        os.close(os.memfd_create("raydp_parallel", os.MFD_CLOEXEC))
    except OSError:
        return False
    return True
