"""The driver's side: what of the master changed since each replica last got an update.

Read `python_state.py`'s note on what changed first. Before a forward, `sync` compares what is cheap
to read: identities, versions, addresses, flags. While the replicas run, `verify` compares contents:
edits through `.data` or a NumPy alias move no version. If it finds such an edit, the forward runs
again before its first result was returned.

Each change has a revision. A replica that holds revision 3 gets an update with all that is newer.

`MasterStructure` records all but the contents of tensors, `BlockContents` these, and `StateHistory`
what write-backs overwrote.

[Note: what can be restored]
Between a forward and its backward only write-backs change the master, in most programs: batch
norm's running means, spectral norm's vectors. Each write-back stores the bytes that it overwrites
in the moment before it, and moments form a chain: from a moment one finds all that was overwritten
since. A moment that nothing refers to is garbage, with its bytes.

    moment ──► moment ──► now            overwritten: by the write-back that ended the moment
     looks      looks                    looks:       right before it, and right after

Other changes are found by versions and addresses that do not continue those of the chain, by flags
and structure, and by a comparison with the bytes that were sent. They cannot be restored: then the
replay is refused.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from raydp_parallel.devices.process import number
from raydp_parallel.devices.ranges import Attachment
from raydp_parallel.state import module_sources, structure
from raydp_parallel.state.block_contents import BlockContents
from raydp_parallel.state.block_layout import Specials
from raydp_parallel.state.hidden_attributes import HiddenAttributes
from raydp_parallel.state.module_parts import (
    NEW,
    HookChanges,
    ModuleParts,
    NewObjects,
    PartKey,
    VainChange,
    given,
)
from raydp_parallel.state.python_state import SIMPLE, PythonState, change_reason
from raydp_parallel.state.shared_objects import (
    ObjectContents,
    contents,
    is_hidden,
    is_overtaken,
    refill,
)
from raydp_parallel.state.versions import Look, MasterTensors, unlike
from raydp_parallel.transport.links import Attachments, Link
from raydp_parallel.transport.messages import StateUpdate, Structure, WriteBack

_MISSING = object()


class StateMoment:
    """The time between two write-backs of a master."""

    __slots__ = ("after", "before", "following", "overwritten")

    def __init__(self) -> None:
        self.overwritten: Callable[[], dict[int, Tensor]] = dict
        self.before = Look([], [], [])
        self.after = Look([], [], [])
        self.following: StateMoment | None = None


class Mark(NamedTuple):
    """What a call stores of its module's state.

    Attributes:
        moment: The moment of the call.
        look: The versions, addresses and flags of its tensors.
        disturbed_at: The revision of the last change that versions did not show.
        trained: The last entry in the record of its optimizer in the replicas; 0 without one.
    """

    moment: StateMoment
    look: Look
    disturbed_at: int
    trained: int = 0

    def overwritten(self) -> dict[int, Tensor]:
        """The contents that slots had then, where write-backs have changed them since."""
        found: dict[int, Tensor] = {}
        at: StateMoment | None = self.moment
        while at is not None:
            found = {**at.overwritten(), **found}
            at = at.following
        return found

    def moved(self, now: Look) -> list[int]:
        """The numbers of the tensors that changed since, other than by write-backs, as far as
        versions, addresses and flags show.
        """
        chain, at = [self.look], self.moment
        while at.following is not None:
            chain += [at.before, at.after]
            at = at.following
        chain.append(now)
        found = {*unlike(self.look.flags, now.flags)}
        for one, other in zip(chain[::2], chain[1::2], strict=True):
            found.update(unlike(one.versions, other.versions), unlike(one.pointers, other.pointers))
        return sorted(found)


class StateHistory:
    """The write-backs of one master, and what a forward with one device and its backward changed.

    Args:
        module: The master.

    Attributes:
        moment: The moment of now.
        disturbed_at: The revision of the last change that versions did not show.
        rebound: The attributes that they rebound since the last `sync`, with their values before,
            and so names of code.
        refilled: The objects that they changed, with what these held before.
        set_by_forward: The owners and names of the attributes that the forward rebound.
        news: The objects that they made.
        hidden: Attributes that forwards set before they read them.
    """

    def __init__(self, module: nn.Module) -> None:
        self.moment = StateMoment()
        self.hidden = HiddenAttributes(module)
        self.disturbed_at = 0
        self.rebound: list[tuple[Any, str, Any]] = []
        self.refilled: list[tuple[Any, ObjectContents]] = []
        self.set_by_forward: list[tuple[Any, str]] = []
        self.news = NewObjects()

    def begin(self) -> bool:
        """Begin another forward. Returns whether the last one changed objects in a way that
        identities do not show.
        """
        hidden = any(is_hidden(value) for value, _ in self.refilled)
        self.rebound, self.refilled, self.news = [], [], NewObjects()
        self.set_by_forward = []
        return hidden

    def add(self, overwritten: Callable[[], dict[int, Tensor]], before: Look, after: Look) -> None:
        """End the moment with a write-back."""
        ended, self.moment = self.moment, StateMoment()
        ended.overwritten, ended.before, ended.after = overwritten, before, after
        ended.following = self.moment

    def rebind(self, attributes: Sequence[tuple[Any, str, Any]]) -> None:
        """Set attributes that a forward or backward rebound: owner, name and value of each."""
        known = {(id(owner), name) for owner, name, _ in self.rebound}
        before = _values(attributes)
        self.rebound += [one for one in before if (id(one[0]), one[1]) not in known]
        _set(attributes)

    def refill(self, objects: Sequence[tuple[Any, ObjectContents]]) -> None:
        """Let objects hold what a forward stored in them: object and contents of each."""
        known = {id(value) for value, _ in self.refilled}
        before = [(value, contents(value)) for value, _ in objects if id(value) not in known]
        self.refilled += before
        _refill(objects)

    @contextlib.contextmanager
    def before_rebinding(self) -> Iterator[None]:
        """Give attributes and objects, in the block, what the last forward began with."""
        rebound, refilled, news = self.rebound, self.refilled, self.news
        by_forward = self.set_by_forward
        now, held = _values(rebound), [(value, contents(value)) for value, _ in refilled]
        _set(rebound)
        _refill(refilled)
        self.refilled = []
        try:
            yield
        finally:
            _set(now)
            _refill(held)
            self.rebound, self.refilled, self.news = rebound, refilled, news
            self.set_by_forward = by_forward


def _refill(objects: Sequence[tuple[Any, ObjectContents]]) -> None:
    for value, now in objects:
        refill(value, now)


def _values(attributes: Sequence[tuple[Any, str, Any]]) -> list[tuple[Any, str, Any]]:
    return [(owner, name, getattr(owner, name, _MISSING)) for owner, name, _ in attributes]


def _set(attributes: Sequence[tuple[Any, str, Any]]) -> None:
    for owner, name, value in attributes:
        if value is not _MISSING:
            setattr(owner, name, value)
        elif hasattr(owner, name):
            delattr(owner, name)


class Leaves(NamedTuple):
    """The tensors of the master that may receive gradients, each once.

    Attributes:
        tensors: The tensors.
        kinds: Of each ``"parameter"``, ``"buffer"``, or ``"attribute"`` for one that a plain
            attribute holds.
        others: The numbers of those that are no parameters.
    """

    tensors: list[Tensor]
    kinds: list[str]
    others: list[int]


class MasterStructure:
    """All of one master but the contents of its plain tensors, as it was last recorded.

    Args:
        module: The master.

    Attributes:
        at: The revision that it was recorded at as a whole; later edits have their own.
        size: The bytes of its plain tensors.
        specials: The tensors that are sent inside of it.
        kinds: ``"parameter"`` or ``"buffer"`` for the slots that are one.
        parts: The submodules and the objects that the module refers to, by the keys of replicas.
    """

    def __init__(self, module: nn.Module) -> None:
        self.at = 0
        self.size = 0
        self.specials = Specials({})
        self.kinds: dict[int, str] = {}
        self.parts = ModuleParts(())
        self._module = module
        self._state: PythonState | None = None
        self._bytes = b""
        self._origins = module_sources.NOWHERE
        self._edits: dict[tuple[int, str], tuple[int, Any]] = {}
        self._leaves: Leaves | None = None
        self._why = ""

    def record(self, known: Mapping[int, Tensor], hidden: HiddenAttributes) -> dict[int, Tensor]:
        """Record it anew; returns the plain tensors, by slot.

        Args:
            known: Tensors that keep their slots.
            hidden: What replicas do without.
        """
        module, found = self._module, dict[int, Tensor]()
        numbers = {id(tensor): slot for slot, tensor in known.items()}
        fresh = itertools.count(max(known, default=-1) + 1)

        def slot_of(tensor: Tensor) -> int:
            slot = numbers.get(id(tensor))
            if slot is None:
                slot = numbers[id(tensor)] = next(fresh)
            found[slot] = tensor
            return slot

        check_devices(module)
        self._leaves = None
        modules = [*module.modules()]
        names = hidden.of(modules)
        of_module = {id(modules[at]): found for at, found in names.items()}
        self._bytes, self._state, self._origins = structure.dump(module, slot_of, of_module)
        self.parts = ModuleParts(modules, hidden=names)
        self._edits.clear()
        self.specials = Specials(found)
        buffers = [numbers[id(b)] for b in module.buffers() if id(b) in numbers]
        parameters = [numbers[id(p)] for p in module.parameters() if id(p) in numbers]
        self.kinds = {**dict.fromkeys(buffers, "buffer"), **dict.fromkeys(parameters, "parameter")}
        return {slot: t for slot, t in found.items() if slot not in self.specials.tensors}

    def forget(self) -> None:
        """Let it be recorded anew before the next forward."""
        self._state = None
        self.specials = Specials({})
        self._edits.clear()

    @property
    def is_outdated(self) -> bool:
        """Whether it has to be recorded anew, whatever changed of its Python state."""
        return self._state is None or not self.specials.look_alike()

    def changed(self) -> bool:
        """Whether identities show a change of the Python state."""
        return self._state is None or self._state.changed()

    def deep_changed(self) -> bool:
        """Whether contents of the Python state changed that identities do not show."""
        return self._state is None or self._state.deep_changed()

    def edit(self, next_revision: Callable[[], int]) -> int | None:
        """Take over a change that is one of a few plain attributes, with the next revision; returns
        that, or None if more than these changed.
        """
        assert self._state is not None
        found = self._state.differences()
        numbers = {id(module): i for i, module in enumerate(self.parts.modules)}
        self._why = change_reason(self._module, self._state)
        if found is None or not all(id(o) in numbers and type(v) in SIMPLE for o, _, v in found):
            return None
        revision = next_revision()
        for owner, name, value in found:
            self.parts.look_again(self._state.accept(owner, name, value))
            self._edits[numbers[id(owner)], name] = (revision, value)
        self._state.settle()
        return revision

    def why(self) -> str:
        """What changed since the last call of this, besides contents; empty if nothing did."""
        why, self._why = self._why, ""
        return why

    def edits_since(self, held: int) -> tuple[tuple[int, str, Any], ...]:
        """The attributes that changed after revision ``held``: number of the submodule, name and
        value.
        """
        edits = self._edits.items()
        return tuple([(number, name, value) for (number, name), (at, value) in edits if at > held])

    def message(self, master: MasterTensors) -> Structure:
        """What replicas build it from."""
        return Structure(
            module=self._bytes,
            origins=self._origins,
            slots=master.specs(),
            block_sizes=master.layout.sizes,
            specials=self.specials.message,
            objects=self.parts.counts(),
            hidden=self.parts.hidden,
        )

    def leaves(self, plain: Mapping[int, Tensor]) -> Leaves:
        """The tensors that may receive gradients, in the order in which replicas report them.

        Args:
            plain: The plain tensors, by slot.
        """
        if self._leaves is None:
            tensors = {**plain, **self.specials.tensors}
            wanted = sorted([slot for slot, tensor in tensors.items() if tensor.requires_grad])
            kinds = [self.kinds.get(slot, "attribute") for slot in wanted]
            others = [k for k, kind in enumerate(kinds) if kind != "parameter"]
            self._leaves = Leaves([tensors[slot] for slot in wanted], kinds, others)
        return self._leaves

    def forget_leaves(self) -> None:
        """Find the leaves anew when they are asked for: flags changed."""
        self._leaves = None

    def name(self, slot: int, tensor: Tensor) -> str:
        """The kind and the name of a plain tensor."""
        named = itertools.chain(self._module.named_parameters(), self._module.named_buffers())
        found = (f"{self.kinds[slot]} {name!r}" for name, known in named if known is tensor)
        return next(found, "a tensor")


def check_devices(module: nn.Module) -> None:
    """Raise upstream's error for a module that is spread over devices."""
    source = None
    for tensor in itertools.chain(module.parameters(), module.buffers()):
        source = source or tensor.device
        if tensor.device != source:
            raise RuntimeError(
                f"module must have its parameters and buffers on device {source} "
                f"(device_ids[0]) but found one of them on device: {tensor.device}"
            )


