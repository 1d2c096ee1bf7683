"""Who reached for a tensor's memory behind the back of its version.

``p.data.mul_(2)`` changes ``p`` and moves no version. Comparing every weight after every forward would find it, at the
price of reading all weights twice; noting who asked for ``.data`` or ``.numpy()`` finds it for nothing.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_METHODS = ("numpy", "__array__", "__dlpack__")


@contextlib.contextmanager
def raw_access() -> Iterator[set[int]]:
    """Collect the storages that Python code reaches for in the block, by the address of their first byte."""
    touched: set[int] = set()
    plain: types.GetSetDescriptorType = vars(torch._C.TensorBase)["data"]

    def note(tensor: Tensor) -> None:
        with contextlib.suppress(Exception):  # tensors without a storage
            touched.add(torch._C.TensorBase.untyped_storage(tensor).data_ptr())

    def get(tensor: Tensor) -> Tensor:
        note(tensor)
        data: Tensor = plain.__get__(tensor)
        return data

    def watched(method: Any) -> Any:
        def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            note(tensor)
            return method(tensor, *args, **kwargs)

        return call

    before = {name: vars(Tensor).get(name) for name in _METHODS}
    type.__setattr__(Tensor, "data", property(get, plain.__set__))
    for name in _METHODS:
        type.__setattr__(Tensor, name, watched(getattr(Tensor, name)))
    try:
        yield touched
    finally:
        type.__delattr__(Tensor, "data")
        for name, method in before.items():
            type.__delattr__(Tensor, name) if method is None else type.__setattr__(Tensor, name, method)
