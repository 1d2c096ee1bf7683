"""What both ends of a call do with its bytes: seal, open, and say which memory is free again."""

from __future__ import annotations

import array
import ctypes
import itertools
import os
from typing import Any

import numpy as np

from raydp_parallel import devices
from raydp_parallel.devices.buffers import Arena, LeaseTable, SharedBuffer
from raydp_parallel.transport.links import Attachments, ForeignMemory, Link, Mappings
from raydp_parallel.transport.message_bytes import pack, unpack

METHODS = {
    method: bytes([number])
    for number, method in enumerate(("forward", "backward", "forget", "group", "train"))
}
"""What stands for a method on a direct line."""


def sample(arena: Arena) -> tuple[SharedBuffer, bytes]:
    """Some shared memory to try, and what lies in it."""
    lent = arena.take(16)
    lent.array[:] = np.frombuffer(os.urandom(16), dtype=np.uint8)
    return lent, lent.array.tobytes()


def shows(found: ForeignMemory, expected: bytes) -> bool:
    """Whether another process's memory can be read, and is what it should be."""
    try:
        piece = found.piece()
    except (OSError, ValueError):
        return False
    return ctypes.string_at(piece.address, piece.size) == expected


def check_read(*parts: Any) -> None:
    """Raise the error of a part of a message that there was no memory for."""
    for part in parts:
        if isinstance(part, MemoryError):
            raise part


def give_back(mappings: Mappings) -> bytes:
    """The word which of the other's memory is no longer used, for the next message."""
    devices.let_go()
    if not mappings.ended:
        return b""
    return array.array("Q", itertools.chain.from_iterable(mappings.released())).tobytes()


def take_back(word: Any, ledger: LeaseTable) -> None:
    """Hear that word: bytes, or an array if there is much to tell."""
    numbers = iter(array.array("Q", bytes(word)))
    for lease, times in zip(numbers, numbers, strict=True):
        ledger.returned(lease, times)


def seal(message: Any, attachments: Attachments) -> Any:
    """A message and its packets as one return value of a Ray call: bytes alone if nothing lies
    beside them.
    """
    header = pack(message)
    return (header, *attachments.beside) if attachments.beside else header


def unseal(answer: Any, link: Link) -> tuple[Any, Attachments]:
    """The message of a return value, and the mail to open its packets with."""
    header, *beside = answer if isinstance(answer, tuple) else (answer,)
    return unpack(header), Attachments(link, beside)
