"""The link between processes of one machine: bytes are written once, and used without a copy.

[Note: which process may write]
A buffer holds the bytes for one receiver, which may write to it. Its owner keeps it until the
receiver says, with its next message, that nothing there uses it any more (`Mappings.released`);
tensors that a graph saved, or that a user keeps, are such uses. When a connection is opened again,
both sides first compare what they hold. A buffer that was lent to a process that is taken for dead
is never lent again, because that process may still write to it. State for all replicas, and exposed
storages (`expose`), are seen by a receiver through a private mapping (`show`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from raydp_parallel.devices.buffers import Arena, SharedBuffer
from raydp_parallel.devices.ranges import Attachment, MemoryRange, fill, in_bytes
from raydp_parallel.transport.links import exposed
from raydp_parallel.transport.links.link import Link, ReservedMemory
from raydp_parallel.transport.links.mapped import ForeignMemory, Private

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
        return exposed.expose(storage, known(), self._promised)

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
