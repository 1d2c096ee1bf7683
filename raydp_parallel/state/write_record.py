"""What the module of a replica wrote to, and what of that the driver was told."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor, nn

from raydp_parallel import devices
from raydp_parallel.devices.ranges import Attachment, MemoryRange
from raydp_parallel.state.block_layout import packed
from raydp_parallel.state.owned_blocks import OwnedBlocks
from raydp_parallel.state.replica_memory import Buffers, Replaced
from raydp_parallel.state.replica_tensors import ReplicaTensors
from raydp_parallel.state.versions import Accessed
from raydp_parallel.transport.links import Attachments
from raydp_parallel.transport.messages import Blob, StateUpdate

_leaf = attrgetter("is_leaf")


class Contents(NamedTuple):
    """The contents of some blocks, to be sent.

    Attributes:
        blob: The blocks, without a packet yet.
        pieces: The contents of the packet.
        starts: The offset of each piece.
        size: Bytes of the packet.
    """

    blob: Blob
    pieces: Sequence[MemoryRange]
    starts: Sequence[int]
    size: int

    def send(self, attachments: Attachments) -> Attachment:
        """Send them; returns what stands for the packet in the message."""
        return attachments.send(*self[1:]) if self.pieces else b""


class Written(NamedTuple):
    """What a forward changed in place.

    Attributes:
        report: The report's number.
        slots: The slots, with whether their version moved.
        contents: The blocks that they lie in.
        replaced: The slots among them that were given other memory.
        tensors: The tensors of these, as they are now.
    """

    report: int
    slots: tuple[tuple[int, bool], ...]
    contents: Contents
    replaced: tuple[int, ...]
    tensors: tuple[Tensor, ...]


class WriteRecord:
    """The blocks that one module wrote to: since they last had the driver's bytes, and in the last
    forward.

    Args:
        tensors: The tensors of the model.
        owned: The blocks among them that an optimizer trains.
        device: Their device.

    Attributes:
        dirty: The blocks that do not have the driver's bytes.
        buffers: The small blocks that kernels write to without moving a version.
    """

    def __init__(self, tensors: ReplicaTensors, owned: OwnedBlocks, device: torch.device) -> None:
        self.dirty: set[int] = set()
        self.buffers = Buffers({}, (), device)
        self._tensors = tensors
        self._owned = owned
        self._device = device
        self._unversioned: list[int] = []
        self._moved: set[int] = set()
        self._fresh: set[int] = set()
        self._reported: dict[int, MemoryRange] = {}
        self._replaced = Replaced()
        self._alike: Callable[[], list[bool]] = list

    def watch(self, module: nn.Module) -> None:
        """Find the blocks of a new module that kernels write to without moving a version, such as
        batch norm's running means: all without parameters.
        """
        parameters, tensors = {id(p) for p in module.parameters()}, self._tensors.tensors
        specs = self._tensors.layout.specs.items()
        found = {spec.block for slot, spec in specs if id(tensors[slot]) not in parameters}
        self._unversioned = sorted(found)
        self._watch_buffers()

    def watch_again(self, anew: Collection[int]) -> None:
        """Note that some blocks were given other memory."""
        if not self.buffers.blocks.isdisjoint(anew):
            self._unversioned = sorted({*self._unversioned, *self.buffers.blocks})
            self._watch_buffers()

    def _watch_buffers(self) -> None:
        """Begin to compare the small blocks that kernels write to without moving a version."""
        self.buffers = Buffers(self._tensors.memory, self._unversioned, self._device)
        self._unversioned = [
            block for block in self._unversioned if block not in self.buffers.blocks
        ]

    def keep(self, update: StateUpdate, graphs_alive: bool) -> set[int]:
        """The blocks that hold the driver's new contents already, because this replica reported
        them.
        """
        self._take_answers()
        kept = self.buffers.keep(update.report, update.kept)
        coming = kept.union(*[blob.blocks for blob in update.blobs]) & self.buffers.blocks
        # blocks that the update overwrites need not be undone before
        if not graphs_alive and coming:
            self.dirty -= coming.difference(self._spoiled_blocks(coming))
        return kept

    def _spoiled_blocks(self, chosen: Collection[int]) -> set[int]:
        """The blocks among those chosen with tensors that cannot be used again."""
        tensors = self._tensors
        if not self._replaced.slots and all(map(_leaf, tensors.tensors.values())):
            return set()
        return {
            block
            for block in chosen
            if any(tensors.is_spoiled(slot) for slot in tensors.layout.members[block])
        }

    def take(self) -> set[int]:
        """Forget what was written and reported; returns the blocks that do not have the driver's
        bytes.
        """
        self._take_answers()
        dirty, self.dirty = self.dirty, set()
        self._reported.clear()
        self._replaced.clear()
        return dirty

    def settle(self) -> None:
        """Begin a forward: all blocks have the driver's bytes."""
        self._tensors.row.settle()
        self.buffers.settle()
        self._fresh = set()

    def pass_over(self) -> None:
        """Drop the record of the last forward: this chunk's writes are not reported."""
        self._take_answers()
        self.buffers.forget_report()
        self._fresh = set()

    def note(self, touched: Accessed | None = None) -> None:
        """Find what was written to, after a forward, or after a checkpoint ran the module in
        backward.
        """
        tensors = self._tensors
        self._take_answers()
        self._moved, self._fresh = tensors.row.moved(), set()
        # A tensor that shows other memory has another version or address, or its ``.data`` was
        # accessed.
        doubtful: Collection[int] = tensors.layout.specs
        if not touched:
            doubtful = tensors.row.elsewhere()
            moved = tuple(self._moved.difference(doubtful))
            if not self._replaced.lie_as_said(moved, tensors.tensors, tensors.layout.specs):
                doubtful = self._moved.union(doubtful)
        self._replaced.slots = {slot for slot in doubtful if tensors.shows_other(slot)}
        if self._owned.blocks and self._replaced.slots:
            self._replaced.slots -= self._owned.moved_alike(self._replaced.slots)
        written = tensors.layout.blocks_of(self._moved | self._replaced.slots)
        if touched:
            accessed = {block for block in tensors.memory if tensors.address(block) in touched}
            written.update(accessed - self._owned.blocks)
            self.dirty |= self._owned.take_back(accessed & self._owned.blocks - written, touched)
        self.dirty |= written
        self._fresh = written - self.buffers.blocks
        # A GPU begins to compare now; its answer is read after the outputs were sent.
        self.buffers.look()
        if self._unversioned:
            self._alike = devices.compare(
                [(tensors.read(b), tensors.memory[b].driver()) for b in self._unversioned]
            )

    def _take_answers(self) -> None:
        """Take the answers of the comparisons: the blocks that were written without a version."""
        answers, self._alike = self._alike(), list
        written = {
            block for block, alike in zip(self._unversioned, answers, strict=False) if not alike
        }
        written |= self.buffers.written()
        self._fresh |= written
        self.dirty |= written

    def written(self, lasts: Callable[[Tensor], bool]) -> Written | None:
        """What the module changed in place since it last began to run; None if nothing.

        Args:
            lasts: Whether a tensor that was given other memory is reported too.
        """
        tensors = self._tensors
        looked = self.buffers.looking
        self._take_answers()
        lasting = {slot for slot in self._replaced.slots if lasts(tensors.tensors[slot])}
        changed = sorted(self._fresh & self.buffers.blocks)
        others = self._changed_besides(sorted(self._fresh - self.buffers.blocks))
        self._fresh = set()
        replaced = self._replaced.news(
            sorted(lasting), tensors.tensors, tensors.layout.specs, tensors.memory
        )
        members = [
            slot
            for block in (*changed, *others)
            for slot in tensors.layout.members[block]
            if slot not in lasting
        ]
        slots = [(slot, slot in self._moved) for slot in (*members, *replaced)]
        if looked:
            self.buffers.likely = ()
        if not slots:
            return None
        together = tuple(self.buffers.together(changed))
        if looked and not others:
            self.buffers.likely = together
        contents = self._contents(together, others)
        return Written(
            report=self.buffers.report(together),
            slots=tuple(slots),
            contents=contents,
            replaced=tuple(replaced),
            tensors=tuple([tensors.tensors[slot].detach() for slot in replaced]),
        )

    def guess(self) -> Contents | None:
        """What the module wrote to, if it is what it wrote to the last time; None if nothing was,
        or if that is known already. It is sent while a GPU still compares: `written` would have to
        wait for that, and the answer for what it sends.
        """
        if devices.is_cpu(self._device) or not self.buffers.looking or not self.buffers.likely:
            return None
        return self._contents(self.buffers.likely, ())

    def _contents(self, together: Sequence[int], others: Sequence[int]) -> Contents:
        """What the module left in small buffers that were compared together, and other blocks."""
        offsets, pieces, end = self.buffers.packed(together)
        alone = [self._tensors.read(block) for block in others]
        further, size = packed([piece.size for piece in alone])
        pieces += [(piece, end + at) for piece, at in zip(alone, further, strict=True)]
        sizes = [self._tensors.memory[block].tensor.nbytes for block in (*together, *others)]
        places = (*offsets, *[end + at for at in further])
        blob = Blob((*together, *others), places, tuple(sizes), b"")
        ranges, starts = zip(*pieces, strict=True) if pieces else ((), ())
        return Contents(blob, ranges, starts, end + size)

    def _changed_besides(self, chosen: Sequence[int]) -> list[int]:
        """The blocks among those chosen that differ from the last report; they count as reported
        from now on.
        """
        tensors = self._tensors
        pairs = [
            (tensors.read(b), self._reported.get(b) or tensors.memory[b].driver()) for b in chosen
        ]
        answers = zip(chosen, devices.compare(pairs)(), strict=True)
        changed = [block for block, alike in answers if not alike]
        self._reported.update((block, devices.copied(tensors.read(block))) for block in changed)
        return changed
