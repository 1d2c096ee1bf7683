"""Which tensors' memory Python code accessed without moving a version.

``p.data.mul_(2)`` changes ``p`` and moves no version. A comparison of every weight after every
forward would find it, but reads all weights twice. Recording each access to ``.data`` or
``.numpy()`` finds it at no cost.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from raydp_parallel import devices
from raydp_parallel.devices import forks, process
from raydp_parallel.devices.ranges import MemoryRange

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