_PART = 4 << 20
"""Bytes of trained parameters that are compared in each forward while the master lacks steps."""


class StateChange(NamedTuple):
    """A state update, and the packets that belong to it.

    Attributes:
        message: The update; its packets count from 0.
        packets: The packets beside the message.
        sent: Bytes of contents in it.
    """

    message: StateUpdate
    packets: list[Attachment]
    sent: int

    def placed(self, attachments: Attachments) -> StateUpdate:
        """The message, with its packets added to ``attachments``, which may hold others already."""
        attachments.size += self.sent
        if not self.packets:
            return self.message
        first = len(attachments.beside)
        attachments.beside.extend(self.packets)
        blobs = (
            b if isinstance(b.packet, bytes) else b._replace(packet=b.packet + first)
            for b in self.message.blobs
        )
        return self.message._replace(blobs=tuple(blobs))


class OwnedParameters:
    """The parameters of a master that an optimizer in the replicas trains: a replica takes their
    contents from its optimizer's record only.

    Args:
        tensors: The parameters, by slot.

    Attributes:
        tensors: These.
        edited: Whether `ModuleTracker.verify` found other contents in one of them.
    """

    def __init__(self, tensors: Mapping[int, Tensor]) -> None:
        self.tensors = dict(tensors)
        self.edited = False
        self._next_part = 0

    def look(self, present: Mapping[int, Tensor]) -> list[tuple[int, int]] | None:
        """The version and the address of each; None if one is not among those of the module."""
        if present and any(present.get(slot) is not t for slot, t in self.tensors.items()):
            return None
        return [(tensor._version, tensor.data_ptr()) for tensor in self.tensors.values()]

    def fill(self, values: Sequence[Tensor]) -> None:
        """Write to them, in place."""
        with torch.no_grad():
            for tensor, value in zip(self.tensors.values(), values, strict=True):
                tensor.copy_(value)

    def without(self, slots: tuple[int, ...]) -> tuple[int, ...]:
        """The slots among some that are none of theirs."""
        return tuple([s for s in slots if s not in self.tensors]) if self.tensors else slots

    def differing(self, contents: BlockContents, revision: int, in_parts: bool) -> list[int]:
        """The blocks of a module that differ from what was sent up to ``revision``.

        Args:
            contents: The contents of the module.
            revision: See `BlockContents.differing`.
            in_parts: Whether of the large blocks of these parameters a part is compared, another
                one in each call.
        """
        blocks = contents.master.layout.blocks_of(self.tensors)
        apart = contents.large(blocks) if in_parts else []
        found = contents.differing(revision, apart)
        if apart:
            edited, self._next_part = contents.differing_part(
                apart, revision, self._next_part, _PART
            )
            found += edited
        self.edited |= not blocks.isdisjoint(found)
        return found


