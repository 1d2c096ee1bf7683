"""The memory that one block of a replica lies in: a copy of the driver's bytes, or a window on them."""

from __future__ import annotations

import ctypes
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from raydp_parallel import devices
from raydp_parallel.links import Mail, Packet, Piece, Window


class Source(NamedTuple):
    """Where the driver's bytes of a block are.

    Attributes:
        mail: Opens the packet.
        packet: The packet, as the message names it.
        offset: Where they begin in it.
        size: How many they are.
    """

    mail: Mail
    packet: Packet
    offset: int
    size: int

    def open(self) -> Piece:
        """The bytes, to be read."""
        whole = self.mail.open(self.packet)
        return Piece(whole.address + self.offset, self.size, whole.owner)


class Memory(Protocol):
    """The memory of one block."""

    tensor: Tensor
    """All of it, as bytes."""

    def adopt(self, source: Source) -> bool:
        """Take over new bytes of the driver's, where the old ones are. False if that is not possible."""

    def refresh(self) -> None:
        """Undo what was written since."""

    def renewed(self) -> Memory:
        """Other memory with the driver's bytes."""

    def driver(self) -> Piece:
        """The driver's bytes."""


class Copied:
    """A copy, on any device.

    Args:
        size: Bytes of it.
        device: Where.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.tensor = torch.empty(size, dtype=torch.uint8, device=device)
        self._driver = Piece(0, 0, None)

    def adopt(self, source: Source) -> bool:
        if _window(source, self.tensor.device) is not None:
            return False  # what lies in the driver's own memory is not sent again when it changes: it has to be shown
        self._driver = source.open()
        self.refresh()
        return True

    def refresh(self) -> None:
        if devices.is_cpu(self.tensor.device):
            ctypes.memmove(self.tensor.data_ptr(), self._driver.address, self._driver.size)
        else:
            self.tensor.copy_(devices.upload(self._driver, self.tensor.device))

    def renewed(self) -> Copied:
        other = Copied(len(self.tensor), self.tensor.device)
        other._driver = self._driver
        other.refresh()
        return other

    def driver(self) -> Piece:
        return self._driver


class Shown:
    """A window on the driver's memory, on the same machine: nothing is copied but what is written to.

    Args:
        window: The window.
    """

    def __init__(self, window: Window) -> None:
        self._window = window
        self.tensor = devices.view(window.piece)

    def adopt(self, source: Source) -> bool:
        return self._window.turn_to(source.mail.find(source.packet), source.offset, source.size)

    def refresh(self) -> None:
        self._window.refresh()

    def renewed(self) -> Shown:
        return Shown(self._window.again())

    def driver(self) -> Piece:
        return self._window.source()


def make(source: Source, device: torch.device) -> Memory:
    """The memory of a block whose bytes are at ``source``."""
    window = _window(source, device)
    if window is not None:
        return Shown(window)
    memory = Copied(source.size, device)
    memory.adopt(source)
    return memory


def _window(source: Source, device: torch.device) -> Window | None:
    mail = source.mail
    if not devices.is_cpu(device):
        return None
    return mail.link.show(mail.find(source.packet), source.offset, source.size)
