"""Which tensors' memory Python code accessed without moving a version.

``p.data.mul_(2)`` changes ``p`` and moves no version. A comparison of every weight after every
forward would find it, but reads all weights twice. Recording each access to ``.data`` or
``.numpy()`` finds it at no cost.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

_METHODS = ("numpy", "__array__", "__dlpack__")


_PLAIN: Any = vars(torch._C.TensorBase)["data"]

_touched: set[int] | None = None
"""What the current block collects; None outside of a block."""

_stays = False
"""Whether `Tensor` keeps the recording attributes. Setting them makes Python drop its caches about
the class.
"""


class RawAccess:
    """Collect the storages that Python code accesses in the block, by the address of their first
    byte.
    """

    def __enter__(self) -> set[int]:
        global _touched
        self.touched: set[int] = set()
        self._before, _touched = _touched, self.touched
        if "data" not in vars(Tensor):
            _watch()
        return self.touched

    def __exit__(self, *_: object) -> None:
        global _touched
        _touched = self._before
        if _touched is None and not _stays:
            _leave()


def stay() -> None:
    """Keep the recording attributes for good: a replica's process does nothing else."""
    global _stays
    _stays = True


def _note(tensor: Tensor) -> None:
    if _touched is not None:
        with contextlib.suppress(Exception):  # tensors without a storage
            _touched.add(torch._C.TensorBase.untyped_storage(tensor).data_ptr())


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


_before: dict[str, Any] = {}


def _watch() -> None:
    _before.update({name: vars(Tensor).get(name) for name in _METHODS})
    type.__setattr__(Tensor, "data", property(_get, _set))
    for name in _METHODS:
        type.__setattr__(Tensor, name, _watched(getattr(Tensor, name)))


def _leave() -> None:
    type.__delattr__(Tensor, "data")
    for name, method in _before.items():
        type.__delattr__(Tensor, name) if method is None else type.__setattr__(Tensor, name, method)