class ModuleTracker:
    """What of one module, the master, changed since a replica last got an update.

    Args:
        module: The master.
        link: The link that carries contents.

    Attributes:
        id: Its number in this process.
        revision: That of the last change.
        module: The master.
        structure: All of it but the contents of its plain tensors.
        owned: The parameters that an optimizer in the replicas trains.
        training: The driver's side of that optimizer, a `Training`; None without.
        holds: Whether gradients ever stayed in the replicas, under `DataParallel.no_sync`.
    """

    def __init__(self, module: nn.Module, link: Link) -> None:
        self.id = number("model")
        self.revision = 0
        self.module = module
        self.owned = OwnedParameters({})
        self.training: Any = None
        self.holds = False
        self._link = link
        self.structure = MasterStructure(module)
        self._contents = BlockContents(link)
        self._history = StateHistory(module)
        self._updates: dict[int, StateChange] = {}
        self._sent_before = 0

    def __reduce__(self) -> Any:
        # it tracks one module of one process; a copy of its wrapper gets its own
        return type(None), ()

    def __deepcopy__(self, memo: Any) -> None:
        return None

    @property
    def device(self) -> torch.device:
        """The device of the master."""
        for slot in self.structure.kinds:
            tensor = self._contents.master.tensors.get(slot)
            if tensor is not None:
                return tensor.device
        return torch.device("cpu")

    def leaves(self) -> Leaves:
        """The tensors that may receive gradients, in the order in which replicas report them."""
        return self.structure.leaves(self._contents.master.tensors)

    def doubtful(self) -> tuple[int, ...]:
        """The numbers of leaves that the driver computed; modules such as weight_norm's compute
        them anew in forward.
        """
        tensors, _, others = self.leaves()
        return tuple([k for k in others if not tensors[k].is_leaf])

    def versions(self) -> tuple[list[int], list[int]]:
        """A mark of this moment, for `moved_since`: the slots and their versions."""
        return self._contents.master.slots, self._contents.master.versions()

    def moved_since(self, mark: tuple[list[int], list[int]], held: int) -> tuple[int, ...]:
        """The slots with versions that moved since `versions` made the mark: a graph may have saved
        their tensors.

        Changes up to revision ``held``, which the replica has, are left out: newer graphs have
        saved the tensors as they are now. So are those of buffers that it does without.
        """
        if held != self.revision and self.only_reported_since(held):
            held = self.revision
        return self.owned.without(self._contents.master.moved_from(*mark, held))

    def mark(self) -> Mark:
        """A mark of the state that the last `sync` found, for a replay."""
        history, seen = self._history, self._contents.master.seen
        return Mark(history.moment, seen, history.disturbed_at, self._trained())

    def _trained(self) -> int:
        """How many steps were made in the replicas. Other entries, as of a norm, change nothing."""
        return 0 if self.training is None else int(self.training.steps)

    def changed_since(self, mark: Mark) -> str | None:
        """What of the module changed since a mark, other than by write-backs; None if nothing."""
        known, master = self.structure, self._contents.master
        disturbed = self._history.disturbed_at != mark.disturbed_at
        if disturbed or known.changed() or known.deep_changed():
            return "an attribute, its structure, or a tensor behind its version"
        if self._trained() != mark.trained:
            return "a parameter, by model.optimizer(),"
        if not known.specials.look_alike() or not known.specials.are_alike():
            return "a tensor"
        slots = [master.slots[i] for i in mark.moved(master.look())]
        if not slots:
            besides = master.layout.blocks_of([*mark.overwritten(), *self.owned.tensors])
            edited = {*self._contents.edited(besides)}
            slots = [slot for slot, spec in master.layout.specs.items() if spec.block in edited]
        return known.name(slots[0], master.tensors[slots[0]]) if slots else None

    def sync(self) -> None:
        """Find what changed, as far as identities, versions and addresses show."""
        self._or_begin_anew(self._sync)

    def _sync(self) -> bool:
        self._sent_before = self.revision
        history = self._history
        history.hidden.note(history.set_by_forward)
        unseen = history.begin()
        if self.structure.is_outdated or unseen:
            self._restructure()
        elif self.structure.changed():
            revision = self.structure.edit(self._next_revision)
            if revision is None:
                history.hidden.hide()
                self._restructure()
            else:
                self._history.disturbed_at = revision
        return self._take_news()

    def _take_news(self) -> bool:
        """Take over what versions, addresses and flags show."""
        if (news := self._contents.news()) is not None:
            if news.flags != self._contents.master.seen.flags:
                self.structure.forget_leaves()
            held, revision = self.revision, self._next_revision()
            if (moved := self._contents.take_versions(news, revision)) is not None:
                self._updates[held] = StateChange(StateUpdate(self.id, revision, moved), [], 0)
            elif not self._contents.take(news, revision):
                self._restructure()
        return True

    def show(self) -> bool:
        """Let replicas have all attributes, for good, because one was missed, or compiled code may
        miss it; returns whether any was hidden.
        """
        if not self._history.hidden.show():
            return False
        self._begin_anew()
        return True

    def verify(self, wholly: bool = True) -> bool:
        """Whether contents are those that the last `sync` found. Changes are taken into the next
        update.

        Args:
            wholly: Whether all contents are compared. If not, some megabytes of what an optimizer
                in the replicas trains are, others in each call, where the master lacks its steps:
                no result depends on them.
        """
        return self._or_begin_anew(functools.partial(self._verify, wholly))

    def _or_begin_anew(self, look: Callable[[], bool]) -> bool:
        """Run a comparison. If an exception interrupts it, such as Ctrl-C or a lack of memory, all
        state is sent again.
        """
        try:
            return look()
        except BaseException:
            self._begin_anew()
            raise

    def _begin_anew(self) -> None:
        """Forget what was sent: the next `sync` takes all state anew."""
        self.structure.forget()
        self._contents = BlockContents(self._link, exposes=not self.owned.tensors)
        self._history.disturbed_at = self._next_revision()

    def slots_of(self, tensors: Sequence[Tensor]) -> list[int | None]:
        """The slots of some tensors; None for one that is no plain tensor of the module."""
        numbers = {id(tensor): slot for slot, tensor in self._contents.master.tensors.items()}
        return [numbers.get(id(tensor)) for tensor in tensors]

    def own(self, tensors: Mapping[int, Tensor]) -> None:
        """Leave the contents of some parameters, by slot, to an optimizer in the replicas; with
        none, take all contents back. All state is sent anew.
        """
        self.owned = OwnedParameters(tensors)
        self._begin_anew()

    def look_owned(self) -> list[tuple[int, int]] | None:
        """The version and the address of each owned parameter; None if one has left the module."""
        return self.owned.look(self._contents.master.tensors)

    def take_owned(self, values: Sequence[Tensor]) -> None:
        """Write what the replicas' optimizer made of the owned parameters into the master, in
        place. For a forward that runs again this is no change: the replicas had these contents.
        """
        before = self._contents.master.look()
        self.owned.fill(values)
        after = before._replace(versions=self._contents.master.versions())
        self._history.add(dict, before, after)
        # Taken over now: what is edited from here on differs from it.
        self._or_begin_anew(self._take_news)

    def _verify(self, wholly: bool) -> bool:
        known = self.structure
        fits = not known.deep_changed() and self._contents.master.fits()
        if not fits or not known.specials.are_alike():
            self._restructure()
            return False
        behind = self.training is not None and self.training.behind > 0
        in_parts = not wholly and behind and self.device.type == "cpu"
        differing = self.owned.differing(self._contents, self._sent_before, in_parts)
        if differing:
            self._history.disturbed_at = self._next_revision()
            self._contents.send(differing, self.revision)
        return not differing

    def update_from(self, held: int) -> StateChange | None:
        """The update for a replica that holds revision ``held``; revision 0 holds nothing."""
        if held == self.revision:
            return None
        if held not in self._updates:
            self._updates[held] = self._make_update(held)
        return self._updates[held]

    def only_reported_since(self, held: int) -> bool:
        """Whether all that is new after revision ``held`` are small buffers as a replica's last
        report left them.
        """
        change = self.update_from(held) if held else None
        if change is None:
            return False
        message, specs = change.message, self._contents.master.layout.specs
        if message.structure is not None or message.edits or message.flags:
            return False
        blocks = {block for blob in message.blobs for block in blob.blocks}
        blocks.update(specs[slot].block for slot in message.bumped if slot in specs)
        return blocks <= {*message.kept}

    def write_back(
        self,
        written: WriteBack | None,
        attachments: Attachments,
        means: Mapping[int, tuple[Tensor, bool]] | None = None,
    ) -> None:
        """Apply to the master, in place, what chunk 0 changed in place. The overwritten contents
        are kept, see `StateMoment`.

        Args:
            written: What it changed; None if nothing.
            attachments: Where the contents are.
            means: What `means` found: what some buffers get in place of that.
        """
        before = self._contents.master.look()
        overwritten: Callable[[], dict[int, Tensor]] = dict
        if written is not None:
            overwritten = self._contents.write_back(written, attachments)
        if means:
            former, first = self._contents.fill(means), overwritten

            def overwritten() -> dict[int, Tensor]:
                return {**former, **first()}

        after = before._replace(
            versions=self._contents.master.versions()
        )  # writing moves nothing else
        if written is not None and written.replaced:
            after = self._contents.master.look()
        self._history.add(overwritten, before, after)

    def means(
        self, found: Sequence[tuple[WriteBack | None, Attachments]]
    ) -> dict[int, tuple[Tensor, bool]]:
        """The means of the buffers that chunks changed in place, of those that have means, each
        with whether its version moved. A chunk that did not change one has what the master has.

        Args:
            found: What each chunk changed.
        """
        each = [
            {} if written is None else self._contents.contents_of(written, attachments)
            for written, attachments in found
        ]
        written = [one for one, _ in found if one is not None]
        moved = {slot for one in written for slot, moves in one.slots if moves}
        replaced = {slot for one in written for slot in one.replaced}
        means, kinds = {}, self.structure.kinds
        for slot in sorted({slot for one in each for slot in one} - replaced):
            now = self._contents.master.tensors[slot]
            if kinds.get(slot) == "buffer" and (now.is_floating_point() or now.is_complex()):
                values = torch.stack([one.get(slot, now.detach()) for one in each])
                means[slot] = values.mean(0), slot in moved
        return means

    def rebind(
        self,
        found: Sequence[tuple[int, str, Any]],
        objects: Mapping[PartKey, tuple[Any, dict[str, Any] | None, dict[str, Any]]],
    ) -> None:
        """Set on the master the attributes that a forward set on its only replica, and names of its
        code, and let objects, by key, hold what those of the replica do: with one device upstream
        runs the master itself.
        """
        parts = self.structure.parts
        attributes = [(*parts.holder(at, name), value) for at, name, value in found]
        self._history.rebind(attributes)
        self._history.set_by_forward = [(owner, name) for owner, name, _ in attributes]
        self._history.refill(
            [(self.known(key), ObjectContents(*now)) for key, now in objects.items()]
        )
        values = given([value for *_, value in found], objects.values())
        self._history.news.add(values, parts.objects.values)

    def take_hooked(self, found: HookChanges) -> None:
        """Do to the master, and to the program's objects, what hooks did in a backward of its only
        replica, and warn of what cannot be done: the program has changed these meanwhile.
        """
        parts, news = self.structure.parts, self._history.news
        rebound, refilled, lost = [], [], []
        for at, name, before, value in found.rebound:
            if not parts.is_known(at, name):
                lost.append((at, name))
                continue
            owner, attribute = parts.holder(at, name)
            now = getattr(owner, attribute, None)
            if is_overtaken(before, now, value):
                lost.append((at, name))
            else:
                rebound.append((owner, attribute, value))
        follows = found.revision >= self.structure.at and found.made == len(news.objects)
        for key, edit in found.edits.items():
            there = follows and parts.still_holds(key)
            holder = self.known(key) if there else None
            made = edit.applied(holder) if there else None
            if made is None:
                lost.append(key if follows else (NEW, ""))
            else:
                refilled.append((holder, made))
        self._history.rebind(rebound)
        self._history.refill(refilled)
        news.add(found.values(), parts.objects.values)
        if lost:
            text = VainChange.HOOKED.value.format(", ".join(parts.names(lost)))
            warnings.warn(text, stacklevel=2)

    def known(self, key: PartKey) -> Any:
        """What a replica names by a key."""
        if key[0] == NEW:
            return self._history.news.objects[key[2]]
        if len(key) == 1:
            return self.structure.parts.modules[key[0]]
        if key[0] is None:
            plain = self._contents.master.tensors.get(key[1])
            return self.structure.specials.tensors[key[1]] if plain is None else plain
        holder = self.structure.parts.objects[key[:3]]
        return holder if len(key) == 3 else contents(holder).flat()[key[3]]

    def before_rebinding(self) -> contextlib.AbstractContextManager[None]:
        """Set the attributes back, in the block, to the values that the last forward began with."""
        return self._history.before_rebinding()

    def _next_revision(self) -> int:
        self.revision += 1
        self._updates.clear()
        return self.revision

    def _restructure(self) -> None:
        """Record the whole structure anew. Tensors that were known keep their slots."""
        known, contents = self.structure, self._contents
        plain = known.record(
            {**self.owned.tensors, **contents.master.tensors, **known.specials.tensors},
            self._history.hidden,
        )
        known.at = self._history.disturbed_at = self._next_revision()
        contents.adopt(plain, self.revision)
        known.size = sum(contents.master.layout.sizes.values())

    def _make_update(self, held: int) -> StateChange:
        contents, attachments = self._contents, Attachments(self._link)
        master, known = contents.master, self.structure
        owned = master.layout.blocks_of(self.owned.tensors)
        report, kept = contents.kept_since(held)
        message = StateUpdate(
            model=self.id,
            revision=self.revision,
            bumped=self.owned.without(master.moved_since(held)),
            structure=known.message(master) if held < known.at else None,
            edits=known.edits_since(held),
            flags=master.flags_since(held),
            blobs=contents.blobs_since(held, attachments, owned),
            report=report,
            kept=kept,
        )
        sent = contents.sent(message.blobs) if message.blobs else 0
        return StateChange(message, attachments.beside, sent)
