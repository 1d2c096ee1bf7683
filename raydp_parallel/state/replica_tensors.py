"""The tensors of one model in a replica, over the memory of their blocks."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from operator import attrgetter

import torch
from torch import Tensor

from raydp_parallel import devices
from raydp_parallel.devices.ranges import MemoryRange
from raydp_parallel.state import block_layout, replica_memory
from raydp_parallel.state.block_layout import BlockLayout
from raydp_parallel.state.replica_memory import BlockMemory, BlockSource, CopiedMemory, shows_other
from raydp_parallel.state.versions import TensorRow
from raydp_parallel.transport import codec
from raydp_parallel.transport.links import Attachments, InlineLink
from raydp_parallel.transport.messages import SlotSpec, Structure

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
        made = replica_memory.make({block: sources.pop(block) for block in lacking}, self._device)
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
