"""What every link does, and the packets of one message."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from raydp_parallel.devices.ranges import Attachment, MemoryRange, in_bytes


class MappedBuffer(Protocol):
    """Memory of this process that shows bytes of another's; what is written to it stays here."""

    @property
    def piece(self) -> MemoryRange:
        """The memory."""

    def again(self) -> MappedBuffer:
        """Another window on the same bytes."""

    def refresh(self) -> None:
        """Show the other's bytes again, as they are now."""

    def turn_to(self, packet: Attachment, offset: int, size: int) -> bool:
        """Show other bytes, at the same address. False if that is not possible."""

    def source(self) -> MemoryRange:
        """The other's bytes themselves, to be read."""


class ReservedMemory(NamedTuple):
    """Memory for a packet that is filled bit by bit.

    Attributes:
        address: Where it begins.
        size: Its bytes.
        packet: The packet, of which so many bytes count.
    """

    address: int
    size: int
    packet: Callable[[int], Attachment]


class Link(Protocol):
    """Two verbs and ``close``; and some that spare a copy or time, where a link can."""

    name: str
    inline: int = 0
    """Bytes up to which a packet is plain bytes that lie in the message."""
    exposes: bool = False
    """Whether `expose` may give anything, now."""

    def send(self, pieces: Sequence[MemoryRange], offsets: Sequence[int], size: int) -> Attachment:
        """Take ``pieces`` to their ``offsets`` in a buffer of ``size`` bytes, ready to travel."""

    def room(self, size: int) -> ReservedMemory | None:
        """Memory for a packet of at most so many bytes, which become known one after the other;
        None: only `send`.
        """
        return None

    def open(self, packet: Attachment) -> MemoryRange:
        """The bytes of a packet, to be read and never written."""

    def take(self, packet: Attachment) -> MemoryRange | None:
        """The bytes of a packet as memory of one's own, to be written too; None: they have to be
        copied.
        """
        return None

    def show(self, packet: Attachment, offset: int, size: int) -> MappedBuffer | None:
        """A window on some bytes of a packet; None: they have to be copied."""
        return None

    def expose(
        self, storage: Any, known: Callable[[], int], often: bool = False
    ) -> Attachment | None:
        """A packet that is a tensor's storage itself, whose every change is seen at the other end.

        Args:
            storage: The storage. It may move in memory, with all tensors that look at it.
            known: Says how many tensors the caller knows to look at it. If there are more, it
                cannot be moved: something else, such as a NumPy array, may go by the address. Asked
                if it is worth it.
            often: Whether it is worth it however small, because its bytes are sent again and again.

        Returns:
            None: its bytes have to be sent.
        """
        return None

    def withdraw(self) -> None:
        """Expose nothing any more: somebody cannot see it."""
        self.exposes = False

    def close(self) -> None:
        """Let go of what the link holds. May be called twice."""


class Attachments:
    """The packets of one message: small ones lie in the message, the others beside it, and are
    known by number.
    """

    def __init__(self, link: Link, beside: Sequence[Attachment] = ()) -> None:
        self.link = link
        self.beside = list(beside)
        self.size = 0

    def send(self, pieces: Sequence[MemoryRange], offsets: Sequence[int], size: int) -> Attachment:
        """What to write into the message for these bytes."""
        self.size += size
        return self.place(self.link.send(pieces, offsets, size))

    def room(self, size: int) -> ReservedMemory | None:
        """Memory for bytes that become known one after the other. See `Link.room`."""
        return self.link.room(size)

    def filled(self, room: ReservedMemory, size: int) -> Attachment:
        """What to write into the message for the bytes that are there now."""
        self.size += size
        return self.place(room.packet(size))

    def place(self, packet: Attachment) -> Attachment:
        """What to write into the message for a packet that a link has made."""
        if type(packet) is bytes:
            return packet
        self.beside.append(packet)
        return len(self.beside) - 1

    def find(self, packet: Attachment) -> Attachment:
        """The packet that stands for ``packet`` in the message."""
        return self.beside[packet] if isinstance(packet, int) else packet

    def open(self, packet: Attachment) -> MemoryRange:
        """The bytes of a packet of the message."""
        return in_bytes(packet) if type(packet) is bytes else self.link.open(self.find(packet))

    def take(self, packet: Attachment) -> MemoryRange | None:
        """The bytes of a packet of the message, as memory of one's own."""
        return None if type(packet) is bytes else self.link.take(self.find(packet))
