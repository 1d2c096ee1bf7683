"""The memory of a module's tensors in a replica: a copy of the driver's bytes, or a window on them.

[Note: reported blocks]
Kernels write to some small blocks without moving a version, such as batch norm's running means.
After each forward they are copied into one run of bytes and compared with another. What the forward
changed is reported, and the driver writes it to the master. With its next update the driver sends
it to all replicas, and says which blocks are as which report left them. The replica that made the
report has them already.

[Note: replaced memory]
A tensor to which forward gave other memory, by `self.x.data = ...`, `set_` or `resize_`, no longer
shows the bytes of its block. Its new contents are reported if upstream's replica 0 would hold the
master's own tensor, so that the driver gives the master's tensor other memory too.
"""

from __future__ import annotations

import functools
import secrets
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from raydp_parallel import devices
from raydp_parallel.devices.ranges import Attachment, MemoryRange
from raydp_parallel.state import block_layout
from raydp_parallel.state.block_layout import SMALL, UNNAMED, Flat, copy
from raydp_parallel.transport import codec
from raydp_parallel.transport.links import Attachments, MappedBuffer
from raydp_parallel.transport.messages import SlotSpec


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
        self._shows = devices.is_cpu(device)

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
        if not self._shows:
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


class Buffers:
    """The blocks in three runs of bytes: the driver's, as last reported, as a forward left them.

    Args:
        memory: The memory of all blocks of the model.
        blocks: The blocks that kernels write to without moving a version.
        device: Their device.

    Attributes:
        blocks: The small ones among them; large blocks and windows are handled separately.
        likely: The blocks that the next report will have, if it is as the last one.
    """

    def __init__(
        self, memory: Mapping[int, BlockMemory], blocks: Iterable[int], device: torch.device
    ) -> None:
        self._memory = memory
        chosen = {b: found for b in blocks if isinstance(found := memory[b], CopiedMemory)}
        sizes = {
            b: len(found.tensor) for b, found in chosen.items() if 0 < len(found.tensor) <= SMALL
        }
        self._driver = Flat(sizes, device)
        self._told, self._now = self._driver.like(), self._driver.like()
        self.blocks = frozenset(sizes)
        self._answer: Callable[[], list[int]] = list
        self._report = UNNAMED
        self.likely: tuple[int, ...] = ()
        if self.blocks:
            drivers = [chosen[block].driver() for block in self._driver.blocks]
            devices.load_all(self._driver.runs, drivers)
        for block, run in zip(self._driver.blocks, self._driver.runs, strict=True):
            chosen[block].lie(devices.piece(run))
        self._told.follow(self._driver)

    def look(self) -> None:
        """Begin to compare, to find the blocks that were written to."""
        if self.blocks:
            copy(self._now.runs, [self._memory[block].tensor for block in self._now.blocks])
            self._answer = self._now.compare(self._told)

    @property
    def looking(self) -> bool:
        """Whether a comparison was begun of which `written` has not told yet."""
        return self._answer is not list

    def written(self) -> set[int]:
        """The blocks that differ from what was last reported, or from the driver's bytes if they
        never were; it waits for the comparison.
        """
        found, self._answer = self._answer(), list
        return {*found}

    def together(self, changed: Sequence[int]) -> Sequence[int]:
        """The blocks to report if some changed: all if most did, so that the next report has the
        same blocks.
        """
        return self._now.blocks if 2 * len(changed) > len(self._now.blocks) else changed

    def report(self, changed: Sequence[int]) -> int:
        """Note that some blocks are reported with their last compared contents; returns the number
        of the report.
        """
        self._report = secrets.randbits(62) + 1
        if tuple(changed) == self._now.blocks:  # all: the next look fills the other run
            self._told, self._now = self._now, self._told
        else:
            self._told.load(changed, self._places(changed), self._now.piece())
        return self._report

    def packed(
        self, changed: Sequence[int]
    ) -> tuple[Sequence[int], list[tuple[MemoryRange, int]], int]:
        """Some blocks with their last compared contents, for a packet. See `Flat.packed`."""
        return self._now.packed(changed)

    def keep(self, report: int, kept: Sequence[int]) -> set[int]:
        """Take over as the driver's bytes the blocks ``kept`` as they were in ``report``; returns
        them, or none if the last report was another.
        """
        if report != self._report or report == UNNAMED:
            return set()
        found = [block for block in kept if block in self.blocks]
        self._driver.load(found, self._places(found), self._told.piece())
        return {*found}

    def forget_report(self) -> None:
        """Note that the blocks are no longer as last reported."""
        self._report = UNNAMED

    def settle(self) -> None:
        """Note that all blocks hold the driver's bytes."""
        self._told.follow(self._driver)
        self._answer, self._report = list, UNNAMED

    def adopt(self, sources: Mapping[int, BlockSource]) -> None:
        """Copy new bytes of the driver into some blocks."""
        packets: dict[Packet, list[int]] = defaultdict(list)
        for block, source in sources.items():
            packets[source.packet].append(block)
        for packet, chosen in packets.items():
            offsets = [sources[block].offset for block in chosen]
            self._driver.load(chosen, offsets, packet.whole)
        rows = self._driver.rows([*sources])
        copy(
            [self._memory[block].tensor for block in sources],
            [self._driver.runs[row] for row in rows],
        )

    def _places(self, chosen: Sequence[int]) -> Sequence[int]:
        if tuple(chosen) == self._driver.blocks:
            return self._driver.offsets
        return [self._driver.offsets[row] for row in self._driver.rows(chosen)]


