"""The replica's side: a module that is, at the start of each forward, what the driver's master copy
is.

What a forward does to its module is undone before the next one: attributes are put back
(`PythonState.restore`), and blocks that were written to get the driver's bytes again. Where a graph
is still alive that may have saved the old tensor, the block gets new tensors instead, so that the
graph keeps what it saw.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from raydp_parallel import devices
from raydp_parallel.devices.ranges import MemoryRange
from raydp_parallel.state import block_layout, module_sources, replica_memory, structure
from raydp_parallel.state.flat_layout import packed
from raydp_parallel.state.held_tensors import Held
from raydp_parallel.state.module_buffers import Buffers
from raydp_parallel.state.python_state import PythonState
from raydp_parallel.state.raw_access import RawAccess
from raydp_parallel.state.replaced_memory import Replaced, shows_other
from raydp_parallel.state.replica_memory import BlockMemory, BlockSource
from raydp_parallel.state.versions import TensorRow
from raydp_parallel.transport import codec
from raydp_parallel.transport.links import Attachments, InlineLink
from raydp_parallel.transport.messages import Blob, SlotSpec, StateUpdate, Structure

_flag = attrgetter("requires_grad")
_leaf = attrgetter("is_leaf")

_HOLDERS = ("_parameters", "_buffers", "_modules")
"""What of a module's attributes is not a user's to rebind."""


class Written(NamedTuple):
    """What a forward changed in place.

    Attributes:
        report: The report's number.
        slots: The slots, with whether their version moved.
        blob: The blocks that they lie in, without a packet yet.
        pieces: What is to be put into the packet.
        starts: Where each piece goes.
        size: Bytes of the packet.
        replaced: Those of the slots that were given other memory.
        tensors: These, as they are now.
    """

    report: int
    slots: tuple[tuple[int, bool], ...]
    blob: Blob
    pieces: Sequence[MemoryRange]
    starts: Sequence[int]
    size: int
    replaced: tuple[int, ...]
    tensors: tuple[Tensor, ...]


class ReplicaModule:
    """One model's replica.

    Args:
        device: Where it lives.

    Attributes:
        module: The module as it is to run next; one that was made before it may live on in graphs.
        revision: What it holds of the driver's, 0 for nothing.
        held: The tensors that the module holds.
    """

    def __init__(self, device: torch.device) -> None:
        self.module: nn.Module = nn.Module()
        self.revision = 0
        self._device = device
        self._python_state = PythonState()
        self.held = Held(self._python_state, {})
        self._structure = b""
        self._outdated = False
        self._edits: dict[tuple[int, str], Any] = {}
        self._modules: list[nn.Module] = []
        self._specs: dict[int, SlotSpec] = {}
        self._slots: dict[int, Tensor] = {}
        self._flags: dict[int, bool] = {}
        self._members: dict[int, list[int]] = {}
        self._memory: dict[int, BlockMemory] = {}
        self._unversioned: list[int] = []
        self._buffers = Buffers({}, (), device)
        self._row = TensorRow({})
        self._moved: set[int] = set()
        self._fresh: set[int] = set()
        self._dirty: set[int] = set()
        self._reported: dict[int, MemoryRange] = {}
        self._replaced = Replaced()
        self._alike: Callable[[], list[bool]] = list

    def prepare(
        self, update: StateUpdate | None, attachments: Attachments, graphs_alive: bool
    ) -> None:
        """Undo what the last forward left, and adopt what changed in the driver."""
        kept = (
            self._keep(update, graphs_alive)
            if update is not None and update.structure is None
            else set()
        )
        if self.revision:
            self._undo(graphs_alive)
        if update is not None:
            if update.structure is not None or update.blobs or update.edits or update.flags:
                self._adopt(update, attachments, graphs_alive, kept)
            self._row.bump(update.bumped)
            self.revision = update.revision
        self._restore_flags()
        self._row.settle()
        self._buffers.settle()
        self._fresh = set()

    def _keep(self, update: StateUpdate, graphs_alive: bool) -> set[int]:
        """The blocks that hold the driver's new contents already, because this replica reported
        them.
        """
        self._hear()
        kept = self._buffers.keep(update.report, update.kept)
        coming = kept.union(*[blob.blocks for blob in update.blobs]) & self._buffers.blocks
        # what is going to be written over need not be undone before
        if not graphs_alive and coming:
            self._dirty -= coming.difference(self._spoiled_blocks(coming))
        return kept

    def overlay(self, slots: Sequence[int], tensors: Sequence[Tensor], graphs_alive: bool) -> None:
        """Show some slots as they were, until what the next forward leaves is undone."""
        chosen = {self._specs[slot].block for slot in slots}
        if graphs_alive and chosen and not self._renew(chosen):
            self._load()
        for slot, tensor in zip(slots, tensors, strict=True):
            self._shown(slot).copy_(tensor)
        self._dirty |= chosen
        self._row.settle()

    def pass_over(self) -> None:
        """Nobody asks what was written."""
        self._hear()
        self._buffers.forget_report()
        self._fresh = set()

    def import_anew(self) -> None:
        """Make the module anew before its next forward: the modules that its classes came from were
        dropped.
        """
        self._outdated = True

    def _undo(self, graphs_alive: bool) -> None:
        restored = self._python_state.restore() and not self._outdated
        if not self._restore_blocks(graphs_alive) or not restored:
            self._load()

    def leaves(self) -> list[Tensor]:
        """The tensors that may receive gradients, by slot."""
        return [tensor for _, tensor in sorted(self._slots.items()) if tensor.requires_grad]

    def tensors(self) -> dict[int, Tensor]:
        """The tensors as they are now, by slot: later ones may take their places while a graph
        keeps these.
        """
        return dict(self._slots)

    def settle(self) -> None:
        """From now on it is asked what is written to after this."""
        self._row.settle()

    def stirred(self, touched: Collection[int]) -> bool:
        """Whether a version moved since, or somebody reached for the memory of a block."""
        return self._row.stirred() or (
            bool(touched) and any(self._address(b) in touched for b in self._memory)
        )

    def hold_own(self) -> None:
        """Let the module hold what it did before a backward let it hold what a graph's forward had
        left.
        """
        if not self.held.holds(self._slots) and not self.held.replace(self._slots):
            self._load()

    def running(self) -> _Running:
        """Watch what the module writes to, for a block."""
        return _Running(self)

    def written(self, lasts: Callable[[Tensor], bool]) -> Written | None:
        """What the module changed in place since it last began to run, None if nothing.

        Args:
            lasts: Whether it is reported, too, if a tensor was given other memory.
        """
        self._hear()
        lasting = {slot for slot in self._replaced.slots if lasts(self._slots[slot])}
        changed = sorted(self._fresh & self._buffers.blocks)
        others = self._changed_besides(sorted(self._fresh - self._buffers.blocks))
        self._fresh = set()
        replaced = self._replaced.news(sorted(lasting), self._slots, self._specs, self._memory)
        members = [
            slot
            for block in (*changed, *others)
            for slot in self._members[block]
            if slot not in lasting
        ]
        slots = [(slot, slot in self._moved) for slot in (*members, *replaced)]
        if not slots:
            return None
        together = self._buffers.together(changed)
        offsets, pieces, end = self._buffers.packed(together)
        alone = [self._bytes(block) for block in others]
        further, size = packed([piece.size for piece in alone])
        pieces += [(piece, end + at) for piece, at in zip(alone, further, strict=True)]
        sizes = [len(self._memory[block].tensor) for block in (*together, *others)]
        return Written(
            report=self._buffers.report(together),
            slots=tuple(slots),
            blob=Blob(
                (*together, *others), (*offsets, *[end + at for at in further]), tuple(sizes), b""
            ),
            pieces=[piece for piece, _ in pieces],
            starts=[start for _, start in pieces],
            size=end + size,
            replaced=tuple(replaced),
            tensors=tuple([self._slots[slot].detach() for slot in replaced]),
        )

    def _changed_besides(self, chosen: Sequence[int]) -> list[int]:
        """Those of some other blocks that are not as they were reported last; they are from
        now on.
        """
        pairs = [
            (self._bytes(b), self._reported.get(b) or self._memory[b].driver()) for b in chosen
        ]
        answers = zip(chosen, devices.compare(pairs)(), strict=True)
        changed = [block for block, alike in answers if not alike]
        self._reported.update((block, devices.copied(self._bytes(block))) for block in changed)
        return changed

    def rebound(self) -> tuple[tuple[int, str, Any], ...]:
        """The attributes and buffers that the last forward gave new values: which module's, name,
        value.
        """
        if not self._python_state.attributes_changed():
            return ()
        owners = [
            attributes for module in self._modules for attributes in (vars(module), module._buffers)
        ]
        found = self._python_state.news(owners)
        return tuple((at // 2, name, value) for at, name, value in found if name not in _HOLDERS)

    def _shown(self, slot: int) -> Tensor:
        # What lies in the block, also where a tensor was given other memory that does not last.
        return block_layout.build(
            self._specs[slot], self._memory[self._specs[slot].block].tensor
        ).detach()

    def note(self, touched: Collection[int] = ()) -> None:
        """See what was written to. Not only in forward: a checkpoint runs modules again in
        backward.
        """
        self._hear()
        self._moved, self._fresh = self._row.moved(), set()
        # A tensor that shows other memory has another version or address, or somebody asked for its
        # ``.data``.
        doubtful = self._specs if touched else self._moved | self._row.elsewhere()
        self._replaced.slots = {slot for slot in doubtful if self._shows_other(slot)}
        written = {self._specs[slot].block for slot in self._moved | self._replaced.slots}
        if touched:
            written.update(block for block in self._memory if self._address(block) in touched)
        self._dirty |= written
        self._fresh = written - self._buffers.blocks
        # A GPU begins to compare now, and is asked for its answer when the outputs are on their
        # way.
        self._buffers.look()
        self._alike = devices.compare(
            [(self._bytes(b), self._memory[b].driver()) for b in self._unversioned]
        )

    def _hear(self) -> None:
        """Take up which of the blocks that kernels write to without telling were written to."""
        answers, self._alike = self._alike(), list
        written = {
            block for block, alike in zip(self._unversioned, answers, strict=False) if not alike
        }
        written |= self._buffers.hear()
        self._fresh |= written
        self._dirty |= written

    def _shows_other(self, slot: int) -> bool:
        return shows_other(
            self._slots[slot], self._specs[slot], self._address(self._specs[slot].block)
        )

    def _address(self, block: int) -> int:
        return self._memory[block].tensor.data_ptr()

    def _bytes(self, block: int) -> MemoryRange:
        return devices.piece(self._memory[block].tensor)

    def _restore_blocks(self, graphs_alive: bool) -> bool:
        """Give what was written to the driver's bytes. False if the module still holds tensors that
        were replaced.
        """
        self._hear()
        dirty, self._dirty = self._dirty, set()
        self._reported.clear()
        self._replaced.clear()
        if not dirty:
            return True
        if graphs_alive or any(
            self._spoiled(slot) for block in dirty for slot in self._members[block]
        ):
            return self._renew(dirty)
        for block in dirty:
            self._memory[block].refresh()
        return True

    def _spoiled_blocks(self, chosen: Collection[int]) -> set[int]:
        """Those of some blocks whose tensors are of no more use."""
        if not self._replaced.slots and all(map(_leaf, self._slots.values())):
            return set()
        return {
            block for block in chosen if any(self._spoiled(slot) for slot in self._members[block])
        }

    def _lies_flat(self, block: int, source: BlockSource) -> bool:
        """Whether new contents go where the small buffers' are, and are no window on the driver's
        memory.
        """
        return block in self._buffers.blocks and source.window(self._device) is None

    def _spoiled(self, slot: int) -> bool:
        """Whether a tensor itself is of no more use: it shows other memory, or became part of a
        graph.
        """
        return self._shows_other(slot) or not self._slots[slot].is_leaf

    def _restore_flags(self) -> None:
        if [*map(_flag, self._slots.values())] == [*self._flags.values()]:
            return
        for slot, tensor in self._slots.items():
            if tensor.requires_grad != self._flags[slot]:
                tensor.requires_grad_(self._flags[slot])

    def _renew(self, chosen: Collection[int]) -> bool:
        """Give blocks other memory, which holds the driver's bytes, and new tensors over it."""
        for block in chosen:
            self._memory[block] = self._memory[block].renewed()
        return self._rebuild(chosen)

    def _rebuild(self, chosen: Collection[int]) -> bool:
        """Give blocks new tensors, in every place of the module that can be reached."""
        for block in chosen:
            for slot in self._members[block]:
                old = self._slots[slot]
                spec = self._specs[slot]
                spec = spec._replace(tensor=spec.tensor._replace(requires_grad=self._flags[slot]))
                new = block_layout.build(spec, self._memory[block].tensor)
                vars(new).update(vars(old))
                self._slots[slot] = new
        self._row = TensorRow({slot: self._slots[slot] for slot in self._specs})
        return self.held.replace(self._slots)

    def _build(self, new: Structure, sources: dict[int, BlockSource]) -> None:
        """Make the tensors of a new structure; those that are here stay where they still fit."""
        module_sources.follow(new.origins)
        members = _members(new.slots)
        kept = {block for block, slots in members.items() if self._keeps(block, slots, new)}
        self._memory = {
            block: self._memory[block]
            if block in kept
            else replica_memory.make(sources.pop(block), self._device)
            for block in new.block_sizes
        }
        self._slots = {
            slot: self._slots[slot]
            if spec.block in kept
            else block_layout.build(spec, self._memory[spec.block].tensor)
            for slot, spec in new.slots.items()
        }
        self._specs, self._members = new.slots, members
        if new.specials is not None:
            slots, parcel = new.specials
            self._slots.update(
                zip(
                    slots,
                    codec.unpack(parcel, Attachments(InlineLink()), self._device),
                    strict=True,
                )
            )
        self._flags = {slot: tensor.requires_grad for slot, tensor in self._slots.items()}
        self._flags.update((slot, spec.tensor.requires_grad) for slot, spec in new.slots.items())
        self._restore_flags()
        self._row = TensorRow({slot: self._slots[slot] for slot in self._specs})
        self._structure = new.module
        self._edits.clear()

    def _load(self) -> None:
        """Make the module of its structure, around the tensors that are here."""
        self.module = structure.load(self._structure, self._slots, self._device)
        self._outdated = False
        self._modules = [*self.module.modules()]
        for module in self._modules:
            vars(module)["_is_replica"] = True
        for (index, name), value in self._edits.items():
            vars(self._modules[index])[name] = value
        self._python_state = structure.survey(self.module)
        self.held = Held(self._python_state, self._slots)
        self._unversioned = _unversioned(self.module, self._specs, self._slots)
        self._watch_buffers()

    def _watch_buffers(self) -> None:
        """Begin to look at the small blocks that kernels write to without telling."""
        self._buffers = Buffers(self._memory, self._unversioned, self._device)
        self._unversioned = [
            block for block in self._unversioned if block not in self._buffers.blocks
        ]

    def _keeps(self, block: int, slots: list[int], new: Structure) -> bool:
        """Whether the tensors of a block fit the new structure as they are."""
        return (
            self._members.get(block) == slots
            and new.block_sizes[block] == len(self._memory[block].tensor)
            and all(_flagless(new.slots[s]) == _flagless(self._specs[s]) for s in slots)
        )

    def _adopt(
        self, update: StateUpdate, attachments: Attachments, graphs_alive: bool, kept: set[int]
    ) -> None:
        """Take up more than that versions moved, and than what is ``kept`` because it is here."""
        sources = _sources(update, attachments, self._device, kept)
        if update.structure is not None:
            self._build(update.structure, sources)
        self._flags.update(update.flags)
        # New contents that come with a new version are for torch's check to find, as after an
        # optimizer's step. Those that come without are new memory in the driver (``p.data = q``),
        # where graphs keep the old.
        untold = set()
        if graphs_alive and sources:
            untold = sources.keys() - {
                self._specs[slot].block for slot in update.bumped if slot in self._specs
            }
        flat = (
            {b: s for b, s in sources.items() if self._lies_flat(b, s)}
            if update.structure is None
            else {}
        )
        self._buffers.adopt(flat)
        others = {b: source for b, source in sources.items() if b not in flat}
        plain = {b: s for b, s in others.items() if b not in untold and self._memory[b].takes(s)}
        replica_memory.adopt(self._memory, plain)
        anew = [block for block in others if block not in plain]
        for block in anew:
            self._memory[block] = replica_memory.make(sources[block], self._device)
        for block in untold & flat.keys():
            self._memory[block] = self._memory[block].renewed()
        reached = self._rebuild([*anew, *(untold & flat.keys())]) if anew or untold else True
        if update.structure is None and not self._buffers.blocks.isdisjoint(anew):
            self._unversioned = sorted({*self._unversioned, *self._buffers.blocks})
            self._watch_buffers()
        if update.structure is not None or not reached:
            self._load()  # not before its tensors are filled: a generator's state is one of them
        if not graphs_alive:
            self.held.forget_edits()
        for index, name, value in update.edits:
            self._edits[index, name] = value
            self.held.edit(self._modules[index], name, value)
            self._python_state.accept(self._modules[index], name, value)
        if update.edits:
            self._python_state.settle()


