"""The memory of one block in a replica: a copy of the driver's bytes, or a window on them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from raydp_parallel import devices
from raydp_parallel.devices.ranges import Attachment, MemoryRange
from raydp_parallel.transport.links import Attachments, MappedBuffer


class BlockSource(NamedTuple):
    """The place of the driver's bytes of a block.

    Attributes:
        attachments: Opens the packet.
        packet: The packet, as the message names it.
        offset: Their offset in it.
        size: Their number.
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
        """A window on them; None if they must be copied."""
        if not devices.is_cpu(device):
            return None
        packet = self.attachments.find(self.packet)
        return self.attachments.link.show(packet, self.offset, self.size)


class BlockMemory(Protocol):
    """The memory of one block."""

    tensor: Tensor
    """All of it, as bytes."""

    def takes(self, source: BlockSource) -> bool:
        """Whether this memory can take over new bytes of the driver. A window shows them then."""

    def copies(self, source: BlockSource) -> tuple[Tensor, MemoryRange] | None:
        """The target and the source of the copy that new bytes need; None if they need none."""

    def refresh(self) -> None:
        """Undo all writes since."""

    def renewed(self) -> BlockMemory:
        """Other memory with the driver's bytes."""

    def driver(self) -> MemoryRange:
        """The driver's bytes."""


class CopiedMemory:
    """A copy, on any device.

    Args:
        size: Its bytes.
        device: Its device.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.tensor = torch.empty(size, dtype=torch.uint8, device=device)
        self._driver = MemoryRange(0, 0, None)
        self._near: MemoryRange | None = None

    def takes(self, source: BlockSource) -> bool:
        # Exposed memory of the driver is not sent again when it changes, so it needs a window.
        return source.window(self.tensor.device) is None

    def copies(self, source: BlockSource) -> tuple[Tensor, MemoryRange] | None:
        self._driver, self._near = source.open(), None
        return self.tensor, self._driver

    def refresh(self) -> None:
        devices.load(self.tensor, self._near or self._driver)

    def lie(self, driver: MemoryRange) -> None:
        """Note another place of the driver's bytes, where they change from now on."""
        self._driver, self._near = driver, None

    def renewed(self) -> CopiedMemory:
        other = CopiedMemory(len(self.tensor), self.tensor.device)
        other._driver, other._near = self._driver, self._near
        other.refresh()
        return other

    def driver(self) -> MemoryRange:
        if devices.is_cpu(self.tensor.device) or self._driver.origin is not None:
            return self._driver
        if not self._driver.size:
            return self._driver
        # Kept on the device for the few blocks that are compared: buffers, after each forward.
        if self._near is None:
            self._near = devices.piece(devices.upload(self._driver, self.tensor.device))
        return self._near


class ShownMemory:
    """A window on the driver's memory, on the same machine: only pages that are written are copied.

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
    """The memory of a block with its bytes at ``source``."""
    window = source.window(device)
    if window is not None:
        return ShownMemory(window)
    memory = CopiedMemory(source.size, device)
    adopt({0: memory}, {0: source})
    return memory


def adopt(memory: Mapping[int, BlockMemory], sources: Mapping[int, BlockSource]) -> None:
    """Take over new bytes of the driver for blocks that `takes` allowed, with as few copies as the
    device needs.
    """
    pairs = [memory[block].copies(source) for block, source in sources.items()]
    found = [pair for pair in pairs if pair is not None]
    if found:
        devices.load_all([target for target, _ in found], [piece for _, piece in found])
