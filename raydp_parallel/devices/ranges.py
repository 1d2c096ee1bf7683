"""Runs of bytes, where they lie, and how they are copied."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

ALIGNMENT = 64
PAGE = 4096
_LARGE = 1 << 16
"""Bytes from which a run of memory begins on a page, so that it can be mapped."""

Attachment = Any
"""What a link makes of some bytes: bytes, which lie in the message, or something that travels
beside it.
"""


class DeviceRange(Protocol):
    """Memory of a device, which the CPU cannot read."""

    @property
    def tensor(self) -> Any:
        """The bytes, where they lie."""

    @property
    def device(self) -> Any:
        """Whose memory it is. Copies of one device come in order, those of two do not."""

    def part(self, offset: int, size: int) -> DeviceRange:
        """Some of the bytes."""

    def copy_to(self, address: int) -> None:
        """Begin to copy the bytes to the CPU's memory."""

    def wait(self) -> None:
        """Wait until what this and earlier ones of the device began to copy has come."""

    def settle(self) -> None:
        """After `wait`: see that it is where it belongs."""


class MemoryRange(NamedTuple):
    """A run of bytes.

    Attributes:
        address: Where it starts in the CPU's memory; 0 if it lies elsewhere.
        size: How many bytes.
        owner: What keeps the memory alive.
        origin: Where it lies, if that is a device's memory.
    """

    address: int
    size: int
    owner: Any
    origin: DeviceRange | None = None

    def part(self, offset: int, size: int) -> MemoryRange:
        """Some of the bytes."""
        if self.origin is not None:
            return MemoryRange(0, size, self.owner, self.origin.part(offset, size))
        return MemoryRange(self.address + offset, size, self.owner)


def address_of(packet: bytes) -> int:
    """Where bytes are: they stay there as long as they live."""
    return ctypes.c_void_p.from_buffer(ctypes.c_char_p(packet)).value or 0


def in_bytes(packet: bytes) -> MemoryRange:
    """Bytes where they are; the piece holds them."""
    return MemoryRange(address_of(packet), len(packet), packet)


def aligned(size: int) -> int:
    """``size`` rounded up so that what follows is aligned for every dtype."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def paged(offset: int, size: int) -> int:
    """Where to put ``size`` bytes that may begin at ``offset``: large ones on a page, so that they
    can be mapped.
    """
    return offset if size < _LARGE else -(-offset // PAGE) * PAGE


def fill(address: int, pieces: Sequence[MemoryRange], offsets: Sequence[int]) -> None:
    """Copy the pieces to their offsets from ``address``."""
    far: list[DeviceRange] = []
    for piece, offset in zip(pieces, offsets, strict=True):
        if piece.origin is None:
            ctypes.memmove(address + offset, piece.address, piece.size)
        elif piece.size:
            piece.origin.copy_to(address + offset)
            far.append(piece.origin)
    for last in {origin.device: origin for origin in far}.values():
        last.wait()
    for origin in far:
        origin.settle()
