"""Changes of objects that the module refers to, sent as such: what forward appended to a list,
counted, or put into a dict comes back with one device, and would otherwise go to the replica again
as part of the whole structure.

Only the last forward's changes are kept, for replicas that hold what was before. All others get the
structure, which is recorded anew then.
"""

from __future__ import annotations

import weakref
from collections.abc import Container, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from raydp_parallel.state.module_parts import ModuleParts, PartKey
from raydp_parallel.state.shared_objects import ATOMS, ObjectContents, ObjectEdit, ObjectsBefore
from raydp_parallel.state.versions import versions
from raydp_parallel.transport import codec
from raydp_parallel.transport.links import Attachments
from raydp_parallel.transport.messages import Failure, Parcel


class Outdated(Exception):
    """A replica has to build its module anew, and the structure that it has is older than what it
    was sent since.
    """


def is_outdated(failure: Failure) -> bool:
    """Whether a replica needs the structure."""
    return failure.name.rpartition(".")[2] == Outdated.__name__


class _Loose(NamedTuple):
    """A tensor in such an object, which has no slot, as it was sent."""

    ref: weakref.ref[Tensor]
    version: int
    copy: Tensor


class ObjectEdits:
    """The driver's side, for one master.

    Attributes:
        is_off: Whether each change sends the structure, because a replica was outdated.
        base: The revision that the last changes are made to.
        revision: Their own; 0 for none since the structure was recorded.
    """

    def __init__(self) -> None:
        self.is_off = False
        self.base = self.revision = 0
        self._edits: dict[PartKey, ObjectEdit] = {}
        self._objects: dict[PartKey, Any] = {}
        self._then = ObjectsBefore(())
        self._counts: dict[tuple[int, str], int] = {}
        self._loose: list[_Loose] = []

    def begin(self, parts: ModuleParts) -> None:
        """Begin with a structure that was recorded just now."""
        self.base = self.revision = 0
        self._edits, self._loose = {}, []
        self._counts = parts.counts()
        self._look(parts)

    def find(
        self, parts: ModuleParts, changed: Sequence[Any], slots: Container[int]
    ) -> dict[PartKey, ObjectEdit] | None:
        """What was done to objects since they were last sent; None if that needs the structure.

        Args:
            parts: What the module refers to.
            changed: All objects that changed.
            slots: The ids of tensors that have slots.
        """
        if self.is_off:
            return None
        keys, objects = [*self._objects], [*self._objects.values()]
        found: dict[PartKey, ObjectEdit] = {}
        covered = set()
        for number, now in self._then.changes().items():
            edit = self._then.edit(number, ObjectContents(*now))
            if parts.objects.get(keys[number]) is not objects[number]:
                return None
            if edit is None or not all(_travels(value, slots) for value in edit.values()):
                return None
            found[keys[number]] = edit
            covered.add(id(objects[number]))
        if not covered >= {*map(id, changed)}:
            return None
        parts.look_again(found)
        return found if parts.counts() == self._counts else None

    def enter(
        self, parts: ModuleParts, found: dict[PartKey, ObjectEdit], base: int, revision: int
    ) -> None:
        """Enter what `find` found."""
        self._edits, self.base, self.revision = found, base, revision
        self._look(parts)
        self._loose = [loose for loose in self._loose if loose.ref() is not None]
        for edit in found.values():
            for value in edit.values():
                if isinstance(value, Tensor):
                    copy = value.detach().clone()
                    self._loose.append(_Loose(weakref.ref(value), versions([value])[0], copy))

    def _look(self, parts: ModuleParts) -> None:
        self._objects = dict(parts.objects)
        self._then = ObjectsBefore([*self._objects.values()])

    def look_alike(self) -> bool:
        """Whether versions show that tensors in objects are as they were sent."""
        return all(
            versions([tensor])[0] == loose.version
            for loose in self._loose
            if (tensor := loose.ref()) is not None
        )

    def are_alike(self) -> bool:
        """Whether contents show it."""
        return all(
            torch.equal(tensor, loose.copy)
            for loose in self._loose
            if (tensor := loose.ref()) is not None
        )

    def lacks(self, held: int) -> bool:
        """Whether a replica that holds a revision needs the structure."""
        return held < self.base

    def since(self, held: int, attachments: Attachments) -> Parcel | None:
        """The message for such a replica that does not; None if it holds all."""
        if held >= self.revision:
            return None
        return codec.encode(self._edits, attachments, "state")[0]


def _travels(value: Any, slots: Container[int]) -> bool:
    if type(value) in ATOMS:
        return True
    plain = type(value) is Tensor and value.layout is torch.strided
    return plain and not value.requires_grad and id(value) not in slots
