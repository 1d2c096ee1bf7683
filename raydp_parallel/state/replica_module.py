"""The replica's side: a module that begins each forward in the state of the master.

What a forward did to the module is undone before the next one: attributes are restored
(`PythonState.restore`), and blocks that were written to get the driver's bytes again. If a graph is
still alive that may have saved the old tensor, the block gets new tensors instead, so that the
graph keeps its values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import repeat
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from raydp_parallel import devices
from raydp_parallel.devices.ranges import Attachment, MemoryRange
from raydp_parallel.state import block_layout, module_sources, replica_memory, structure
from raydp_parallel.state.block_layout import packed
from raydp_parallel.state.python_state import Held, PythonState, StateVisitor
from raydp_parallel.state.replica_memory import (
    BlockMemory,
    BlockSource,
    Buffers,
    Packet,
    Replaced,
    shows_other,
)
from raydp_parallel.state.versions import Accessed, RawAccess, TensorRow
from raydp_parallel.transport import codec
from raydp_parallel.transport.links import Attachments, InlineLink
from raydp_parallel.transport.messages import Blob, SlotSpec, StateUpdate, Structure

_flag = attrgetter("requires_grad")
_leaf = attrgetter("is_leaf")
_new_source: Any = partial(tuple.__new__, BlockSource)

_HOLDERS = ("_parameters", "_buffers", "_modules")
"""The attributes of a module that users do not rebind."""


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


class ReplicaModule:
    """One model's replica.

    Args:
        device: Its device.

    Attributes:
        module: The module for the next forward; graphs may keep an earlier one alive.
        revision: The revision of the master that it holds, 0 for none.
        held: The tensors that the module holds.
        owned: The blocks of parameters that an optimizer of this replica trains: the driver's
            bytes of them are not taken over.
    """

    def __init__(self, device: torch.device) -> None:
        self.module: nn.Module = nn.Module()
        self.revision = 0
        self._device = device
        self._python_state = PythonState(StateVisitor())
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
        self._untouched = False
        self._alike: Callable[[], list[bool]] = list
        self.owned: set[int] = set()
        self._refused: set[int] = set()
        self._blank: set[int] = set()
        self._compiled: tuple[nn.Module, Mapping[str, Any], Callable[..., Any]] | None = None

    def prepare(
        self, update: StateUpdate | None, attachments: Attachments, graphs_alive: bool
    ) -> None:
        """Undo what the last forward changed, and adopt what changed in the driver."""
        self._refused.clear()
        kept: set[int] = set()
        if update is not None and update.structure is None:
            kept = self._keep(update, graphs_alive)
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
        self._take_answers()
        kept = self._buffers.keep(update.report, update.kept)
        coming = kept.union(*[blob.blocks for blob in update.blobs]) & self._buffers.blocks
        # blocks that the update overwrites need not be undone before
        if not graphs_alive and coming:
            self._dirty -= coming.difference(self._spoiled_blocks(coming))
        return kept

    def overlay(self, slots: Sequence[int], tensors: Sequence[Tensor], graphs_alive: bool) -> None:
        """Give some slots earlier contents for the next forward; undoing that forward ends it."""
        chosen = {self._specs[slot].block for slot in slots}
        if graphs_alive and chosen and not self._renew(chosen):
            self._load()
        for slot, tensor in zip(slots, tensors, strict=True):
            self._shown(slot).copy_(tensor)
        self._dirty |= chosen
        self._row.settle()

    def pass_over(self) -> None:
        """Drop the record of writes: this chunk's are not reported."""
        self._take_answers()
        self._buffers.forget_report()
        self._fresh = set()

    def import_anew(self) -> None:
        """Build the module anew before the next forward: modules of its classes were unloaded."""
        self._outdated = True

    def look_ahead(self) -> None:
        """Find out whether the next forward has attributes to restore, while there is no call."""
        self._untouched = not (self._python_state.changed() or self._python_state.deep_changed())

    def distrust(self) -> None:
        """Forget what `look_ahead` found: code runs that may change the module."""
        self._untouched = False

    def _undo(self, graphs_alive: bool) -> None:
        restored = (self._untouched or self._python_state.restore()) and not self._outdated
        if not self._restore_blocks(graphs_alive) or not restored:
            self._load()

    def leaves(self) -> list[Tensor]:
        """The tensors that may receive gradients, by slot."""
        return [tensor for _, tensor in sorted(self._slots.items()) if tensor.requires_grad]

    def tensors(self) -> dict[int, Tensor]:
        """The tensors of now, by slot: later ones may replace them while a graph keeps these."""
        return dict(self._slots)

    def own(self, slots: Sequence[int]) -> None:
        """Leave the contents of some slots to an optimizer of this replica."""
        self.owned = {self._specs[slot].block for slot in slots}
        self._dirty -= self.owned
        self._blank -= self.owned

    def check_filled(self) -> None:
        """Raise an error if no optimizer gave contents to blocks that the driver leaves to it."""
        if self._blank:
            raise RuntimeError(
                "the weights of this replica come from an optimizer that it does not have: it "
                "gets both with the next call"
            )

    def overwritten(self) -> list[int]:
        """The slots of owned blocks that the module itself wrote to."""
        found = self._dirty & self.owned | self._refused
        return sorted(slot for block in found for slot in self._members[block])

    @property
    def is_spoiled(self) -> bool:
        """Whether owned blocks have other contents than their optimizer gave them."""
        return not self._dirty.isdisjoint(self.owned)

    def settle(self) -> None:
        """Let `stirred` and `note` consider later writes only."""
        self._row.settle()

    def stirred(self, touched: Collection[int]) -> bool:
        """Whether a version moved since, or Python code accessed the memory of a block."""
        return self._row.stirred() or (
            bool(touched) and any(self._address(b) in touched for b in self._memory)
        )

    def hold_own(self) -> None:
        """Give the module its own tensors back after a backward gave it those of a graph."""
        if not self.held.holds(self._slots) and not self.held.replace(self._slots):
            self._load()

    def compiled(self, settings: Mapping[str, Any]) -> Callable[..., Any]:
        """The module, compiled; again only if it was built anew, or with other settings.

        By default compiled code of a module serves another one that differs by hooks alone.
        """
        found = self._compiled
        if found is None or found[0] is not self.module or found[1] != settings:
            found = self._compiled = self.module, settings, torch.compile(self.module, **settings)
            torch._dynamo.config.skip_nnmodule_hook_guards = False
        return found[2]

    def running(self) -> _Running:
        """Record what the module writes to, in a ``with`` block."""
        return _Running(self)

    def written(self, lasts: Callable[[Tensor], bool]) -> Written | None:
        """What the module changed in place since it last began to run; None if nothing.

        Args:
            lasts: Whether a tensor that was given other memory is reported too.
        """
        looked = self._buffers.looking
        self._take_answers()
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
        if looked:
            self._buffers.likely = ()
        if not slots:
            return None
        together = tuple(self._buffers.together(changed))
        if looked and not others:
            self._buffers.likely = together
        contents = self._contents(together, others)
        return Written(
            report=self._buffers.report(together),
            slots=tuple(slots),
            contents=contents,
            replaced=tuple(replaced),
            tensors=tuple([self._slots[slot].detach() for slot in replaced]),
        )

    def guess(self) -> Contents | None:
        """What the module wrote to, if it is what it wrote to the last time; None if nothing was,
        or if that is known already. It is sent while a GPU still compares: `written` would have to
        wait for that, and the answer for what it sends.
        """
        if devices.is_cpu(self._device) or not self._buffers.looking or not self._buffers.likely:
            return None
        return self._contents(self._buffers.likely, ())

    def _contents(self, together: Sequence[int], others: Sequence[int]) -> Contents:
        """What the module left in small buffers that were compared together, and other blocks."""
        offsets, pieces, end = self._buffers.packed(together)
        alone = [self._bytes(block) for block in others]
        further, size = packed([piece.size for piece in alone])
        pieces += [(piece, end + at) for piece, at in zip(alone, further, strict=True)]
        sizes = [self._memory[block].tensor.nbytes for block in (*together, *others)]
        places = (*offsets, *[end + at for at in further])
        blob = Blob((*together, *others), places, tuple(sizes), b"")
        ranges, starts = zip(*pieces, strict=True) if pieces else ((), ())
        return Contents(blob, ranges, starts, end + size)

    def _changed_besides(self, chosen: Sequence[int]) -> list[int]:
        """The blocks among those chosen that differ from the last report; they count as reported
        from now on.
        """
        pairs = [
            (self._bytes(b), self._reported.get(b) or self._memory[b].driver()) for b in chosen
        ]
        answers = zip(chosen, devices.compare(pairs)(), strict=True)
        changed = [block for block, alike in answers if not alike]
        self._reported.update((block, devices.copied(self._bytes(block))) for block in changed)
        return changed

    def rebound(self) -> tuple[tuple[int, str, Any], ...]:
        """The attributes and buffers that the last forward gave new values: the number of the
        module, name, value.
        """
        if not self._python_state.attributes_changed():
            return ()
        owners = [
            attributes for module in self._modules for attributes in (vars(module), module._buffers)
        ]
        found = self._python_state.news(owners)
        return tuple((at // 2, name, value) for at, name, value in found if name not in _HOLDERS)

    def _shown(self, slot: int) -> Tensor:
        # The contents of the block, even if a tensor was given other memory that does not last.
        spec = self._specs[slot]
        return block_layout.build(spec, self._memory[spec.block].tensor).detach()

    def watched(self) -> dict[int, MemoryRange]:
        """The blocks that an optimizer trains, by their addresses: nothing else has their contents,
        so that what accesses them is compared with a copy of its own.
        """
        return {self._address(block): self._bytes(block) for block in self.owned}

    def note(self, touched: Accessed | None = None) -> None:
        """Find what was written to, after a forward, or after a checkpoint ran the module in
        backward.
        """
        self._take_answers()
        self._moved, self._fresh = self._row.moved(), set()
        # A tensor that shows other memory has another version or address, or its ``.data`` was
        # accessed.
        doubtful: Collection[int] = self._specs
        if not touched:
            doubtful = self._row.elsewhere()
            moved = tuple(self._moved.difference(doubtful))
            if not self._replaced.lie_as_said(moved, self._slots, self._specs):
                doubtful = self._moved.union(doubtful)
        self._replaced.slots = {slot for slot in doubtful if self._shows_other(slot)}
        if self.owned and self._replaced.slots:
            self._replaced.slots -= self._moved_alike()
        written = {self._specs[slot].block for slot in self._moved | self._replaced.slots}
        if touched:
            accessed = {block for block in self._memory if self._address(block) in touched}
            written.update(accessed - self.owned)
            self._take_back(accessed & self.owned - written, touched)
        self._dirty |= written
        self._fresh = written - self._buffers.blocks
        # A GPU begins to compare now; its answer is read after the outputs were sent.
        self._buffers.look()
        if self._unversioned:
            self._alike = devices.compare(
                [(self._bytes(b), self._memory[b].driver()) for b in self._unversioned]
            )

    def _take_back(self, blocks: Collection[int], touched: Accessed) -> None:
        """Undo what code wrote to blocks that an optimizer trains, as it got at their memory."""
        only_read = touched.only_read()
        for block in blocks:
            before = touched.before(self._address(block))
            if before is None:
                self._dirty.add(block)
            elif self._address(block) not in only_read:
                devices.load(self._memory[block].tensor, before)
                self._refused.add(block)

    def _take_answers(self) -> None:
        """Take the answers of the comparisons: the blocks that were written without a version."""
        answers, self._alike = self._alike(), list
        written = {
            block for block, alike in zip(self._unversioned, answers, strict=False) if not alike
        }
        written |= self._buffers.written()
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
        """Fill written blocks with the driver's bytes. False if the module still holds tensors that
        were replaced.
        """
        self._take_answers()
        dirty, self._dirty = self._dirty, set()
        self._reported.clear()
        self._replaced.clear()
        if not dirty:
            return True
        if graphs_alive or not self._point_back(dirty):
            return self._renew(dirty)
        replica_memory.refresh([self._memory[block] for block in dirty])
        return True

    def _point_back(self, chosen: Collection[int]) -> bool:
        """Let tensors that forward gave other memory show their blocks again; False if one of them
        has to be made anew.

        On CUDA `flatten_parameters()` gives the weights of a recurrent net other memory in each
        forward. What holds these tensors, as lists and weak references do, then still does.
        """
        for block in chosen:
            whole = self._memory[block].tensor
            if whole.untyped_storage().nbytes() != whole.nbytes:  # a tensor was resized in place
                return False
            for slot in self._members[block]:
                if not self._slots[slot].is_leaf:
                    return False
                if self._shows_other(slot):
                    try:
                        self._slots[slot].data = self._shown(slot)
                    except RuntimeError:  # it became a tensor of another kind
                        return False
        return True

    def _moved_alike(self) -> set[int]:
        """Give tensors of owned blocks their memory back, if the forward that gave them other
        memory left the values as they were; returns their slots.
        """
        chosen = [
            slot
            for slot in sorted(self._replaced.slots)
            if self._specs[slot].block in self.owned and self._slots[slot].is_leaf
        ]
        shown = {slot: self._shown(slot) for slot in chosen}
        pairs = {
            slot: (devices.piece(now.detach()), devices.piece(shown[slot]))
            for slot in chosen
            if (now := self._slots[slot]).is_contiguous()
            and (now.shape, now.dtype, now.stride())
            == (shown[slot].shape, shown[slot].dtype, shown[slot].stride())
        }
        alike = devices.compare([*pairs.values()])()
        found = {slot for slot, same in zip(pairs, alike, strict=True) if same}
        for slot in found:
            self._slots[slot].data = shown[slot]
        return found

    def _spoiled_blocks(self, chosen: Collection[int]) -> set[int]:
        """The blocks among those chosen with tensors that cannot be used again."""
        if not self._replaced.slots and all(map(_leaf, self._slots.values())):
            return set()
        return {
            block for block in chosen if any(self._spoiled(slot) for slot in self._members[block])
        }

    def _lies_flat(self, block: int, source: BlockSource) -> bool:
        """Whether new contents go into the run of small buffers, and are no window on the driver's
        memory.
        """
        return block in self._buffers.blocks and source.window() is None

    def _spoiled(self, slot: int) -> bool:
        """Whether a tensor cannot be used again: it shows other memory, or is part of a graph."""
        return self._shows_other(slot) or not self._slots[slot].is_leaf

    def _restore_flags(self) -> None:
        if [*map(_flag, self._slots.values())] == [*self._flags.values()]:
            return
        for slot, tensor in self._slots.items():
            if tensor.requires_grad != self._flags[slot]:
                tensor.requires_grad_(self._flags[slot])

    def _renew(self, chosen: Collection[int]) -> bool:
        """Give blocks other memory with the driver's bytes, and new tensors over it."""
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
        self._blank = new.block_sizes.keys() - kept - sources.keys()
        lacking = [block for block in new.block_sizes if block not in kept]
        absent = {block: sources.pop(block) for block in lacking if block not in self._blank}
        made = replica_memory.make(absent, self._device)
        for block in self._blank:
            size = new.block_sizes[block]
            made[block] = replica_memory.CopiedMemory(size, self._device, blank=True)
        self._memory = {block: made.get(block) or self._memory[block] for block in new.block_sizes}
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
        """Build the module from its structure, around the present tensors."""
        with codec.loading("module"):
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
        """Begin to compare the small blocks that kernels write to without moving a version."""
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
        """Adopt an update with more than moved versions; blocks in ``kept`` are here already."""
        sources = _sources(update, attachments, self._device, kept)
        if update.structure is not None:
            self._build(update.structure, sources)
        sources = {b: source for b, source in sources.items() if b not in self.owned}
        self._flags.update(update.flags)
        # New contents with a new version must be found by torch's check, as after an optimizer's
        # step. Those without are new memory in the driver (``p.data = q``): graphs keep the old.
        untold = set()
        if graphs_alive and sources:
            bumped = [self._specs[slot].block for slot in update.bumped if slot in self._specs]
            untold = sources.keys() - {*bumped}
        flat: dict[int, BlockSource] = {}
        if update.structure is None:
            flat = {b: s for b, s in sources.items() if self._lies_flat(b, s)}
        self._buffers.adopt(flat)
        others = {b: source for b, source in sources.items() if b not in flat}
        plain = {b: s for b, s in others.items() if b not in untold and self._memory[b].takes(s)}
        replica_memory.adopt(self._memory, plain)
        anew = [block for block in others if block not in plain]
        self._memory.update(
            replica_memory.make({block: sources[block] for block in anew}, self._device)
        )
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
    """Records what a module writes to."""

    def __init__(self, replica_module: ReplicaModule) -> None:
        self._replica_module = replica_module

    def watched(self) -> Callable[[], Mapping[int, MemoryRange]]:
        return self._replica_module.watched

    def __exit__(self, *error: object) -> None:
        touched = self.touched
        super().__exit__(*error)
        self._replica_module.note(touched)


def _sources(
    update: StateUpdate, attachments: Attachments, device: torch.device, besides: set[int]
) -> dict[int, BlockSource]:
    """The places of the bytes of each block in an update, except ``besides``."""
    found: dict[int, BlockSource] = {}
    for blob in update.blobs:
        if besides and besides >= {*blob.blocks}:
            continue
        packet = Packet(attachments, blob.packet, device)
        sources = map(_new_source, zip(repeat(packet), blob.offsets, blob.sizes))
        found.update(zip(blob.blocks, sources, strict=True))
    for block in besides:
        found.pop(block, None)
    return found


def _unversioned(
    module: nn.Module, specs: dict[int, SlotSpec], slots: dict[int, Tensor]
) -> list[int]:
    """Blocks that kernels write to without moving a version, such as batch norm's running means:
    all without parameters.
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
