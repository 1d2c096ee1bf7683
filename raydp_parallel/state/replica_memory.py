"""The tensors of a module in a replica, and their memory by blocks: copies of the driver's bytes,
or windows on them; and the blocks that an optimizer of the replica trains.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from raydp_parallel import devices
from raydp_parallel.devices.ranges import Attachment, MemoryRange
from raydp_parallel.state import block_layout
from raydp_parallel.state.block_layout import BlockLayout
from raydp_parallel.state.versions import Accessed, TensorRow
from raydp_parallel.transport import codec
from raydp_parallel.transport.links import Attachments, InlineLink, MappedBuffer
from raydp_parallel.transport.messages import SlotSpec, Structure


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


def shows_other(tensor: Tensor, spec: SlotSpec, address: int) -> bool:
    """Whether a tensor shows other memory than its spec says, of the block at an address."""
    kind = spec.tensor
    if tensor.shape != kind.shape or codec.DTYPE_NAMES[tensor.dtype] != kind.dtype:
        return True
    if not tensor.numel():
        return False
    lies = tensor.storage_offset(), tensor.stride()
    return lies != (spec.offset, kind.stride) or tensor.untyped_storage().data_ptr() != address


_flag = attrgetter("requires_grad")


class ReplicaTensors:
    """The tensors of one model, by slot.

    Args:
        device: Their device.

    Attributes:
        layout: The blocks that the plain ones lie in.
        memory: The memory of each block.
        tensors: The tensors.
        flags: Of each whether it requires a gradient in the master.
        row: The plain ones.
    """

    def __init__(self, device: torch.device) -> None:
        self.layout = BlockLayout({}, {}, {})
        self.memory: dict[int, BlockMemory] = {}
        self.tensors: dict[int, Tensor] = {}
        self.flags: dict[int, bool] = {}
        self.row = TensorRow({})
        self._device = device

    def build(self, new: Structure, sources: dict[int, BlockSource]) -> set[int]:
        """Make the tensors of a new structure; those that are here stay where they still fit.

        Args:
            new: The structure.
            sources: The places of the driver's bytes. Those of blocks that are made are taken out.

        Returns:
            The blocks that are made without any.
        """
        layout = block_layout.layout_of(new.slots, new.block_sizes)
        kept = {block for block in layout.members if self._keeps(block, layout)}
        blank = layout.sizes.keys() - kept - sources.keys()
        lacking = [block for block in layout.sizes if block not in kept and block not in blank]
        made = make({block: sources.pop(block) for block in lacking}, self._device)
        for block in blank:
            made[block] = CopiedMemory(layout.sizes[block], self._device, blank=True)
        self.memory = {block: made.get(block) or self.memory[block] for block in layout.sizes}
        self.tensors = {
            slot: self.tensors[slot]
            if spec.block in kept
            else block_layout.build(spec, self.memory[spec.block].tensor)
            for slot, spec in new.slots.items()
        }
        self.layout = layout
        if new.specials is not None:
            slots, parcel = new.specials
            found = codec.unpack(parcel, Attachments(InlineLink()), self._device)
            self.tensors.update(zip(slots, found, strict=True))
        self.flags = {slot: tensor.requires_grad for slot, tensor in self.tensors.items()}
        self.flags.update((slot, spec.tensor.requires_grad) for slot, spec in new.slots.items())
        self.restore_flags()
        self.row = TensorRow({slot: self.tensors[slot] for slot in layout.specs})
        return blank

    def _keeps(self, block: int, new: BlockLayout) -> bool:
        """Whether the tensors of a block fit a new layout as they are."""
        old = self.layout
        return (
            old.members.get(block) == new.members[block]
            and new.sizes[block] == len(self.memory[block].tensor)
            and all(_flagless(new.specs[s]) == _flagless(old.specs[s]) for s in new.members[block])
        )

    def rebuild(self, chosen: Iterable[int]) -> None:
        """Make new tensors over the memory of some blocks."""
        for block in chosen:
            for slot in self.layout.members[block]:
                old, spec = self.tensors[slot], self.layout.specs[slot]
                spec = spec._replace(tensor=spec.tensor._replace(requires_grad=self.flags[slot]))
                new = block_layout.build(spec, self.memory[block].tensor)
                vars(new).update(vars(old))
                self.tensors[slot] = new
        self.row = TensorRow({slot: self.tensors[slot] for slot in self.layout.specs})

    def restore_flags(self) -> None:
        """Let each require a gradient where the master's does."""
        if [*map(_flag, self.tensors.values())] == [*self.flags.values()]:
            return
        for slot, tensor in self.tensors.items():
            if tensor.requires_grad != self.flags[slot]:
                tensor.requires_grad_(self.flags[slot])

    def point_back(self, chosen: Collection[int]) -> bool:
        """Let tensors that forward gave other memory show their blocks again; False if one of them
        has to be made anew.

        On CUDA `flatten_parameters()` gives the weights of a recurrent net other memory in each
        forward. What holds these tensors, as lists and weak references do, then still does.
        """
        for block in chosen:
            whole = self.memory[block].tensor
            if whole.untyped_storage().nbytes() != whole.nbytes:  # a tensor was resized in place
                return False
            for slot in self.layout.members[block]:
                if not self.tensors[slot].is_leaf:
                    return False
                if self.shows_other(slot):
                    try:
                        self.tensors[slot].data = self.shown(slot)
                    except RuntimeError:  # it became a tensor of another kind
                        return False
        return True

    def shown(self, slot: int) -> Tensor:
        """The contents of the block at a slot, even if its tensor was given other memory that does
        not last.
        """
        spec = self.layout.specs[slot]
        return block_layout.build(spec, self.memory[spec.block].tensor).detach()

    def shows_other(self, slot: int) -> bool:
        """Whether a tensor shows other memory than that of its block."""
        spec = self.layout.specs[slot]
        return shows_other(self.tensors[slot], spec, self.address(spec.block))

    def is_spoiled(self, slot: int) -> bool:
        """Whether a tensor cannot be used again: it shows other memory, or is part of a graph."""
        return self.shows_other(slot) or not self.tensors[slot].is_leaf

    def address(self, block: int) -> int:
        """The address of a block."""
        return self.memory[block].tensor.data_ptr()

    def read(self, block: int) -> MemoryRange:
        """The bytes of a block."""
        return devices.piece(self.memory[block].tensor)


