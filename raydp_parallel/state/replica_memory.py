"""The memory that one block of a replica lies in: a copy of the driver's bytes, or a window on
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from raydp_parallel import devices
from raydp_parallel.devices.ranges import Attachment, MemoryRange
from raydp_parallel.transport.links import Attachments, MappedBuffer


class BlockSource(NamedTuple):
    """Where the driver's bytes of a block are.

    Attributes:
        attachments: Opens the packet.
        packet: The packet, as the message names it.
        offset: Where they begin in it.
        size: How many they are.
        near: The bytes of the packet where the device reads them fastest, if they are there.
    """

    attachments: Attachments
    packet: Attachment
    offset: int
    size: int
    near: MemoryRange | None = None

    def whole(self) -> MemoryRange:
        """All bytes of the packet, to be read."""
        return self.near if self.near is not None else self.attachments.open(self.packet)

    def open(self) -> MemoryRange:
        """The bytes, to be read."""
        return self.whole().part(self.offset, self.size)

    def window(self, device: torch.device) -> MappedBuffer | None:
        """A window on them, None if they are to be copied."""
        if not devices.is_cpu(device):
            return None
        return self.attachments.link.show(
            self.attachments.find(self.packet), self.offset, self.size
        )


class BlockMemory(Protocol):
    """The memory of one block."""

    tensor: Tensor
    """All of it, as bytes."""

    def takes(self, source: BlockSource) -> bool:
        """Whether new bytes of the driver's can be taken over where the old ones are. A window
        shows them then.
        """

    def copies(self, source: BlockSource) -> tuple[Tensor, MemoryRange] | None:
        """Where new bytes have to be copied to, and from."""

    def refresh(self) -> None:
        """Undo what was written since."""

    def renewed(self) -> BlockMemory:
        """Other memory with the driver's bytes."""

    def driver(self) -> MemoryRange:
        """The driver's bytes."""


class CopiedMemory:
    """A copy, on any device.

    Args:
        size: Bytes of it.
        device: Where.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.tensor = torch.empty(size, dtype=torch.uint8, device=device)
        self._driver = MemoryRange(0, 0, None)
        self._near: MemoryRange | None = None

    def takes(self, source: BlockSource) -> bool:
        # What lies in the driver's own memory is not sent again when it changes: it has to be
        # shown.
        return source.window(self.tensor.device) is None

    def copies(self, source: BlockSource) -> tuple[Tensor, MemoryRange] | None:
        self._driver, self._near = source.open(), None
        return self.tensor, self._driver

    def refresh(self) -> None:
        devices.load(self.tensor, self._near or self._driver)

    def lie(self, driver: MemoryRange) -> None:
        """The driver's bytes are elsewhere from now on, and change there."""
        self._driver, self._near = driver, None

    def renewed(self) -> CopiedMemory:
        other = CopiedMemory(len(self.tensor), self.tensor.device)
        other._driver, other._near = self._driver, self._near
        other.refresh()
        return other

    def driver(self) -> MemoryRange:
        if (
            devices.is_cpu(self.tensor.device)
            or not self._driver.size
            or self._driver.origin is not None
        ):
            return self._driver
        # Kept on the device for the few blocks that are asked for: buffers, after each forward.
        if self._near is None:
            self._near = devices.piece(devices.upload(self._driver, self.tensor.device))
        return self._near


class ShownMemory:
    """A window on the driver's memory, on the same machine: nothing is copied but what is written
    to.

    Args:
        window: The window.
    """

    def __init__(self, window: MappedBuffer) -> None:
        self._window = window
        self.tensor = devices.view(window.piece)

    def takes(self, source: BlockSource) -> bool:
        return self._window.turn_to(
            source.attachments.find(source.packet), source.offset, source.size
        )

    def copies(self, source: BlockSource) -> tuple[Tensor, MemoryRange] | None:
        return None

    def refresh(self) -> None:
        self._window.refresh()

    def renewed(self) -> ShownMemory:
        return ShownMemory(self._window.again())

    def driver(self) -> MemoryRange:
        return self._window.source()


def make(source: BlockSource, device: torch.device) -> BlockMemory:
    """The memory of a block whose bytes are at ``source``."""
    window = source.window(device)
    if window is not None:
        return ShownMemory(window)
    memory = CopiedMemory(source.size, device)
    adopt({0: memory}, {0: source})
    return memory


def adopt(memory: Mapping[int, BlockMemory], sources: Mapping[int, BlockSource]) -> None:
    """Take over new bytes of the driver's for some blocks, which take them, by as few copies as a
    device needs.
    """
    found = [
        pair
        for block, source in sources.items()
        if (pair := memory[block].copies(source)) is not None
    ]
    if found:
        devices.load_all([target for target, _ in found], [piece for _, piece in found])
