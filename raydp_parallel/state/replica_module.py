"""The replica's side: a module that begins each forward in the state of the master.

What a forward did to the module is undone before the next one: attributes are restored
(`BuiltModule.restore`), and blocks that were written to get the driver's bytes again. If a graph is
still alive that may have saved the old tensor, the block gets new tensors instead, so that the
graph keeps its values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn

from raydp_parallel.devices.ranges import MemoryRange
from raydp_parallel.state import module_sources, replica_memory, structure
from raydp_parallel.state.hidden_attributes import HiddenParts
from raydp_parallel.state.module_parts import ModuleParts, PartKey, VainChange, VainChanges
from raydp_parallel.state.python_state import Held, PythonState, StateVisitor
from raydp_parallel.state.replica_memory import BlockSource, OwnedBlocks, Packet, ReplicaTensors
from raydp_parallel.state.shared_objects import ObjectsBefore
from raydp_parallel.state.versions import RawAccess
from raydp_parallel.state.write_record import WriteRecord
from raydp_parallel.transport import codec
from raydp_parallel.transport.links import Attachments
from raydp_parallel.transport.messages import StateUpdate, Structure


class BuiltModule:
    """A module, with the Python state that each forward begins with.

    Args:
        device: Stands where the structure names a GPU.

    Attributes:
        module: The module; graphs may keep an earlier one alive.
        held: The tensors that it holds.
        parts: Its submodules, and the objects of the program that it refers to, by the keys of the
            driver.
        hidden: Its modules with attributes that it does without.
        untold: What forwards changed in vain.
        is_untouched: Whether `look_ahead` found that the next forward has nothing to restore, and
            no code ran since that may change the module.
    """

    def __init__(self, device: torch.device) -> None:
        self._python_state = PythonState(StateVisitor())
        self.module: nn.Module = nn.Module()
        self.held = Held(self._python_state, {})
        self._device = device
        self._structure: Structure | None = None
        self._edits: dict[tuple[int, str], Any] = {}
        self.parts = ModuleParts(())
        self.hidden = HiddenParts((), {}, self._python_state)
        self.untold = VainChanges()
        self._is_outdated = False
        self.is_untouched = False
        self._compiled: tuple[nn.Module, Mapping[str, Any], Callable[..., Any]] | None = None

    def follow(self, new: Structure) -> None:
        """Be built from another structure."""
        self._structure = new
        self._edits.clear()

    def build(self, tensors: dict[int, Tensor]) -> None:
        """Build the module from its structure, around tensors by slot."""
        assert self._structure is not None
        with codec.loading("module"):
            self.module = structure.load(self._structure.module, tensors, self._device)
        self._is_outdated = False
        modules = [*self.module.modules()]
        for module in modules:
            vars(module)["_is_replica"] = True
            _show_parameters(module)
        for (index, name), value in self._edits.items():
            vars(modules[index])[name] = value
        self._python_state = structure.survey(self.module)
        hidden = self._structure.hidden
        self.hidden = HiddenParts(modules, hidden, self._python_state)
        self.parts = ModuleParts(modules, self._python_state, self._structure.objects)
        self.held = Held(self._python_state, tensors)

    def edit(self, edits: Sequence[tuple[int, str, Any]]) -> None:
        """Give attributes the values that they have in the master: the number of the submodule,
        name and value of each.
        """
        for index, name, value in edits:
            self._edits[index, name] = value
            owner = self.parts.modules[index]
            self.held.edit(owner, name, value)
            self.parts.look_again(self._python_state.accept(owner, name, value))
        if edits:
            self._python_state.settle()

    def import_anew(self) -> None:
        """Build the module anew before the next forward: modules of its classes were unloaded."""
        self._is_outdated = True

    def look_ahead(self) -> None:
        """Find out whether the next forward has attributes to restore, if that is not known."""
        if not self.is_untouched:
            state = self._python_state
            self.is_untouched = not (state.changed() or state.deep_changed())

    def restore(self) -> bool:
        """Restore the attributes. False if the module has to be built anew."""

        def note(changed: list[Any]) -> None:
            # The driver has what a forward stored that is followed.
            followed = {} if self.parts.then is None else self.parts.objects
            known = {*map(id, followed.values())}
            lost = [value for value in changed if id(value) not in known]
            if lost:
                self.untold.enter(VainChange.STORED, self.parts.holding(lost))

        self.hidden.keep()
        restored = self.is_untouched or self._python_state.restore(note)
        if restored:
            self.parts.forget_changes()
        return restored and not self._is_outdated

    def changes(
        self, before: ObjectsBefore | None, graphed: Collection[int]
    ) -> tuple[tuple[tuple[int, str, Any], ...], dict[PartKey, Any]]:
        """What the last forward changed.

        Args:
            before: What the objects of attributes held before; None not to look at them.
            graphed: The ids of tensors that it made part of a graph, in place.

        Returns:
            The attributes and buffers that it gave new values, as number of the module, name and
            value, and what objects of attributes hold that it changed, by key.
        """
        self.parts.then = before
        self.look_ahead()
        if self.is_untouched and not graphed:
            return (), {}
        self.untold.enter(VainChange.BUILT, self.parts.grown())
        rebound = self.parts.rebound(graphed)
        changes = before.changes(graphed) if before is not None else {}
        keys = [*self.parts.objects] if changes else []
        told = {(at, name): value for at, name, value in rebound}
        self.parts.report(told, changes.values())
        return (*rebound,), {keys[number]: now for number, now in changes.items()}

    def compiled(self, settings: Mapping[str, Any]) -> Callable[..., Any]:
        """The module, compiled; again only if it was built anew, or with other settings.

        By default compiled code of a module serves another one that differs by hooks alone.
        """
        found = self._compiled
        if found is None or found[0] is not self.module or found[1] != settings:
            found = self._compiled = self.module, settings, torch.compile(self.module, **settings)
            torch._dynamo.config.skip_nnmodule_hook_guards = False
        return found[2]


def _show_parameters(module: nn.Module) -> None:
    """Enter a module's parameters among its attributes, too.

    Upstream's replicas hold them there and nowhere else. Programs know that, and look there for
    what to differentiate by as soon as they find ``_is_replica``, such as adjoints of torchdiffeq:
    without them the parameters got no gradient. The names can be no attribute's, because
    `torch.func.functional_call` gives a module other parameters, and not other attributes.
    """
    if not isinstance(module, torch.jit.ScriptModule):
        found = module._parameters.items()
        vars(module).update({f"parameter {name}": p for name, p in found if p is not None})


_new_source: Any = partial(tuple.__new__, BlockSource)


class ReplicaModule:
    """One model's replica.

    Args:
        device: Its device.

    Attributes:
        revision: The revision of the master that it holds, 0 for none.
        built: The module for the next forward.
        owned: What an optimizer of this replica trains.
        writes: What the module wrote to.
    """

    def __init__(self, device: torch.device) -> None:
        self.revision = 0
        self._device = device
        self._tensors = ReplicaTensors(device)
        self.built = BuiltModule(device)
        self.owned = OwnedBlocks(self._tensors)
        self.writes = WriteRecord(self._tensors, self.owned, device)

    @property
    def module(self) -> nn.Module:
        """The module for the next forward."""
        return self.built.module

    def prepare(
        self, update: StateUpdate | None, attachments: Attachments, graphs_alive: bool
    ) -> None:
        """Undo what the last forward changed, and adopt what changed in the driver."""
        self.owned.refused.clear()
        kept: set[int] = set()
        if update is not None and update.structure is None:
            kept = self.writes.keep(update, graphs_alive)
        if self.revision:
            restored = self.built.restore()
            if not self._restore_blocks(graphs_alive) or not restored:
                self._load()
        if update is not None:
            if update.structure is not None or update.blobs or update.edits or update.flags:
                self._adopt(update, attachments, graphs_alive, kept)
            self._tensors.row.bump(update.bumped)
            self.revision = update.revision
        self._tensors.restore_flags()
        self.writes.settle()

    def overlay(self, slots: Sequence[int], tensors: Sequence[Tensor], graphs_alive: bool) -> None:
        """Give some slots earlier contents for the next forward; undoing that forward ends it."""
        specs = self._tensors.layout.specs
        chosen = {specs[slot].block for slot in slots}
        if graphs_alive and chosen and not self._renew(chosen):
            self._load()
        for slot, tensor in zip(slots, tensors, strict=True):
            self._tensors.shown(slot).copy_(tensor)
        self.writes.dirty |= chosen
        self._tensors.row.settle()

    def leaves(self) -> list[Tensor]:
        """The tensors that may receive gradients, by slot."""
        found = sorted(self._tensors.tensors.items())
        return [tensor for _, tensor in found if tensor.requires_grad]

    def changes(
        self, before: ObjectsBefore | None
    ) -> tuple[tuple[tuple[int, str, Any], ...], dict[PartKey, Any]]:
        """What the last forward changed, see `BuiltModule.changes`."""
        graphed = {id(t) for t in self._tensors.tensors.values() if not t.is_leaf}
        return self.built.changes(before, graphed)

    def known(
        self, before: ObjectsBefore | None = None, changed: Collection[PartKey] = ()
    ) -> dict[int, PartKey]:
        """The keys of what the driver has, too, by id: see `ModuleTracker.known`. Tensors that were
        made part of a graph are others than the driver's.

        Args:
            before: What the objects that the module refers to held before a forward.
            changed: The keys of those that hold something else now.
        """
        parts = self.built.parts
        found: dict[int, PartKey] = {}
        for number, key in enumerate(parts.objects if before is not None and changed else ()):
            if before is not None and key in changed:  # functions, for instance: no copies
                held = {id(value): (*key, place) for place, value in before.held(number)}
                found.update(held)
        found.update({id(part): key for key, part in parts.objects.items()})
        found.update({id(module): (at,) for at, module in enumerate(parts.modules)})
        for slot, tensor in self._tensors.tensors.items():
            if tensor.is_leaf:
                found[id(tensor)] = None, slot
        return found

    def tensors(self) -> dict[int, Tensor]:
        """The tensors of now, by slot: later ones may replace them while a graph keeps these."""
        return dict(self._tensors.tensors)

    def own(self, slots: Sequence[int]) -> None:
        """Leave the contents of some slots to an optimizer of this replica."""
        self.owned.begin(slots)
        self.writes.dirty -= self.owned.blocks

    @property
    def is_spoiled(self) -> bool:
        """Whether owned blocks have other contents than their optimizer gave them."""
        return not self.writes.dirty.isdisjoint(self.owned.blocks)

    def settle(self) -> None:
        """Let `stirred` and `WriteRecord.note` consider later writes only."""
        self._tensors.row.settle()

    def stirred(self, touched: Collection[int]) -> bool:
        """Whether a version moved since, or Python code accessed the memory of a block."""
        tensors = self._tensors
        return tensors.row.stirred() or (
            bool(touched) and any(tensors.address(b) in touched for b in tensors.memory)
        )

    def hold_own(self) -> None:
        """Give the module its own tensors back after a backward gave it those of a graph."""
        held, tensors = self.built.held, self._tensors.tensors
        if not held.holds(tensors) and not held.replace(tensors):
            self._load()

    def running(self) -> _Running:
        """Record what the module writes to, in a ``with`` block."""
        return _Running(self)

    def _restore_blocks(self, graphs_alive: bool) -> bool:
        """Fill written blocks with the driver's bytes. False if the module still holds tensors that
        were replaced.
        """
        dirty = self.writes.take()
        if not dirty:
            return True
        if graphs_alive or not self._tensors.point_back(dirty):
            return self._renew(dirty)
        replica_memory.refresh([self._tensors.memory[block] for block in dirty])
        return True

    def _renew(self, chosen: Collection[int]) -> bool:
        """Give blocks other memory with the driver's bytes, and new tensors over it."""
        memory = self._tensors.memory
        for block in chosen:
            memory[block] = memory[block].renewed()
        return self._rebuild(chosen)

    def _rebuild(self, chosen: Collection[int]) -> bool:
        """Give blocks new tensors, in every place of the module that can be reached."""
        self._tensors.rebuild(chosen)
        return self.built.held.replace(self._tensors.tensors)

    def _load(self) -> None:
        """Build the module from its structure, around the present tensors."""
        self.built.build(self._tensors.tensors)
        self.writes.watch(self.module)

    def _adopt(
        self, update: StateUpdate, attachments: Attachments, graphs_alive: bool, kept: set[int]
    ) -> None:
        """Adopt an update with more than moved versions; blocks in ``kept`` are here already."""
        new, tensors, buffers = update.structure, self._tensors, self.writes.buffers
        sources = _sources(update, attachments, self._device, kept)
        if new is not None:
            module_sources.follow(new.origins)
            self.owned.blank = tensors.build(new, sources)
            self.built.follow(new)
        sources = {b: source for b, source in sources.items() if b not in self.owned.blocks}
        tensors.flags.update(update.flags)
        # New contents with a new version must be found by torch's check, as after an optimizer's
        # step. Those without are new memory in the driver (``p.data = q``): graphs keep the old.
        untold = set()
        if graphs_alive and sources:
            untold = sources.keys() - tensors.layout.blocks_of(update.bumped)
        # small buffers lie in a run, unless they are windows on the driver's memory
        flat: dict[int, BlockSource] = {}
        if new is None:
            inside = {b: source for b, source in sources.items() if b in buffers.blocks}
            flat = {b: source for b, source in inside.items() if source.window() is None}
        buffers.adopt(flat)
        memory = tensors.memory
        others = {b: source for b, source in sources.items() if b not in flat}
        plain = {b: s for b, s in others.items() if b not in untold and memory[b].takes(s)}
        replica_memory.adopt(memory, plain)
        anew = [block for block in others if block not in plain]
        memory.update(replica_memory.make({block: sources[block] for block in anew}, self._device))
        for block in untold & flat.keys():
            memory[block] = memory[block].renewed()
        reached = self._rebuild([*anew, *(untold & flat.keys())]) if anew or untold else True
        if new is None:
            self.writes.watch_again(anew)
        if new is not None or not reached:
            self._load()  # not before its tensors are filled: a generator's state is one of them
        if not graphs_alive:
            self.built.held.forget_edits()
        self.built.edit(update.edits)


class _Running(RawAccess):
    """Records what a module writes to."""

    def __init__(self, replica_module: ReplicaModule) -> None:
        self._replica_module = replica_module

    def watched(self) -> Callable[[], Mapping[int, MemoryRange]]:
        return self._replica_module.owned.watched

    def __exit__(self, *error: object) -> None:
        touched = self.touched
        super().__exit__(*error)
        self._replica_module.writes.note(touched)


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
