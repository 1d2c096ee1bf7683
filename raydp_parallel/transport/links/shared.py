"""The link between processes of one machine: bytes are written once, and used where they lie.

[Note: who may write when]
A slice holds what one receiver was sent, and is that one's to write to. It is kept by its owner
until the receiver says that nothing there uses it any more (`Mappings.released`), which rides on
the next message; tensors that a graph saved, or that a user keeps, are such uses. When a line is
opened anew both sides first compare what they hold. What was lent to one that is taken for dead is
lent to nobody else: it may still write. State that all replicas are sent, and what lies where it
always does (`expose`), a receiver sees through a private window (`show`).
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
"""Bytes from which it is cheaper to use a packet where it lies than to copy it and be done with it,
by estimate.
"""

_EXPOSED = 1 << 16
"""Bytes from which a storage is worth a file of its own at once."""


class SharedLink(Link):
    """Slices of an arena, written once.

    Args:
        arena: Where the memory comes from.
        exposes: Whether storages may be shown where they lie.
        always: Whether also the smallest things go the way that pays for large ones.
        promised: Bytes of ``/dev/shm`` that are left to others, who have not touched them yet.
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
            return in_bytes(packet)  # of a message without tensors, or small and from a line
        # One's own, or a copy: Ray carried it, or a line without shared memory.
        array = packet.array if isinstance(packet, SharedBuffer) else packet
        return MemoryRange(array.__array_interface__["data"][0], array.nbytes, packet)

    def take(self, packet: Attachment) -> MemoryRange | None:
        large = (
            isinstance(packet, ForeignMemory)
            and packet.descriptor.size >= self._in_place
            and not packet.on_device
        )
        return packet.take() if large else None

    def show(self, packet: Attachment, offset: int, size: int) -> Private | None:
        if not isinstance(packet, ForeignMemory) or packet.on_device:
            return None
        # What lies where it always does changes there: a copy would not follow.
        worth = size >= self._exposed or (size and not packet.descriptor.lease)
        return Private(packet, offset, size) if worth else None

    def expose(
        self, storage: Any, known: Callable[[], int], often: bool = False
    ) -> Attachment | None:
        worth = storage.nbytes() >= (1 if often else self._exposed)
        return exposed.expose(storage, known(), self._promised) if self.exposes and worth else None

    def close(self) -> None:
        self._arena.close()


def exists() -> bool:
    """Whether this process may have such memory at all: a container's filter of system calls may
    refuse it.
    """
    if not (hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd")):
        return False
    try:
        os.close(os.memfd_create("raydp_parallel", os.MFD_CLOEXEC))
    except OSError:
        return False
    return True
