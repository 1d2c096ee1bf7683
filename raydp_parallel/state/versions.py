"""What shows that tensors were written, without reading them: versions, addresses and flags, of a
replica's tensors (`TensorRow`) and of the master's (`MasterTensors`), and accesses to memory that
move no version.

``p.data.mul_(2)`` changes ``p`` and moves no version. A comparison of every weight after every
forward would find it, but reads all weights twice. Recording each access to ``.data`` or
``.numpy()`` finds it at no cost.
"""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from raydp_parallel import devices
from raydp_parallel.devices import forks, process
from raydp_parallel.devices.ranges import COPIED, MemoryRange, TensorSpec
from raydp_parallel.state import block_layout
from raydp_parallel.state.block_layout import SMALL, BlockLayout
from raydp_parallel.transport import codec
from raydp_parallel.transport.messages import SlotSpec

# What `torch.autograd.graph.increment_version` calls; in a process that was idle its Python wrapper
# takes as long again.
_increment = torch._C._increment_version

_version = attrgetter("_version")
_flag = attrgetter("requires_grad")


_kind = attrgetter("shape", "dtype", "layout", "is_nested", "is_quantized", "is_meta")


class Look(NamedTuple):
    """The versions, addresses and flags of a row of tensors at one moment.

    Attributes:
        versions: How often each tensor was written to.
        pointers: The address of each.
        flags: Whether each requires a gradient.
    """

    versions: list[int]
    pointers: list[int]
    flags: list[bool]


def look(row: Sequence[Tensor]) -> Look:
    """Read them now."""
    return Look(versions(row), pointers(row), [*map(_flag, row)])


def versions(row: Sequence[Tensor]) -> list[int]:
    """The version of every tensor; 0 for inference tensors, which have none."""
    try:
        return [*map(_version, row)]
    except RuntimeError:
        return [0 if t.is_inference() else t._version for t in row]


def pointers(row: Sequence[Tensor]) -> list[int]:
    """The address of every tensor."""
    return [*map(Tensor.data_ptr, row)]


def geometry(row: Sequence[Tensor]) -> list[Any]:
    """All other properties of how tensors lie in memory; empty if some tensor lacks one of them."""
    try:
        found: list[Any] = [*map(type, row), *map(_kind, row), *map(Tensor.stride, row)]
        return [*found, *map(Tensor.is_conj, row), *map(Tensor.is_neg, row)]
    except RuntimeError:  # a layout without strides, or without a shape
        return []


def unlike(then: Sequence[Any], now: Sequence[Any]) -> list[int]:
    """The places in a row where two of its looks differ."""
    return [i for i, (a, b) in enumerate(zip(then, now, strict=True)) if a != b]


class TensorRow:
    """Tensors by slot, with the versions and addresses that were last read.

    Args:
        tensors: The tensors.
    """

    def __init__(self, tensors: Mapping[int, Tensor]) -> None:
        self._tensors = tensors
        self._row = [*tensors.values()]
        self._pointers = pointers(self._row)
        self._versions = versions(self._row)
        self._bumped: tuple[tuple[int, ...], list[Tensor]] = (), []

    def settle(self) -> None:
        """Let `moved` and `stirred` compare with the versions of now."""
        self._versions = versions(self._row)

    def stirred(self) -> bool:
        """Whether any version moved since the last call of `moved`."""
        return self._versions != versions(self._row)

    def moved(self) -> set[int]:
        """The slots with versions that moved since the last call."""
        then, self._versions = self._versions, versions(self._row)
        if then == self._versions:
            return set()
        slots = [*self._tensors]
        return {slots[i] for i in unlike(then, self._versions)}

    def elsewhere(self) -> set[int]:
        """The slots of tensors that have another address than at first."""
        now = pointers(self._row)
        if now == self._pointers:
            return set()
        slots = [*self._tensors]
        return {slots[i] for i in unlike(self._pointers, now)}

    def bump(self, slots: tuple[int, ...]) -> None:
        """Move the versions of some slots. Mostly they are the same with each step of an optimizer,
        so the tensors are kept.
        """
        if slots != self._bumped[0]:
            self._bumped = slots, [self._tensors[slot] for slot in slots if slot in self._tensors]
        bump(self._bumped[1])


def bump(tensors: Sequence[Tensor]) -> None:
    """Move versions, so that torch's check for in-place changes sees what the driver changed in the
    master.
    """
    if tensors:
        _increment(tensors)  # it skips inference tensors, which have no version