def shows_other(tensor: Tensor, spec: SlotSpec, address: int) -> bool:
    """Whether a tensor shows other memory than its spec says, of the block at an address."""
    kind = spec.tensor
    if tensor.shape != kind.shape or codec.DTYPE_NAMES[tensor.dtype] != kind.dtype:
        return True
    if not tensor.numel():
        return False
    lies = tensor.storage_offset(), tensor.stride()
    return lies != (spec.offset, kind.stride) or tensor.untyped_storage().data_ptr() != address


_shape, _dtype = attrgetter("shape"), attrgetter("dtype")


def _lying(row: Sequence[Tensor]) -> list[Any]:
    """How some tensors lie in their storages."""
    kinds = [*map(_shape, row), *map(_dtype, row)]
    return [*kinds, *map(Tensor.stride, row), *map(Tensor.storage_offset, row)]


def _said(specs: Sequence[SlotSpec]) -> list[Any]:
    """How tensors with some specs lie."""
    kinds = [spec.tensor for spec in specs]
    shapes = [torch.Size(kind.shape) for kind in kinds]
    dtypes = [codec.DTYPES[kind.dtype] for kind in kinds]
    strides = [kind.stride for kind in kinds]
    return [*shapes, *dtypes, *strides, *[spec.offset for spec in specs]]


def lasts(tensor: Tensor, *, alone: bool, detached: bool) -> bool:
    """Whether upstream's replica 0 holds the master's own tensor there.

    Args:
        tensor: The tensor of the replica.
        alone: Whether there is one device only, where upstream runs the master itself.
        detached: Whether the module takes no gradients.
    """
    return alone or detached or not (isinstance(tensor, torch.nn.Parameter) or tensor.requires_grad)


class Replaced:
    """The slots of one replica that show other memory, and what was reported about them."""

    def __init__(self) -> None:
        self.slots: set[int] = set()
        self._known: tuple[Mapping[int, SlotSpec], tuple[int, ...], list[Any]] = {}, (), []
        self._reported: dict[int, Tensor] = {}

    def clear(self) -> None:
        """Note that all slots show the bytes of their blocks."""
        self.slots = set()
        self._reported.clear()

    def lie_as_said(
        self,
        chosen: tuple[int, ...],
        tensors: Mapping[int, Tensor],
        specs: Mapping[int, SlotSpec],
    ) -> bool:
        """Whether tensors whose addresses are as at first lie as their specs say. Mostly the same
        ones are written in each forward, so what the specs say is kept.
        """
        known, slots, said = self._known
        if known is not specs or slots != chosen:
            said = _said([specs[slot] for slot in chosen])
            self._known = specs, chosen, said
        return _lying([tensors[slot] for slot in chosen]) == said

    def news(
        self,
        chosen: Collection[int],
        tensors: dict[int, Tensor],
        specs: dict[int, SlotSpec],
        memory: dict[int, BlockMemory],
    ) -> list[int]:
        """The slots among those chosen that show other bytes than the driver has; they count as
        reported from now on.
        """
        found = [
            slot
            for slot in chosen
            if self._differs(slot, tensors[slot], specs[slot], memory[specs[slot].block])
        ]
        self._reported.update((slot, tensors[slot].detach().clone()) for slot in found)
        return found

    def _differs(self, slot: int, tensor: Tensor, spec: SlotSpec, memory: BlockMemory) -> bool:
        before = self._reported.get(slot)
        geometry = tensor.shape, tensor.stride(), codec.DTYPE_NAMES[tensor.dtype]
        if before is not None:
            if geometry != (before.shape, before.stride(), codec.DTYPE_NAMES[before.dtype]):
                return True
            driver = block_layout.read([before])
        else:
            if geometry != (spec.tensor.shape, spec.tensor.stride, spec.tensor.dtype):
                return True
            driver = memory.driver()
        return not devices.compare([(block_layout.read([tensor]), driver)])()[0]
