"""The driver's side: what of the master changed since each replica last got an update.

Read `python_state.py`'s note on what changed first. Before a forward, `sync` compares what is cheap
to read: identities, versions, addresses, flags. While the replicas run, `verify` compares contents:
edits through `.data` or a NumPy alias move no version. If it finds such an edit, the forward runs
again before its first result was returned.

Each change has a revision. A replica that holds revision 3 gets an update with all that is newer.

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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from raydp_parallel.devices.process import number
from raydp_parallel.devices.ranges import Attachment
from raydp_parallel.state import module_sources, structure
from raydp_parallel.state.block_contents import BlockContents
from raydp_parallel.state.block_layout import Specials
from raydp_parallel.state.python_state import PythonState, change_reason
from raydp_parallel.state.versions import Look, unlike
from raydp_parallel.transport.links import Attachments, Link
from raydp_parallel.transport.messages import StateUpdate, Structure, WriteBack


class StateMoment:
    """The time between two write-backs of a master."""

    __slots__ = ("after", "before", "following", "overwritten")

    def __init__(self) -> None:
        self.overwritten: Callable[[], dict[int, Tensor]] = dict
        self.before = Look([], [], [])
        self.after = Look([], [], [])
        self.following: StateMoment | None = None

    def end(
        self, overwritten: Callable[[], dict[int, Tensor]], before: Look, after: Look
    ) -> StateMoment:
        """End the moment with a write-back; returns the moment that begins."""
        self.overwritten, self.before, self.after = overwritten, before, after
        self.following = StateMoment()
        return self.following


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


def overwritten_since(moment: StateMoment) -> dict[int, Tensor]:
    """The contents that slots had at a moment, where write-backs have changed them since."""
    found: dict[int, Tensor] = {}
    at: StateMoment | None = moment
    while at is not None:
        found = {**at.overwritten(), **found}
        at = at.following
    return found


def moved(mark: Mark, contents: BlockContents) -> list[int]:
    """The slots that changed since, other than by write-backs, as far as versions, addresses and
    flags show.
    """
    now = contents.master.look()
    chain, at = [mark.look], mark.moment
    while at.following is not None:
        chain += [at.before, at.after]
        at = at.following
    chain.append(now)
    found = {*unlike(mark.look.flags, now.flags)}
    for one, other in zip(chain[::2], chain[1::2], strict=True):
        found.update(unlike(one.versions, other.versions), unlike(one.pointers, other.pointers))
    return [contents.master.slots[i] for i in sorted(found)]


_PART = 4 << 20
"""Bytes of trained parameters that are compared in each forward while the master lacks steps."""

_SIMPLE = (bool, int, float, str, type(None))
_MISSING = object()


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


class Leaves(NamedTuple):
    """The tensors of the master that may receive gradients, each once.

    Attributes:
        tensors: The tensors.
        kinds: Of each ``"parameter"``, ``"buffer"``, or ``"attribute"`` for one that a plain
            attribute holds.
        others: The numbers of those that are attributes.
    """

    tensors: list[Tensor]
    kinds: list[str]
    others: list[int]


class ModuleTracker:
    """What of one module, the master, changed since a replica last got an update.

    Args:
        module: The master.
        link: The link that carries contents.

    Attributes:
        owned: The parameters, by slot, that an optimizer in the replicas trains: a replica takes
            their contents from its optimizer's record only.
        edited_owned: Whether `verify` found other contents in one of them.
        training: The driver's side of that optimizer, a `Training`; None without.
        holds: Whether gradients ever stayed in the replicas, under `DataParallel.no_sync`.
    """

    def __init__(self, module: nn.Module, link: Link) -> None:
        self.id = number("model")
        self.revision = 0
        self.structure_at = 0
        self._sent_before = 0
        self.module = module
        self._link = link
        self._python_state: PythonState | None = None
        self._structure = b""
        self._origins = module_sources.NOWHERE
        self._modules: list[nn.Module] = []
        self._edits: dict[tuple[int, str], tuple[int, Any]] = {}
        self._contents = BlockContents(link)
        self._specials = Specials({})
        self._kinds: dict[int, str] = {}
        self._leaves: Leaves | None = None
        self._updates: dict[int, StateChange] = {}
        self._moment = StateMoment()
        self._disturbed_at = 0
        self._rebound: list[tuple[nn.Module, str, Any]] = []
        self._why, self.size = "", 0
        self.owned: dict[int, Tensor] = {}
        self.edited_owned = False
        self.training: Any = None
        self.holds = False
        self._next_part = 0

    def __reduce__(self) -> Any:
        # it tracks one module of one process; a copy of its wrapper gets its own
        return type(None), ()

    def __deepcopy__(self, memo: Any) -> None:
        return None

    @property
    def device(self) -> torch.device:
        """The device of the master."""
        for slot in self._kinds:
            tensor = self._contents.master.tensors.get(slot)
            if tensor is not None:
                return tensor.device
        return torch.device("cpu")

    def why(self) -> str:
        """What changed since the last call, besides contents; empty if nothing did."""
        why, self._why = self._why, ""
        return why

    def leaves(self) -> Leaves:
        """The tensors that may receive gradients, in the order in which replicas report them."""
        if self._leaves is None:
            tensors = {**self._contents.master.tensors, **self._specials.tensors}
            wanted = sorted([slot for slot, tensor in tensors.items() if tensor.requires_grad])
            kinds = [self._kinds.get(slot, "attribute") for slot in wanted]
            others = [k for k, kind in enumerate(kinds) if kind == "attribute"]
            self._leaves = Leaves([tensors[slot] for slot in wanted], kinds, others)
        return self._leaves

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
        moved = self._contents.master.moved_from(*mark, held)
        return tuple([slot for slot in moved if slot not in self.owned]) if self.owned else moved

    def mark(self) -> Mark:
        """A mark of the state that the last `sync` found, for a replay."""
        return Mark(self._moment, self._contents.master.seen, self._disturbed_at, self._trained())

    @property
    def is_behind(self) -> bool:
        """Whether replicas have made steps that the master lacks."""
        return self.training is not None and self.training.behind > 0

    def _trained(self) -> int:
        """How many steps were made in the replicas. Other entries, as of a norm, change nothing."""
        return 0 if self.training is None else int(self.training.steps)

    def overwritten_since(self, mark: Mark) -> dict[int, Tensor]:
        """The contents that slots had at a mark, where write-backs have changed them since."""
        return overwritten_since(mark.moment)

    def changed_since(self, mark: Mark) -> str | None:
        """What of the module changed since a mark, other than by write-backs; None if nothing."""
        python_state = self._python_state
        if (
            python_state is None
            or self._disturbed_at != mark.disturbed_at
            or python_state.changed()
            or python_state.deep_changed()
        ):
            return "an attribute, its structure, or a tensor behind its version"
        if self._trained() != mark.trained:
            return "a parameter, by model.optimizer(),"
        if not self._specials.look_alike() or not self._specials.are_alike():
            return "a tensor"
        slots = moved(mark, self._contents)
        if not slots:
            specs = self._contents.master.layout.specs
            besides = {specs[slot].block for slot in self.overwritten_since(mark)}
            besides |= self._owned_blocks()
            edited = {*self._contents.edited(besides)}
            slots = [slot for slot, spec in specs.items() if spec.block in edited]
        return self._name(slots[0]) if slots else None

    def _name(self, slot: int) -> str:
        tensor = self._contents.master.tensors[slot]
        named = itertools.chain(self.module.named_parameters(), self.module.named_buffers())
        return next(
            (f"{self._kinds[slot]} {name!r}" for name, t in named if t is tensor), "a tensor"
        )

    def sync(self) -> None:
        """Find what changed, as far as identities, versions and addresses show."""
        self._or_begin_anew(self._sync)

    def _sync(self) -> bool:
        self._sent_before = self.revision
        self._rebound = []
        if self._python_state is None or not self._specials.look_alike():
            self._restructure()
        elif self._python_state.changed():
            self._edit()
        return self._take_news()

    def _take_news(self) -> bool:
        """Take over what versions, addresses and flags show."""
        if (news := self._contents.news()) is not None:
            self._leaves = self._leaves if news.flags == self._contents.master.seen.flags else None
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
        self._python_state = None
        self._contents = BlockContents(self._link, exposes=not self.owned)
        self._specials = Specials({})
        self._edits.clear()
        self._disturbed_at = self._next_revision()

    def slots_of(self, tensors: Sequence[Tensor]) -> list[int | None]:
        """The slots of some tensors; None for one that is no plain tensor of the module."""
        numbers = {id(tensor): slot for slot, tensor in self._contents.master.tensors.items()}
        return [numbers.get(id(tensor)) for tensor in tensors]

    def own(self, tensors: Mapping[int, Tensor]) -> None:
        """Leave the contents of some parameters, by slot, to an optimizer in the replicas; with
        none, take all contents back. All state is sent anew.
        """
        self.owned = dict(tensors)
        self.edited_owned = False
        self._begin_anew()

    def look_owned(self) -> list[tuple[int, int]] | None:
        """The version and the address of each owned parameter; None if one has left the module."""
        present = self._contents.master.tensors
        if present and any(present.get(slot) is not tensor for slot, tensor in self.owned.items()):
            return None
        return [(tensor._version, tensor.data_ptr()) for tensor in self.owned.values()]

    def take_owned(self, values: Sequence[Tensor]) -> None:
        """Write what the replicas' optimizer made of the owned parameters into the master, in
        place. For a forward that runs again this is no change: the replicas had these contents.
        """
        before = self._contents.master.look()
        with torch.no_grad():
            for tensor, value in zip(self.owned.values(), values, strict=True):
                tensor.copy_(value)
        after = before._replace(versions=self._contents.master.versions())
        self._moment = self._moment.end(dict, before, after)
        # Taken over now: what is edited from here on differs from it.
        self._or_begin_anew(self._take_news)

    def _verify(self, wholly: bool) -> bool:
        assert self._python_state is not None
        if (
            self._python_state.deep_changed()
            or not self._contents.master.fits()
            or not self._specials.are_alike()
        ):
            self._restructure()
            return False
        blocks: Collection[int] = ()
        if self.owned:
            blocks = self._owned_blocks()
        apart: list[int] = []
        if not wholly and self.is_behind and self.device.type == "cpu":
            apart = self._contents.large(blocks)
        differing = self._contents.differing(self._sent_before, apart)
        if apart:
            edited, self._next_part = self._contents.differing_part(
                apart, self._sent_before, self._next_part, _PART
            )
            differing += edited
        if differing:
            self.edited_owned |= not {*blocks}.isdisjoint(differing)
            self._disturbed_at = self._next_revision()
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
        self._moment = self._moment.end(overwritten, before, after)

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
        means = {}
        for slot in sorted({slot for one in each for slot in one} - replaced):
            now = self._contents.master.tensors[slot]
            if self._kinds.get(slot) == "buffer" and (now.is_floating_point() or now.is_complex()):
                values = torch.stack([one.get(slot, now.detach()) for one in each])
                means[slot] = values.mean(0), slot in moved
        return means

    def rebind(self, found: tuple[tuple[int, str, Any], ...]) -> None:
        """Set on the master the attributes that a forward set on its only replica: with one device
        upstream runs the master itself.
        """
        owners = [(self._modules[index], name, value) for index, name, value in found]
        self._rebound = [(owner, name, getattr(owner, name, _MISSING)) for owner, name, _ in owners]
        _set(owners)

    @contextlib.contextmanager
    def before_rebinding(self) -> Iterator[None]:
        """Set the attributes back, in the block, to the values that the last forward began with."""
        rebound = self._rebound
        now = [(owner, name, getattr(owner, name, _MISSING)) for owner, name, _ in rebound]
        _set(rebound)
        try:
            yield
        finally:
            _set(now)
            self._rebound = rebound

    def _next_revision(self) -> int:
        self.revision += 1
        self._updates.clear()
        return self.revision

    def _edit(self) -> None:
        """Take over a change of structure: a few plain attributes one by one, other changes as a
        whole structure.
        """
        assert self._python_state is not None
        found = self._python_state.differences()
        modules = {id(m): i for i, m in enumerate(self._modules)}
        self._why = change_reason(self.module, self._python_state)
        if found is None or not all(id(o) in modules and type(v) in _SIMPLE for o, _, v in found):
            self._restructure()
            return
        revision = self._disturbed_at = self._next_revision()
        for owner, name, value in found:
            self._python_state.accept(owner, name, value)
            self._edits[modules[id(owner)], name] = (revision, value)
        self._python_state.settle()

    def _restructure(self) -> None:
        """Record the whole structure anew. Tensors that were known keep their slots."""
        module = self.module
        found: dict[int, Tensor] = {}
        known = {**self.owned, **self._contents.master.tensors, **self._specials.tensors}
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
        self._structure, self._python_state, self._origins = structure.dump(module, slot_of)
        self._modules = [*module.modules()]
        self._edits.clear()
        self.structure_at = self._disturbed_at = self._next_revision()
        self._specials = Specials(found)
        plain = {slot: t for slot, t in found.items() if slot not in self._specials.tensors}
        self._contents.adopt(plain, self.revision)
        buffers = [numbers[id(b)] for b in module.buffers() if id(b) in numbers]
        parameters = [numbers[id(p)] for p in module.parameters() if id(p) in numbers]
        self._kinds = {**dict.fromkeys(buffers, "buffer"), **dict.fromkeys(parameters, "parameter")}
        self.size = sum(self._contents.master.layout.sizes.values())

    def _make_update(self, held: int) -> StateChange:
        contents, attachments = self._contents, Attachments(self._link)
        report, kept = contents.kept_since(held)
        edits = [(m, name, value) for (m, name), (at, value) in self._edits.items() if at > held]
        message = StateUpdate(
            model=self.id,
            revision=self.revision,
            bumped=tuple([s for s in contents.master.moved_since(held) if s not in self.owned]),
            structure=self._whole() if held < self.structure_at else None,
            edits=tuple(edits),
            flags=contents.master.flags_since(held),
            blobs=contents.blobs_since(held, attachments, self._owned_blocks()),
            report=report,
            kept=kept,
        )
        sent = contents.sent(message.blobs) if message.blobs else 0
        return StateChange(message, attachments.beside, sent)

    def _owned_blocks(self) -> set[int]:
        specs = self._contents.master.layout.specs
        return {specs[slot].block for slot in self.owned if slot in specs}

    def _whole(self) -> Structure:
        contents = self._contents
        layout = contents.master.specs(), contents.master.layout.sizes
        return Structure(self._structure, self._origins, *layout, self._specials.message)


def _set(attributes: list[tuple[nn.Module, str, Any]]) -> None:
    for owner, name, value in attributes:
        if value is not _MISSING:
            setattr(owner, name, value)
        elif hasattr(owner, name):
            delattr(owner, name)


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