_METHODS = ("numpy", "__array__", "__dlpack__")


_PLAIN: Any = vars(torch._C.TensorBase)["data"]


class _Collectors:
    """The open blocks of `RawAccess`, of all threads of the process.

    An access is entered into each of them: a module may start threads, and an entry too many only
    costs a comparison.
    """

    def __init__(self) -> None:
        self.open: list[set[int]] = []
        self._before: dict[str, Any] = {}
        self._lock = threading.Lock()
        forks.tell_child(self)

    def after_fork(self) -> None:
        """Make the lock anew: the thread that held it is not in the child."""
        self._lock = threading.Lock()

    def add(self, touched: set[int]) -> None:
        """Enter accesses into a set from now on."""
        with self._lock:
            self.open.append(touched)
            if "data" not in vars(Tensor):
                self._watch()

    def remove(self, touched: set[int]) -> None:
        """Enter no more accesses into a set. In a replica's process `Tensor` keeps the recording
        attributes, because setting them makes Python drop its caches about the class.
        """
        with self._lock:
            self.open = [one for one in self.open if one is not touched]
            if not self.open and not process.of_replica():
                self._leave()

    def _watch(self) -> None:
        self._before = {name: vars(Tensor).get(name) for name in _METHODS}
        type.__setattr__(Tensor, "data", property(_get, _set))
        for name in _METHODS:
            type.__setattr__(Tensor, name, _watched(getattr(Tensor, name)))

    def _leave(self) -> None:
        type.__delattr__(Tensor, "data")
        for name, method in self._before.items():
            if method is None:
                type.__delattr__(Tensor, name)
            else:
                type.__setattr__(Tensor, name, method)


_collectors = _Collectors()


class Accessed(set[int]):
    """The addresses of storages that were accessed. Of some the contents are kept as they were
    before, to find out whether they were written to.

    Args:
        watched: Gives these, by their addresses.
    """

    def __init__(self, watched: Callable[[], Mapping[int, MemoryRange]] = dict) -> None:
        super().__init__()
        self._find = watched
        self._watched: Mapping[int, MemoryRange] | None = None
        self._before: dict[int, MemoryRange] = {}

    def add(self, address: int) -> None:
        """Enter an access, before it is made."""
        if address in self:
            return
        super().add(address)
        if self._watched is None:
            self._watched = self._find()
        if address in self._watched:
            self._before[address] = devices.copied(self._watched[address])

    def before(self, address: int) -> MemoryRange | None:
        """The contents that were at an address, if they are kept."""
        return self._before.get(address)

    def only_read(self) -> set[int]:
        """The addresses of those with the contents of before."""
        now = self._watched or {}
        pairs = [(now[address], before) for address, before in self._before.items()]
        answers = zip(self._before, devices.compare(pairs)(), strict=True)
        return {address for address, alike in answers if alike}


class RawAccess:
    """Collect the storages that Python code accesses in the block, by the address of their first
    byte.
    """

    touched = Accessed()

    def watched(self) -> Callable[[], Mapping[int, MemoryRange]]:
        """A function that gives what is compared, by its address, if it is accessed. It is no
        method of this object, which would then be freed by the collector of garbage alone.
        """
        return dict

    def __enter__(self) -> Accessed:
        self.touched = Accessed(self.watched())
        _collectors.add(self.touched)
        return self.touched

    def __exit__(self, *_: object) -> None:
        _collectors.remove(self.touched)


def _note(tensor: Tensor) -> None:
    if _collectors.open:
        with contextlib.suppress(Exception):  # tensors without a storage
            address = torch._C.TensorBase.untyped_storage(tensor).data_ptr()
            for touched in _collectors.open:
                touched.add(address)


def _get(tensor: Tensor) -> Tensor:
    _note(tensor)
    data: Tensor = _PLAIN.__get__(tensor)
    return data


def _set(tensor: Tensor, data: Tensor) -> None:
    _note(tensor)
    _PLAIN.__set__(tensor, data)


def _watched(method: Any) -> Any:
    def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        _note(tensor)
        return method(tensor, *args, **kwargs)

    return call


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
        """The slots with a ``requires_grad`` that changed after revision ``held``."""
        known, flags = self._flag_at, zip(self.slots, self.seen.flags, strict=True)
        if not known:
            return ()
        return tuple([(slot, flag) for slot, flag in flags if known.get(slot, 0) > held])

    def moved_since(self, held: int) -> tuple[int, ...]:
        """The slots with a version that moved after revision ``held``."""
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
