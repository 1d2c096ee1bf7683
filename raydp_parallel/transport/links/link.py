"""Links: the interface, the packets of one message, bytes in the message itself, and the choice of
a link by a packet's size.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from raydp_parallel.devices.ranges import Attachment, MemoryRange, fill, in_bytes

INLINE_LIMIT = 64 * 1024
"""Bytes up to which a packet lies in the call. Ray moves arguments over 100 KB through its object
store, so that a call of 120 KB takes four times as long as one of 80 KB (measured), and a call
holds more than one packet."""


class MappedBuffer(Protocol):
    """A private mapping of another process's bytes: writes to it are not seen by that process."""

    @property
    def piece(self) -> MemoryRange:
        """The memory."""

    def again(self) -> MappedBuffer:
        """Another mapping of the same bytes."""

    def refresh(self) -> None:
        """Discard what was written, and show the other process's bytes as they are now."""

    def turn_to(self, packet: Attachment, offset: int, size: int) -> bool:
        """Show other bytes at the same address; returns False if that is not possible."""

    def source(self) -> MemoryRange:
        """The other process's bytes themselves, to be read."""


class ReservedMemory(NamedTuple):
    """Memory for a packet that is filled in several steps.

    Attributes:
        address: The first byte's address.
        size: The number of bytes.
        packet: Makes the packet, given how many bytes are in use.
    """

    address: int
    size: int
    packet: Callable[[int], Attachment]


class Link(Protocol):
    """The interface: ``send``, ``open`` and ``close``; the other methods save copies where
    possible.
    """

    name: str
    inline: int = 0
    """Bytes up to which a packet is a bytes object in the message."""
    exposes: bool = False
    """Whether `expose` may currently return a packet."""

    def send(self, pieces: Sequence[MemoryRange], offsets: Sequence[int], size: int) -> Attachment:
        """A packet of ``size`` bytes with the ``pieces`` at their ``offsets``."""

    def room(self, size: int) -> ReservedMemory | None:
        """Memory for a packet of at most ``size`` bytes that is filled in several steps; None if
        the link supports only `send`.
        """
        return None

    def open(self, packet: Attachment) -> MemoryRange:
        """The bytes of a packet, to be read and never written."""

    def take(self, packet: Attachment) -> MemoryRange | None:
        """The bytes of a packet as memory that the receiver may write to; None if they have to be
        copied.
        """
        return None

    def show(self, packet: Attachment, offset: int, size: int) -> MappedBuffer | None:
        """A private mapping of some bytes of a packet; None if they have to be copied."""
        return None

    def expose(
        self, storage: Any, known: Callable[[], int], often: bool = False
    ) -> Attachment | None:
        """A packet that is a tensor's storage itself, so that the other process sees each change.

        Args:
            storage: The storage. It may be moved in memory, with all tensors over it.
            known: Gives the number of tensors over it that the caller knows. If there are more, it
                cannot be moved: other code, such as a NumPy array, may hold the address. Called
                only if the storage is large enough.
            often: Whether also a small storage is exposed, because its bytes are sent repeatedly.

        Returns:
            The packet; None if the bytes have to be sent.
        """
        return None

    def withdraw(self) -> None:
        """Expose no storage any more, because a process cannot map it."""
        self.exposes = False

    def close(self) -> None:
        """Free the memory that the link holds. May be called twice."""


