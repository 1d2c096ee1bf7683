"""What every link does, and how runs of memory are copied."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

ALIGNMENT = 64

Packet = Any
"""What a link makes of some bytes: bytes, which lie in the message, or something that Ray carries beside it."""


class Piece(NamedTuple):
    """A run of bytes in the CPU's memory.

    Attributes:
        address: Where it starts.
        size: How many bytes.
        owner: What keeps the memory alive.
    """

    address: int
    size: int
    owner: Any


class Link(Protocol):
    """Two verbs and ``close``."""

    name: str

    def send(self, pieces: Sequence[Piece], offsets: Sequence[int], size: int) -> Packet:
        """Take ``pieces`` to their ``offsets`` in a buffer of ``size`` bytes, ready to travel."""

    def open(self, packet: Packet) -> Piece:
        """The bytes of a packet, to be read and never written."""

    def close(self) -> None:
        """Let go of what the link holds. May be called twice."""


class Mail:
    """The packets of one message: small ones lie in the message, the others beside it, and are known by number."""

    def __init__(self, link: Link, beside: Sequence[Packet] = ()) -> None:
        self.link = link
        self.beside = list(beside)
        self.size = 0
        self.kept: list[Packet] = []

    def send(self, pieces: Sequence[Piece], offsets: Sequence[int], size: int) -> Packet:
        """What to write into the message for these bytes."""
        self.size += size
        return self.place(self.link.send(pieces, offsets, size))

    def place(self, packet: Packet) -> Packet:
        """What to write into the message for a packet that a link has made."""
        if isinstance(packet, bytes):
            return packet
        self.beside.append(packet)
        return len(self.beside) - 1

    def open(self, packet: Packet) -> Piece:
        """The bytes that stand for ``packet`` in the message."""
        return self.link.open(self.beside[packet] if isinstance(packet, int) else packet)


def aligned(size: int) -> int:
    """``size`` rounded up so that what follows is aligned for every dtype."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def fill(address: int, pieces: Sequence[Piece], offsets: Sequence[int]) -> None:
    """Copy the pieces to their offsets from ``address``."""
    for piece, offset in zip(pieces, offsets, strict=True):
        ctypes.memmove(address + offset, piece.address, piece.size)
