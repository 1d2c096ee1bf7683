"""Arguments by reference: Ray brings the object to the chunk's replica, beside the message."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from raydp_parallel.batch.containers import Function, mapped


class ByReference:
    """An argument in Ray's object store: a reference for each chunk, or in a message its number.

    Args:
        refs: The references, in the order of chunks.
        prepare: Makes the argument of the object, in the replica.
    """

    def __init__(self, refs: Iterable[object], prepare: Function | None) -> None:
        self.refs, self.prepare = tuple(refs), prepare

    @property
    def ref(self) -> object:
        """The reference for one chunk, or for a call that is not split."""
        if len(self.refs) > 1:
            raise ValueError(
                f"{type(self).__name__}: {len(self.refs)} objects for a call that is not split: "
                "give one"
            )
        return self.refs[0]


def numbered(value: object, numbers: dict[object, int]) -> Any:
    """Put numbers in the places of the references among a chunk's arguments."""
    return mapped(value, ByReference, lambda one: ByReference([numbers[one.ref]], one.prepare))


def resolved(value: object, get: Callable[[Any], object], device: torch.device) -> Any:
    """Arguments with the objects that ``get`` gives for their references, on a device. It gives an
    exception for an object that cannot be had.
    """
    get = functools.cache(get)  # two arguments may be parts of one object

    def swap(one: ByReference) -> object:
        found = get(one.ref)
        if isinstance(found, BaseException):
            raise found
        if one.prepare is not None:
            with warnings.catch_warnings():
                # Nothing writes to it: what is still the object's own memory is copied.
                warnings.filterwarnings("ignore", "The given NumPy array is not writable")
                found = one.prepare(found)
        return mapped(found, Tensor, lambda t: _own(t, device))

    return mapped(value, ByReference, swap)


def _own(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on the device that the module may write to. One on an array's memory is copied: that
    is Ray's, which other processes see and a replay needs.
    """
    found = tensor.detach().to(device)
    strided = found.layout is torch.strided and not found.is_nested
    foreign = strided and not found.untyped_storage().resizable()
    return found.clone() if foreign else found
