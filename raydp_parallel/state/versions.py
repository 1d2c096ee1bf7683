"""What shows that tensors were written, without reading them: versions, addresses and flags, and
accesses to memory that move no version.

``p.data.mul_(2)`` changes ``p`` and moves no version. A comparison of every weight after every
forward would find it, but reads all weights twice. Recording each access to ``.data`` or
``.numpy()`` finds it at no cost.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from raydp_parallel import devices
from raydp_parallel.devices import forks, process
from raydp_parallel.devices.ranges import MemoryRange

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
