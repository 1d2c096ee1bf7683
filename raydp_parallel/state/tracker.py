"""The driver's side: what of the master changed since each replica last got an update.

Read `python_state.py`'s note on what changed first. Before a forward, `sync` compares what is cheap
to read: identities, versions, addresses, flags. While the replicas run, `verify` compares contents:
edits through `.data` or a NumPy alias move no version. If it finds such an edit, the forward runs
again before its first result was returned.

Each change has a revision. A replica that holds revision 3 gets an update with all that is newer.
What write-backs overwrite is kept for replays, see `state_history`'s note on what can be restored.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from raydp_parallel.devices.process import number
from raydp_parallel.devices.ranges import Attachment
from raydp_parallel.state.block_contents import BlockContents
from raydp_parallel.state.master_structure import Leaves, MasterStructure
from raydp_parallel.state.state_history import Mark, StateHistory
from raydp_parallel.transport.links import Attachments, Link
from raydp_parallel.transport.messages import StateUpdate, WriteBack

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
        self._structure = MasterStructure(module)
        self._contents = BlockContents(link)
        self._history = StateHistory()
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
        for slot in self._structure.kinds:
            tensor = self._contents.master.tensors.get(slot)
            if tensor is not None:
                return tensor.device
        return torch.device("cpu")

    @property
    def size(self) -> int:
        """The bytes of its plain tensors."""
        return self._structure.size

    def why(self) -> str:
        """What changed since the last call, besides contents; empty if nothing did."""
        return self._structure.why()

    def leaves(self) -> Leaves:
        """The tensors that may receive gradients, in the order in which replicas report them."""
        return self._structure.leaves(self._contents.master.tensors)

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

    @property
    def is_behind(self) -> bool:
        """Whether replicas have made steps that the master lacks."""
        return self.training is not None and self.training.behind > 0

    def _trained(self) -> int:
        """How many steps were made in the replicas. Other entries, as of a norm, change nothing."""
        return 0 if self.training is None else int(self.training.steps)

    def changed_since(self, mark: Mark) -> str | None:
        """What of the module changed since a mark, other than by write-backs; None if nothing."""
        known, master = self._structure, self._contents.master
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
        self._history.forget_rebound()
        if self._structure.is_outdated:
            self._restructure()
        elif self._structure.changed():
            revision = self._structure.edit(self._next_revision)
            if revision is None:
                self._restructure()
            else:
                self._history.disturbed_at = revision
        return self._take_news()

    def _take_news(self) -> bool:
        """Take over what versions, addresses and flags show."""
        if (news := self._contents.news()) is not None:
            if news.flags != self._contents.master.seen.flags:
                self._structure.forget_leaves()
            held, revision = self.revision, self._next_revision()
            if (moved := self._contents.take_versions(news, revision)) is not None:
                self._updates[held] = StateChange(StateUpdate(self.id, revision, moved), [], 0)
            elif not self._contents.take(news, revision):
                self._restructure()
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
        self._structure.forget()
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
        known = self._structure
        fits = not known.deep_changed() and self._contents.master.fits()
        if not fits or not known.specials.are_alike():
            self._restructure()
            return False
        in_parts = not wholly and self.is_behind and self.device.type == "cpu"
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
        means, kinds = {}, self._structure.kinds
        for slot in sorted({slot for one in each for slot in one} - replaced):
            now = self._contents.master.tensors[slot]
            if kinds.get(slot) == "buffer" and (now.is_floating_point() or now.is_complex()):
                values = torch.stack([one.get(slot, now.detach()) for one in each])
                means[slot] = values.mean(0), slot in moved
        return means

    def rebind(self, found: tuple[tuple[int, str, Any], ...]) -> None:
        """Set on the master the attributes that a forward set on its only replica: with one device
        upstream runs the master itself.
        """
        modules = self._structure.modules
        self._history.rebind([(modules[index], name, value) for index, name, value in found])

    def before_rebinding(self) -> contextlib.AbstractContextManager[None]:
        """Set the attributes back, in the block, to the values that the last forward began with."""
        return self._history.before_rebinding()

    def _next_revision(self) -> int:
        self.revision += 1
        self._updates.clear()
        return self.revision

    def _restructure(self) -> None:
        """Record the whole structure anew. Tensors that were known keep their slots."""
        known, contents = self._structure, self._contents
        plain = known.record(
            {**self.owned.tensors, **contents.master.tensors, **known.specials.tensors}
        )
        known.at = self._history.disturbed_at = self._next_revision()
        contents.adopt(plain, self.revision)
        known.size = sum(contents.master.layout.sizes.values())

    def _make_update(self, held: int) -> StateChange:
        contents, attachments = self._contents, Attachments(self._link)
        master, known = contents.master, self._structure
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