class _Running(RawAccess):
    """Watches what a module writes to."""

    def __init__(self, replica_module: ReplicaModule) -> None:
        self._replica_module = replica_module

    def __exit__(self, *error: object) -> None:
        touched = self.touched
        super().__exit__(*error)
        self._replica_module.note(touched)


def _sources(
    update: StateUpdate, attachments: Attachments, device: torch.device, besides: set[int]
) -> dict[int, BlockSource]:
    """Where the bytes of each block are that an update brings, ``besides`` some."""
    found: dict[int, BlockSource] = {}
    for blob in update.blobs:
        if besides and besides >= {*blob.blocks}:
            continue
        near = (
            None if devices.is_cpu(device) else devices.near(attachments.open(blob.packet), device)
        )
        for block, offset, size in zip(blob.blocks, blob.offsets, blob.sizes, strict=True):
            if block not in besides:
                found[block] = BlockSource(attachments, blob.packet, offset, size, near)
    return found


def _unversioned(
    module: nn.Module, specs: dict[int, SlotSpec], slots: dict[int, Tensor]
) -> list[int]:
    """Blocks that kernels write to without telling, such as batch norm's running means: all but
    parameters.
    """
    parameters = {id(p) for p in module.parameters()}
    return sorted({spec.block for slot, spec in specs.items() if id(slots[slot]) not in parameters})


def _members(specs: dict[int, SlotSpec]) -> dict[int, list[int]]:
    members: dict[int, list[int]] = {}
    for slot, spec in sorted(specs.items()):
        members.setdefault(spec.block, []).append(slot)
    return members


def _flagless(spec: SlotSpec) -> SlotSpec:
    return spec._replace(tensor=spec.tensor._replace(requires_grad=False))
