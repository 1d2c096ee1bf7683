"""What the module of a replica wrote to, and what of that the driver was told.

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

import secrets
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from raydp_parallel import devices
from raydp_parallel.devices.ranges import Attachment, MemoryRange
from raydp_parallel.state import block_layout
from raydp_parallel.state.block_layout import SMALL, UNNAMED, Flat, copy, packed
from raydp_parallel.state.replica_memory import (
    BlockMemory,
    BlockSource,
    CopiedMemory,
    OwnedBlocks,
    Packet,
    ReplicaTensors,
)
from raydp_parallel.state.versions import Accessed
from raydp_parallel.transport import codec
from raydp_parallel.transport.links import Attachments
from raydp_parallel.transport.messages import Blob, SlotSpec, StateUpdate

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
        if self.blocks:
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
        """Whether tensors at their first addresses lie as their specs say. Mostly the same
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
        if not chosen:
            return []
        tensors = self._tensors
        pairs = [
            (tensors.read(b), self._reported.get(b) or tensors.memory[b].driver()) for b in chosen
        ]
        answers = zip(chosen, devices.compare(pairs)(), strict=True)
        changed = [block for block, alike in answers if not alike]
        self._reported.update((block, devices.copied(tensors.read(block))) for block in changed)
        return changed
