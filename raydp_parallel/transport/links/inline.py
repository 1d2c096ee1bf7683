"""The link that puts bytes into the message itself, for small amounts."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence

from raydp_parallel.devices.ranges import MemoryRange, fill, in_bytes
from raydp_parallel.transport.links.link import Link


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

    def open(self, packet: bytes) -> MemoryRange:
        return in_bytes(packet)

    def close(self) -> None:
        """Nothing is held."""
