"""The blocks of parameters that an optimizer of this replica trains."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from raydp_parallel import devices
from raydp_parallel.devices.ranges import MemoryRange
from raydp_parallel.state.replica_tensors import ReplicaTensors
from raydp_parallel.state.versions import Accessed


class OwnedBlocks:
    """The blocks that an optimizer of this replica trains: the driver's bytes of them are not taken
    over, and what the module itself writes to them is an error.

    Args:
        tensors: The tensors of the model.

    Attributes:
        blocks: The blocks.
        blank: Blocks without contents, which the driver leaves to an optimizer.
    """

    def __init__(self, tensors: ReplicaTensors) -> None:
        self.blocks: set[int] = set()
        self.blank: set[int] = set()
        self._refused: set[int] = set()
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

    def forget_refused(self) -> None:
        """Begin a forward, without errors of the last one."""
        self._refused.clear()

    def overwritten(self, dirty: set[int]) -> list[int]:
        """The slots of these blocks that the module itself wrote to, given all blocks that it wrote
        to.
        """
        found, members = dirty & self.blocks | self._refused, self._tensors.layout.members
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
                self._refused.add(block)
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
