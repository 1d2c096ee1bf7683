"""The memory of one block in a replica: a copy of the driver's bytes, or a window on them."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from raydp_parallel import devices
from raydp_parallel.devices.ranges import Attachment, MemoryRange
from raydp_parallel.transport.links import Attachments, MappedBuffer


class Packet:
    """A packet of an update, in which the driver's bytes of some blocks lie.

    Args:
        attachments: Opens it.
        name: The packet, as the message names it.
        device: The device of the replica.
    """

    def __init__(self, attachments: Attachments, name: Attachment, device: torch.device) -> None:
        self._attachments = attachments
        self._name = name
        self._device = device

    @functools.cached_property
    def whole(self) -> MemoryRange:
        """All its bytes, where the device reads them fastest. It is opened once for all blocks."""
        return devices.near(self._attachments.open(self._name), self._device)

    @property
    def sent(self) -> Attachment:
        """What the link brought."""
        return self._attachments.find(self._name)

    def window(self, offset: int, size: int) -> MappedBuffer | None:
        """A window on some bytes; None if they must be copied."""
        if not devices.is_cpu(self._device):
            return None
        return self._attachments.link.show(self.sent, offset, size)


class BlockSource(NamedTuple):
    """The place of the driver's bytes of a block.

    Attributes:
        packet: The packet.
        offset: Their offset in it.
        size: Their number.
    """

    packet: Packet
    offset: int
    size: int

    def window(self) -> MappedBuffer | None:
        """A window on them; None if they must be copied."""
        return self.packet.window(self.offset, self.size)


class BlockMemory(Protocol):
    """The memory of one block."""

    tensor: Tensor
    """All of it, as bytes."""

    def takes(self, source: BlockSource) -> bool:
        """Whether this memory can take over new bytes of the driver. A window shows them then."""

    def follow(self, source: BlockSource) -> bool:
        """Note where new bytes of the driver are; returns whether they have to be copied."""

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
        blank: Whether the driver has no bytes for it: whatever it holds counts as these.
    """

    def __init__(self, size: int, device: torch.device, blank: bool = False) -> None:
        self.tensor = torch.empty(size, dtype=torch.uint8, device=device)
        # The driver's bytes: a run that holds them, and their offset. Most are never read again.
        own = devices.piece(self.tensor) if blank else MemoryRange(0, 0, None)
        self._sent = own, 0
        self._near: MemoryRange | None = None

    def takes(self, source: BlockSource) -> bool:
        # Exposed memory of the driver is not sent again when it changes, so it needs a window.
        return source.window() is None

    def follow(self, source: BlockSource) -> bool:
        self._sent, self._near = (source.packet.whole, source.offset), None
        return True

    def refresh(self) -> None:
        devices.load(self.tensor, self.undone())

    def undone(self) -> MemoryRange:
        """The driver's bytes, to be copied."""
        return self._near or self._driver()

    def lie(self, driver: MemoryRange) -> None:
        """Note another place of the driver's bytes, where they change from now on."""
        self._sent, self._near = (driver, 0), None

    def renewed(self) -> CopiedMemory:
        other = CopiedMemory(len(self.tensor), self.tensor.device)
        other._sent, other._near = self._sent, self._near
        other.refresh()
        return other

    def _driver(self) -> MemoryRange:
        whole, offset = self._sent
        return whole.part(offset, len(self.tensor))

    def driver(self) -> MemoryRange:
        found = self._driver()
        if devices.is_cpu(self.tensor.device) or found.origin is not None or not found.size:
            return found
        # Kept on the device for the few blocks that are compared: buffers, after each forward.
        if self._near is None:
            self._near = devices.piece(devices.upload(found, self.tensor.device))
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
        return self._window.turn_to(source.packet.sent, source.offset, source.size)

    def follow(self, source: BlockSource) -> bool:
        return False

    def refresh(self) -> None:
        self._window.refresh()

    def renewed(self) -> ShownMemory:
        return ShownMemory(self._window.again())

    def driver(self) -> MemoryRange:
        return self._window.source()


def make(sources: Mapping[int, BlockSource], device: torch.device) -> dict[int, BlockMemory]:
    """The memory of some blocks with their bytes at ``sources``."""
    made: dict[int, BlockMemory] = {}
    for block, source in sources.items():
        window = source.window()
        made[block] = (
            ShownMemory(window) if window is not None else CopiedMemory(source.size, device)
        )
    adopt(made, sources)
    return made


def adopt(memory: Mapping[int, BlockMemory], sources: Mapping[int, BlockSource]) -> None:
    """Take over new bytes of the driver for blocks that `takes` allowed: one copy for all blocks of
    a packet.
    """
    packets: dict[Packet, list[int]] = defaultdict(list)
    for block, source in sources.items():
        if memory[block].follow(source):
            packets[source.packet].append(block)
    for packet, blocks in packets.items():
        offsets = [sources[block].offset for block in blocks]
        devices.load_parts([memory[block].tensor for block in blocks], packet.whole, offsets)


def refresh(memories: Iterable[BlockMemory]) -> None:
    """Undo all writes to some blocks, with one copy for those that are copies."""
    copied: list[CopiedMemory] = []
    for memory in memories:
        if isinstance(memory, CopiedMemory):
            copied.append(memory)
        else:
            memory.refresh()
    if copied:
        devices.load_all(
            [memory.tensor for memory in copied], [memory.undone() for memory in copied]
        )
