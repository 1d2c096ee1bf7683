"""What every link does, and how runs of memory are copied."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

ALIGNMENT = 64
PAGE = 4096
_LARGE = 1 << 16
"""Bytes from which a run of memory begins on a page, so that it can be mapped."""

Packet = Any
"""What a link makes of some bytes: bytes, which lie in the message, or something that travels beside it."""


class Origin(Protocol):
    """Memory of a device, which the CPU cannot read."""

    @property
    def tensor(self) -> Any:
        """The bytes, where they lie."""

    @property
    def device(self) -> Any:
        """Whose memory it is. Copies of one device come in order, those of two do not."""

    def part(self, offset: int, size: int) -> Origin:
        """Some of the bytes."""

    def copy_to(self, address: int) -> None:
        """Begin to copy the bytes to the CPU's memory."""

    def wait(self) -> None:
        """Wait until what this and earlier ones of the device began to copy has come."""

    def settle(self) -> None:
        """After `wait`: see that it is where it belongs."""


class Piece(NamedTuple):
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
    origin: Origin | None = None

    def part(self, offset: int, size: int) -> Piece:
        """Some of the bytes."""
        if self.origin is not None:
            return Piece(0, size, self.owner, self.origin.part(offset, size))
        return Piece(self.address + offset, size, self.owner)


class Window(Protocol):
    """Memory of this process that shows bytes of another's; what is written to it stays here."""

    @property
    def piece(self) -> Piece:
        """The memory."""

    def again(self) -> Window:
        """Another window on the same bytes."""

    def refresh(self) -> None:
        """Show the other's bytes again, as they are now."""

    def turn_to(self, packet: Packet, offset: int, size: int) -> bool:
        """Show other bytes, at the same address. False if that is not possible."""

    def source(self) -> Piece:
        """The other's bytes themselves, to be read."""


class Room(NamedTuple):
    """Memory for a packet that is filled bit by bit.

    Attributes:
        address: Where it begins.
        size: Its bytes.
        packet: The packet, of which so many bytes count.
    """

    address: int
    size: int
    packet: Callable[[int], Packet]


class Link(Protocol):
    """Two verbs and ``close``; and some that spare a copy or time, where a link can."""

    name: str
    inline: int = 0
    """Bytes up to which a packet is plain bytes that lie in the message."""
    exposes: bool = False
    """Whether `expose` may give anything, now."""

    def send(self, pieces: Sequence[Piece], offsets: Sequence[int], size: int) -> Packet:
        """Take ``pieces`` to their ``offsets`` in a buffer of ``size`` bytes, ready to travel."""

    def room(self, size: int) -> Room | None:
        """Memory for a packet of at most so many bytes, which become known one after the other; None: only `send`."""
        return None

    def open(self, packet: Packet) -> Piece:
        """The bytes of a packet, to be read and never written."""

    def take(self, packet: Packet) -> Piece | None:
        """The bytes of a packet as memory of one's own, to be written too; None: they have to be copied."""
        return None

    def show(self, packet: Packet, offset: int, size: int) -> Window | None:
        """A window on some bytes of a packet; None: they have to be copied."""
        return None

    def expose(self, storage: Any, known: Callable[[], int], often: bool = False) -> Packet | None:
        """A packet that is a tensor's storage itself, whose every change is seen at the other end.

        Args:
            storage: The storage. It may move in memory, with all tensors that look at it.
            known: Says how many tensors the caller knows to look at it. If there are more, it cannot be moved:
                something else, such as a NumPy array, may go by the address. Asked if it is worth it.
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


class Mail:
    """The packets of one message: small ones lie in the message, the others beside it, and are known by number."""

    def __init__(self, link: Link, beside: Sequence[Packet] = ()) -> None:
        self.link = link
        self.beside = list(beside)
        self.size = 0

    def send(self, pieces: Sequence[Piece], offsets: Sequence[int], size: int) -> Packet:
        """What to write into the message for these bytes."""
        self.size += size
        return self.place(self.link.send(pieces, offsets, size))

    def room(self, size: int) -> Room | None:
        """Memory for bytes that become known one after the other. See `Link.room`."""
        return self.link.room(size)

    def filled(self, room: Room, size: int) -> Packet:
        """What to write into the message for the bytes that are there now."""
        self.size += size
        return self.place(room.packet(size))

    def place(self, packet: Packet) -> Packet:
        """What to write into the message for a packet that a link has made."""
        if type(packet) is bytes:
            return packet
        self.beside.append(packet)
        return len(self.beside) - 1

    def find(self, packet: Packet) -> Packet:
        """The packet that stands for ``packet`` in the message."""
        return self.beside[packet] if isinstance(packet, int) else packet

    def open(self, packet: Packet) -> Piece:
        """The bytes of a packet of the message."""
        return in_bytes(packet) if type(packet) is bytes else self.link.open(self.find(packet))

    def take(self, packet: Packet) -> Piece | None:
        """The bytes of a packet of the message, as memory of one's own."""
        return None if type(packet) is bytes else self.link.take(self.find(packet))


def address_of(packet: bytes) -> int:
    """Where bytes are: they stay there as long as they live."""
    return ctypes.c_void_p.from_buffer(ctypes.c_char_p(packet)).value or 0


def in_bytes(packet: bytes) -> Piece:
    """Bytes where they are; the piece holds them."""
    return Piece(address_of(packet), len(packet), packet)


def aligned(size: int) -> int:
    """``size`` rounded up so that what follows is aligned for every dtype."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def paged(offset: int, size: int) -> int:
    """Where to put ``size`` bytes that may begin at ``offset``: large ones on a page, so that they can be mapped."""
    return offset if size < _LARGE else -(-offset // PAGE) * PAGE


def fill(address: int, pieces: Sequence[Piece], offsets: Sequence[int]) -> None:
    """Copy the pieces to their offsets from ``address``."""
    far: list[Origin] = []
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
