"""The driver's side: what of the master copy changed since a replica last saw it.

Read `python_state.py`'s note on what changed first. Before a forward, `sync` looks at what is cheap
to see: identities, versions, addresses, flags. While the replicas run, `verify` looks at what only
contents can tell: edits through `.data` or a NumPy alias move no version. If it finds one, the
forward is run again, and nobody has seen the first result.

Each change has a revision. A replica that holds revision 3 gets an update with all that is newer.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from raydp_parallel.devices.ranges import Attachment
from raydp_parallel.state import change_reasons, module_sources, structure
from raydp_parallel.state.block_contents import BlockContents
from raydp_parallel.state.history import Mark, StateMoment, moved, overwritten_since
from raydp_parallel.state.python_state import PythonState
from raydp_parallel.state.special_tensors import Specials
from raydp_parallel.transport.links import Attachments, Link
from raydp_parallel.transport.messages import StateUpdate, Structure, WriteBack

_ids = itertools.count(1)
_SIMPLE = (bool, int, float, str, type(None))
_MISSING = object()


class StateChange(NamedTuple):
    """A state update, and the packets that belong to it.

    Attributes:
        message: The update; its packets count from 0.
        packets: What lies beside the message.
        sent: Bytes of contents in it.
    """

    message: StateUpdate
    packets: list[Attachment]
    sent: int

    def placed(self, attachments: Attachments) -> StateUpdate:
        """The message, with its packets in ``attachments``, where others may lie already."""
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


class Leaf(NamedTuple):
    """A tensor of the master copy that may receive a gradient.

    Attributes:
        tensor: The tensor.
        kind: ``"parameter"``, ``"buffer"``, or ``"attribute"`` for one that a plain attribute
            holds.
    """

    tensor: Tensor
    kind: str


class ModuleTracker:
    """The master copy of one module, watched.

    Args:
        module: The module.
        link: What contents travel by.
    """

    def __init__(self, module: nn.Module, link: Link) -> None:
        self.id = next(_ids)
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
        self._leaves: list[Leaf] | None = None
        self._updates: dict[int, StateChange] = {}
        self._moment = StateMoment()
        self._disturbed_at = 0
        self._rebound: list[tuple[nn.Module, str, Any]] = []
        self._why, self.size = "", 0

    def __reduce__(self) -> Any:
        # it watches one module of one process; a copy of its wrapper gets its own
        return type(None), ()

    def __deepcopy__(self, memo: Any) -> None:
        return None

    @property
    def device(self) -> torch.device:
        """Where the master copy lies."""
        for slot in self._kinds:
            tensor = self._contents.tensors.get(slot)
            if tensor is not None:
                return tensor.device
        return torch.device("cpu")

    def why(self) -> str:
        """What changed since this was asked last, besides mere contents; empty if nothing did."""
        why, self._why = self._why, ""
        return why

    def leaves(self) -> list[Leaf]:
        """What may receive gradients, in the order in which replicas report them."""
        if self._leaves is None:
            tensors = {**self._contents.tensors, **self._specials.tensors}
            wanted = sorted([slot for slot, tensor in tensors.items() if tensor.requires_grad])
            self._leaves = [
                Leaf(tensors[slot], self._kinds.get(slot, "attribute")) for slot in wanted
            ]
        return self._leaves

    def doubtful(self) -> tuple[int, ...]:
        """The leaves that were computed in the driver, by number; modules such as weight_norm's
        compute them anew.
        """
        found = enumerate(self.leaves())
        return tuple(
            [k for k, leaf in found if leaf.kind == "attribute" and not leaf.tensor.is_leaf]
        )

    def versions(self) -> tuple[list[int], list[int]]:
        """A mark of this moment, for `moved_since`: the slots and their versions."""
        return self._contents.slots, self._contents.versions()

    def moved_since(self, mark: tuple[list[int], list[int]], held: int) -> tuple[int, ...]:
        """The slots whose versions moved since `versions` made the mark; a graph may have saved
        them.

        Not those of which a replica knows that holds revision ``held``: newer graphs have saved
        them as they are now.
        """
        return self._contents.moved_from(*mark, held)

    def mark(self) -> Mark:
        """The state as the last `sync` took it to be, for a replay."""
        return Mark(self._moment, self._contents.seen, self._disturbed_at)

    def overwritten_since(self, mark: Mark) -> dict[int, Tensor]:
        """What write-backs have changed since: the contents that those slots had."""
        return overwritten_since(mark.moment)

    def changed_since(self, mark: Mark) -> str | None:
        """What of the module anybody else than a write-back has changed since; None if nothing."""
        python_state = self._python_state
        if (
            python_state is None
            or self._disturbed_at != mark.disturbed_at
            or python_state.changed()
            or python_state.deep_changed()
        ):
            return "an attribute, its structure, or a tensor behind its version"
        if not self._specials.look_alike() or not self._specials.are_alike():
            return "a tensor"
        slots = moved(mark, self._contents)
        if not slots:
            specs = self._contents.layout.specs
            besides = {specs[slot].block for slot in self.overwritten_since(mark)}
            edited = {*self._contents.edited(besides)}
            slots = [slot for slot, spec in specs.items() if spec.block in edited]
        return self._name(slots[0]) if slots else None

    def _name(self, slot: int) -> str:
        tensor = self._contents.tensors[slot]
        named = itertools.chain(self.module.named_parameters(), self.module.named_buffers())
        return next(
            (f"{self._kinds[slot]} {name!r}" for name, t in named if t is tensor), "a tensor"
        )

    def sync(self) -> None:
        """See what changed, as far as identities, versions and addresses tell."""
        self._or_begin_anew(self._sync)

    def _sync(self) -> bool:
        self._sent_before = self.revision
        self._rebound = []
        if self._python_state is None or not self._specials.look_alike():
            self._restructure()
        elif self._python_state.changed():
            self._edit()
        if (news := self._contents.news()) is not None:
            self._leaves = self._leaves if news.flags == self._contents.seen.flags else None
            held, revision = self.revision, self._next_revision()
            if (moved := self._contents.take_versions(news, revision)) is not None:
                self._updates[held] = StateChange(StateUpdate(self.id, revision, moved), [], 0)
            elif not self._contents.take(news, revision):
                self._restructure()
        return True

    def verify(self) -> bool:
        """Whether contents are as the last `sync` took them to be; takes up what is not, for the
        next update.
        """
        return self._or_begin_anew(self._verify)

    def _or_begin_anew(self, look: Callable[[], bool]) -> bool:
        """What was interrupted half way, by Ctrl-C or for want of memory, begins anew: everything
        is sent again.
        """
        try:
            return look()
        except BaseException:
            self._python_state, self._contents, self._specials = (
                None,
                BlockContents(self._link),
                Specials({}),
            )
            self._edits.clear()
            self._disturbed_at = self._next_revision()
            raise

    def _verify(self) -> bool:
        assert self._python_state is not None
        if (
            self._python_state.deep_changed()
            or not self._contents.fits()
            or not self._specials.are_alike()
        ):
            self._restructure()
            return False
        differing = self._contents.differing(self._sent_before)
        if differing:
            self._disturbed_at = self._next_revision()
            self._contents.send(differing, self.revision)
        return not differing

    def update_from(self, held: int) -> StateChange | None:
        """What a replica needs that holds revision ``held``; 0 holds nothing."""
        if held == self.revision:
            return None
        if held not in self._updates:
            self._updates[held] = self._make_update(held)
        return self._updates[held]

    def write_back(self, written: WriteBack, attachments: Attachments) -> None:
        """Take over, in place, what chunk 0 changed in place. What it overwrites is kept, see
        `moments`.
        """
        before = self._contents.look()
        overwritten = self._contents.write_back(written, attachments)
        self._moment = self._moment.end(overwritten, before, self._contents.look())

    def rebind(self, found: tuple[tuple[int, str, Any], ...]) -> None:
        """Give the master the attributes that a forward gave its only replica, as upstream's one
        device would.
        """
        owners = [(self._modules[index], name, value) for index, name, value in found]
        self._rebound = [(owner, name, getattr(owner, name, _MISSING)) for owner, name, _ in owners]
        _set(owners)

    @contextlib.contextmanager
    def before_rebinding(self) -> Iterator[None]:
        """Show the attributes that the last forward found, not those that it gave new values."""
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
        """Take up a change of structure: a few plain attributes one by one, anything else as a
        whole.
        """
        assert self._python_state is not None
        found = self._python_state.differences()
        modules = {id(m): i for i, m in enumerate(self._modules)}
        self._why = change_reasons.describe(self.module, self._python_state)
        if found is None or not all(id(o) in modules and type(v) in _SIMPLE for o, _, v in found):
            self._restructure()
            return
        revision = self._disturbed_at = self._next_revision()
        for owner, name, value in found:
            self._python_state.accept(owner, name, value)
            self._edits[modules[id(owner)], name] = (revision, value)
        self._python_state.settle()

    def _restructure(self) -> None:
        """Take the whole structure anew. Tensors that were known keep their slots."""
        module = self.module
        found: dict[int, Tensor] = {}
        known = {**self._contents.tensors, **self._specials.tensors}
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
        self._contents.adopt(
            {s: t for s, t in found.items() if s not in self._specials.tensors}, self.revision
        )
        self._kinds = {numbers[id(b)]: "buffer" for b in module.buffers() if id(b) in numbers}
        self._kinds.update(
            {numbers[id(p)]: "parameter" for p in module.parameters() if id(p) in numbers}
        )
        self.size = sum(self._contents.layout.sizes.values())

    def _make_update(self, held: int) -> StateChange:
        contents, attachments = self._contents, Attachments(self._link)
        report, kept = contents.kept_since(held)
        message = StateUpdate(
            model=self.id,
            revision=self.revision,
            bumped=contents.moved_since(held),
            structure=self._whole() if held < self.structure_at else None,
            edits=tuple(
                [(m, name, value) for (m, name), (at, value) in self._edits.items() if at > held]
            ),
            flags=contents.flags_since(held),
            blobs=contents.blobs_since(held, attachments),
            report=report,
            kept=kept,
        )
        return StateChange(
            message, attachments.beside, contents.sent(message.blobs) if message.blobs else 0
        )

    def _whole(self) -> Structure:
        contents = self._contents
        layout = contents.specs(), contents.layout.sizes
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
                "(device_ids[0]) but found one of them "
                f"on device: {tensor.device}"
            )