@dataclass(eq=False)
class Attachments:
    """The packets of one message: small packets lie in the message, the others beside it, under
    numbers.

    Attributes:
        link: Makes and opens packets.
        beside: The packets beside the message.
        size: Bytes of tensors.
        left: How many of them are for other processes than the one that gets the message.
    """

    link: Link
    beside: list[Attachment] = field(default_factory=list)
    size: int = 0
    left: int = 0

    def send(self, pieces: Sequence[MemoryRange], offsets: Sequence[int], size: int) -> Attachment:
        """Send bytes; returns what stands for them in the message: bytes or a number."""
        self.size += size
        return self.place(self.link.send(pieces, offsets, size))

    def room(self, size: int) -> ReservedMemory | None:
        """Memory for bytes that are filled in in several steps. See `Link.room`."""
        return self.link.room(size)

    def filled(self, reserved: ReservedMemory, size: int) -> Attachment:
        """Send reserved memory that is filled now; returns what stands for it in the message."""
        self.size += size
        return self.place(reserved.packet(size))

    def place(self, packet: Attachment) -> Attachment:
        """Add a packet that a link has made; returns what stands for it in the message."""
        if type(packet) is bytes:
            return packet
        self.beside.append(packet)
        return len(self.beside) - 1

    def take_back(self, packet: Attachment, size: int) -> None:
        """Do not send what was placed last."""
        self.size -= size
        if type(packet) is not bytes:
            del self.beside[packet]

    def find(self, packet: Attachment) -> Attachment:
        """The packet for what stands in the message."""
        return self.beside[packet] if isinstance(packet, int) else packet

    def open(self, packet: Attachment) -> MemoryRange:
        """The bytes of a packet of the message."""
        return in_bytes(packet) if type(packet) is bytes else self.link.open(self.find(packet))

    def take(self, packet: Attachment) -> MemoryRange | None:
        """The bytes of a packet of the message, as memory that may be written to. See
        `Link.take`.
        """
        return None if type(packet) is bytes else self.link.take(self.find(packet))


class ReadAttachments(Attachments):
    """Attachments that others read, too, so that nothing is written to where it lies."""

    def take(self, packet: Attachment) -> MemoryRange | None:
        """Nothing: what is written to has to be a copy."""
        return None


class InlineLink(Link):
    """Bytes inside the message."""

    name = "inline"
    inline = sys.maxsize

    def send(self, pieces: Sequence[MemoryRange], offsets: Sequence[int], size: int) -> bytes:
        if len(pieces) == 1 and pieces[0].origin is None:
            return ctypes.string_at(pieces[0].address, pieces[0].size)
        far = [piece for piece in pieces if piece.origin is not None]
        if far:
            whole = ctypes.create_string_buffer(size)
            fill(ctypes.addressof(whole), pieces, offsets)
            return whole.raw
        runs: list[bytes] = []
        end = 0
        for piece, offset in zip(pieces, offsets, strict=True):
            runs.append(bytes(offset - end))
            runs.append(ctypes.string_at(piece.address, piece.size))
            end = offset + piece.size
        runs.append(bytes(size - end))
        return b"".join(runs)

    def open(self, packet: Attachment) -> MemoryRange:
        if isinstance(packet, bytes):
            return in_bytes(packet)
        # An array of this process: what another replica has passed on.
        return MemoryRange(packet.__array_interface__["data"][0], packet.nbytes, packet)

    def close(self) -> None:
        """Nothing is held."""


class BySize(Link):
    """Small packets by one link, large ones by another.

    Attributes:
        name: The name of the large packets' link.
    """

    def __init__(
        self, small: Link, large: Link, limit: int = INLINE_LIMIT, name: str = "auto"
    ) -> None:
        self.name = name
        self._small = small
        self._large = large
        self._limit = limit
        self.inline = min(limit, small.inline)
        self.exposes = large.exposes

    def send(self, pieces: Sequence[MemoryRange], offsets: Sequence[int], size: int) -> Attachment:
        return (self._small if size <= self._limit else self._large).send(pieces, offsets, size)

    def room(self, size: int) -> ReservedMemory | None:
        return (self._small if size <= self._limit else self._large).room(size)

    def open(self, packet: Attachment) -> MemoryRange:
        return (self._small if isinstance(packet, bytes) else self._large).open(packet)

    def take(self, packet: Attachment) -> MemoryRange | None:
        return None if isinstance(packet, bytes) else self._large.take(packet)

    def show(self, packet: Attachment, offset: int, size: int) -> MappedBuffer | None:
        return None if isinstance(packet, bytes) else self._large.show(packet, offset, size)

    def expose(
        self, storage: Any, known: Callable[[], int], often: bool = False
    ) -> Attachment | None:
        return self._large.expose(storage, known, often)

    def withdraw(self) -> None:
        super().withdraw()
        self._large.withdraw()

    def close(self) -> None:
        self._large.close()
        self._small.close()