def _flagless(spec: SlotSpec) -> SlotSpec:
    return spec._replace(tensor=spec.tensor._replace(requires_grad=False))


class OwnedBlocks:
    """The blocks that an optimizer of this replica trains: the driver's bytes of them are not taken
    over, and what the module itself writes to them is an error.

    Args:
        tensors: The tensors of the model.

    Attributes:
        blocks: The blocks.
        blank: Blocks without contents, which the driver leaves to an optimizer.
        refused: Blocks that the last forward wrote to, which was undone.
    """

    def __init__(self, tensors: ReplicaTensors) -> None:
        self.blocks: set[int] = set()
        self.blank: set[int] = set()
        self.refused: set[int] = set()
        self._tensors = tensors

    def begin(self, slots: Sequence[int]) -> None:
        """Leave the contents of some slots to the optimizer."""
        specs = self._tensors.layout.specs
        self.blocks = {specs[slot].block for slot in slots}
        self.blank -= self.blocks

    def check_filled(self) -> None:
        """Raise an error if no optimizer gave contents to blocks that the driver leaves to it."""
        if self.blank:
            raise RuntimeError(
                "the weights of this replica come from an optimizer that it does not have: it "
                "gets both with the next call"
            )

    def overwritten(self, dirty: set[int]) -> list[int]:
        """The slots of these blocks that the module itself wrote to, given all blocks that it wrote
        to.
        """
        found, members = dirty & self.blocks | self.refused, self._tensors.layout.members
        return sorted(slot for block in found for slot in members[block])

    def watched(self) -> dict[int, MemoryRange]:
        """The blocks by their addresses: nothing else has their contents, so that what accesses
        them is compared with a copy of its own.
        """
        return {self._tensors.address(block): self._tensors.read(block) for block in self.blocks}

    def take_back(self, blocks: Collection[int], touched: Accessed) -> set[int]:
        """Undo what code wrote to some blocks, as it got at their memory; returns those that it
        cannot be undone in.
        """
        only_read, lost = touched.only_read(), set()
        for block in blocks:
            address = self._tensors.address(block)
            before = touched.before(address)
            if before is None:
                lost.add(block)
            elif address not in only_read:
                devices.load(self._tensors.memory[block].tensor, before)
                self.refused.add(block)
        return lost

    def moved_alike(self, replaced: Iterable[int]) -> set[int]:
        """Give tensors of these blocks their memory back, if the forward that gave them other
        memory left the values as they were; returns their slots.

        Args:
            replaced: The slots of all tensors that were given other memory.
        """
        tensors, specs = self._tensors.tensors, self._tensors.layout.specs
        chosen = [
            slot
            for slot in sorted(replaced)
            if specs[slot].block in self.blocks and tensors[slot].is_leaf
        ]
        shown = {slot: self._tensors.shown(slot) for slot in chosen}
        pairs = {
            slot: (devices.piece(now.detach()), devices.piece(shown[slot]))
            for slot in chosen
            if (now := tensors[slot]).is_contiguous()
            and (now.shape, now.dtype, now.stride())
            == (shown[slot].shape, shown[slot].dtype, shown[slot].stride())
        }
        alike = devices.compare([*pairs.values()])()
        found = {slot for slot, same in zip(pairs, alike, strict=True) if same}
        for slot in found:
            tensors[slot].data = shown[slot]
        return found
