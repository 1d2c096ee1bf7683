"""The link for everyday use: each amount of bytes goes the way that is fastest for it."""

from __future__ import annotations

from collections.abc import Sequence

from raydp_parallel.links.base import Link, Packet, Piece

INLINE_LIMIT = 64 * 1024
"""Bytes up to which a packet rides in the call. Ray moves arguments over 100 KB through its object store, which makes
a call of 120 KB cost four times one of 80 KB (measured), and a call carries more than one packet."""


class BySize:
    """Small packets by one link, large ones by another."""

    name = "auto"

    def __init__(self, small: Link, large: Link, limit: int = INLINE_LIMIT) -> None:
        self._small = small
        self._large = large
        self._limit = limit

    def send(self, pieces: Sequence[Piece], offsets: Sequence[int], size: int) -> Packet:
        return (self._small if size <= self._limit else self._large).send(pieces, offsets, size)

    def open(self, packet: Packet) -> Piece:
        return (self._small if isinstance(packet, bytes) else self._large).open(packet)

    def close(self) -> None:
        self._large.close()
        self._small.close()
