"""The plain tensors of a master: how they lie in memory, and when each was written last."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from raydp_parallel import devices
from raydp_parallel.devices.ranges import COPIED, MemoryRange, TensorSpec
from raydp_parallel.state import block_layout
from raydp_parallel.state.block_layout import SMALL, BlockLayout
from raydp_parallel.state.versions import Look, geometry, look, pointers, unlike, versions
from raydp_parallel.transport import codec
from raydp_parallel.transport.messages import SlotSpec

_device = attrgetter("device")


class Lookers:
    """How many tensors look at each storage. It is counted on demand: most blocks that change are
    too small to be moved.

    Args:
        row: All tensors.
    """

    def __init__(self, row: Iterable[Tensor]) -> None:
        self._row = row
        self._known: dict[int, set[int]] = defaultdict(set)

    @property
    def asked(self) -> bool:
        """Whether a count was asked for."""
        return bool(self._known)

    def of(self, storage: Any) -> int:
        """How many tensors of the row look at a storage."""
        if not self._known:
            for tensor in self._row:
                whole = tensor if tensor._base is None else tensor._base
                self._known[tensor.untyped_storage()._cdata] |= {id(tensor), id(whole)}
        return len(self._known[storage._cdata])


class MasterTensors:
    """The plain tensors of one module, by slot, and the revisions of their last changes.

    Attributes:
        layout: The blocks that they lie in.
        slots: Their slots.
        tensors: The tensors, in the order of the slots.
        small: The blocks that are small enough to lie in a run with others.
        seen: Their versions, addresses and flags when changes were last taken over.
    """

    def __init__(self) -> None:
        self.layout = BlockLayout({}, {}, {})
        self.slots: list[int] = []
        self.tensors: dict[int, Tensor] = {}
        self.small: set[int] = set()
        self.seen = Look([], [], [])
        self._row: list[Tensor] = []
        self._geometry: list[Any] = []
        self._version_at: dict[int, int] = {}
        self._flag_at: dict[int, int] = {}

    def adopt(self, tensors: dict[int, Tensor], revision: int) -> set[int]:
        """Take over a new set of tensors; returns the blocks that lie where they were, with the
        versions that they had.
        """
        before = dict(zip(self.slots, zip(*self.seen, strict=True), strict=True))
        layout, old = block_layout.lay_out(tensors), self.layout
        self.layout, self.tensors = layout, dict(sorted(tensors.items()))
        self.slots, self._row = [*self.tensors], [*self.tensors.values()]
        self._geometry, kinds = [], layout.specs
        self.small = {
            b for b, n in layout.sizes.items() if n <= SMALL and kinds[b].tensor.dtype in COPIED
        }
        self.seen = self.look()
        after = dict(zip(self.slots, zip(*self.seen, strict=True), strict=True))
        for slot in self.slots:
            if slot in before and before[slot][0] != after[slot][0]:
                self._version_at[slot] = revision
        return {
            block
            for block, members in layout.members.items()
            if old.members.get(block) == members
            and all(
                block_layout.alike(old.specs[s], layout.specs[s]) and before[s][:2] == after[s][:2]
                for s in members
            )
        }

    def look(self) -> Look:
        """The versions, addresses and flags of now."""
        return look(self._row)

    def versions(self) -> list[int]:
        """The version of every tensor, now."""
        return versions(self._row)

    def note(self, now: Look, revision: int) -> list[int]:
        """Take over versions, addresses and flags; returns the slots with versions that moved."""
        then, self.seen = self.seen, now
        if now.flags != then.flags:
            flags = zip(self.slots, now.flags, then.flags, strict=True)
            self._flag_at.update({slot: revision for slot, flag, before in flags if flag != before})
        written = [*map(self.slots.__getitem__, unlike(then.versions, now.versions))]
        self._version_at.update(dict.fromkeys(written, revision))
        return written

    def note_moves(self) -> None:
        """Take over addresses: storages were moved, with their contents."""
        self.seen = self.seen._replace(pointers=pointers(self._row))

    def elsewhere(self, now: Look) -> list[int] | None:
        """The slots of tensors with other addresses than were seen; None if one of them no longer
        lies as the layout says.
        """
        if now.pointers == self.seen.pointers:
            return []
        rows = unlike(self.seen.pointers, now.pointers)
        slots = [self.slots[i] for i in rows]
        # `fits` checks all of them, while the replicas work
        fit = self.fits(rows) and block_layout.lie_as(self.layout, self.tensors, slots)
        return slots if fit else None

    def fits(self, rows: Iterable[int] | None = None) -> bool:
        """Whether tensors, by default all, still have the sizes and strides that the layout
        says.
        """
        seen = geometry(self._row) if rows is None else []
        if seen and seen == self._geometry:
            return True
        chosen = range(len(self._row)) if rows is None else rows
        fit = False not in [
            _fits(self._row[i], self.layout.specs[self.slots[i]].tensor) for i in chosen
        ]
        self._geometry = seen if fit else []
        return fit

    def specs(self) -> dict[int, SlotSpec]:
        """The specs of all slots, with their current flags."""
        flags = zip(self.slots, self.seen.flags, strict=True)
        specs = self.layout.specs
        return {
            s: specs[s]._replace(tensor=specs[s].tensor._replace(requires_grad=flag))
            for s, flag in flags
        }

    def flags_since(self, held: int) -> tuple[tuple[int, bool], ...]:
        """The slots whose ``requires_grad`` changed after revision ``held``."""
        known, flags = self._flag_at, zip(self.slots, self.seen.flags, strict=True)
        if not known:
            return ()
        return tuple([(slot, flag) for slot, flag in flags if known.get(slot, 0) > held])

    def moved_since(self, held: int) -> tuple[int, ...]:
        """The slots whose version moved after revision ``held``."""
        return tuple(
            [slot for slot, at in self._version_at.items() if at > held and slot in self.tensors]
        )

    def moved_from(self, slots: list[int], then: list[int], held: int) -> tuple[int, ...]:
        """The slots with a version that differs both from ``then`` and from that at revision
        ``held``.

        ``slots`` are those of ``then``, in their order: the structure may have changed since.
        """
        now = self.versions()
        if slots is not self.slots:
            before = dict(zip(slots, then, strict=True))
            pairs = zip(self.slots, now, strict=True)
            then = [before.get(slot, version) for slot, version in pairs]
        if now == then:
            return ()
        rows = zip(self.slots, then, now, self.seen.versions, strict=True)
        known = {slot for slot in self.slots if self._version_at.get(slot, 0) <= held}
        return tuple(
            s for s, old, new, seen in rows if old != new and (new != seen or s not in known)
        )

    def devices(self) -> set[torch.device]:
        """The devices that they lie on."""
        return {*map(_device, self._row)}

    def lookers(self) -> Lookers:
        """How many of them look at each storage."""
        return Lookers(self._row)

    def members(self, block: int) -> list[Tensor]:
        """The tensors in a block."""
        return [self.tensors[slot] for slot in self.layout.members[block]]

    def device_of(self, block: int) -> torch.device:
        """The device of a block."""
        return self.tensors[self.layout.members[block][0]].device

    def read(self, block: int) -> MemoryRange:
        """The bytes of a block."""
        return block_layout.read(self.members(block))

    def start(self, block: int) -> int:
        """Where a block begins in its storage."""
        return block_layout.start(self.members(block))

    def over(self, block: int, source: MemoryRange) -> dict[int, Tensor]:
        """The tensors of a block's slots over other bytes of it."""
        slots = self.layout.members[block]
        specs = [self.layout.specs[slot] for slot in slots]
        kinds = [codec.DTYPES[spec.tensor.dtype] for spec in specs]
        placed = [
            spec.tensor._replace(offset=spec.offset * kind.itemsize)
            for spec, kind in zip(specs, kinds, strict=True)
        ]
        found = devices.windows(source, placed, kinds, self.device_of(block))
        return dict(zip(slots, found, strict=True))


def _fits(tensor: Tensor, spec: TensorSpec) -> bool:
    return (
        tensor.shape == spec.shape
        and codec.DTYPE_NAMES[tensor.dtype] == spec.dtype
        and (tensor.stride() == spec.stride or block_layout.is_loose(tensor))
        and block_layout.is_plain(tensor)
    )
