"""Descriptions of tensors and of replicas, in plain types that are sent between processes."""

from __future__ import annotations

import functools
import math
import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch


class TensorSpec(NamedTuple):
    """The description by which one tensor is rebuilt from a parcel's bytes.

    Attributes:
        dtype: Name of the dtype, as in ``torch.<name>``.
        shape: Its sizes.
        stride: Its strides, in elements.
        offset: Its first byte in the parcel.
        requires_grad: Whether the receiver makes it a leaf that requires a gradient.
        cls: The pickled tensor subclass to restore, None for a plain tensor.
        layout: ``"strided"``, or the name of a layout with the components ``parts``.
        parts: The specs of the components of a tensor that is not strided.
        extra: Further plain values of the layout, such as whether a sparse tensor is coalesced.
    """

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    requires_grad: bool = False
    cls: bytes | None = None
    layout: str = "strided"
    parts: tuple[TensorSpec, ...] = ()
    extra: Any = None


class RowPlan(NamedTuple):
    """What reading a row of plain tensors takes, by tensor: computed once, used in each step.

    Attributes:
        dtypes: The dtypes.
        shapes: The sizes.
        strides: The strides, in elements.
        elements: The first element of each, counted in its dtype from the parcel's first byte.
        starts: The first byte of each.
        ends: The byte behind each.
    """

    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[tuple[int, ...], ...]
    strides: tuple[tuple[int, ...], ...]
    elements: tuple[int, ...]
    starts: tuple[int, ...]
    ends: tuple[int, ...]


class SpecRow(tuple[TensorSpec, ...]):
    """The specs of one parcel, with what follows from them alone.

    A model's gradients have the same specs in each step, and a process gets the same object for
    them (see `message_bytes`), so that this is computed once and not for each tensor in each step.
    """

    def __reduce__(self) -> Any:
        return SpecRow, (tuple(self),)

    @functools.cached_property
    def packed(self) -> bytes:
        """The specs as bytes, from which `load` makes them."""
        return pickle.dumps([*map(tuple, self)], protocol=pickle.HIGHEST_PROTOCOL)

    @staticmethod
    def load(data: bytes) -> SpecRow:
        """The specs for the bytes that `packed` gave."""
        return SpecRow(map(_new_spec, pickle.loads(data)))

    @functools.cached_property
    def _parts(self) -> dict[tuple[int, ...], SpecRow]:
        return {}

    def chosen(self, numbers: Sequence[int]) -> SpecRow:
        """The specs with some numbers, as a row of their own, mostly the same object as before."""
        key = tuple(numbers)
        if key == tuple(range(len(self))):
            return self
        part = self._parts.get(key)
        if part is None:
            if len(self._parts) >= _PARTS:
                self._parts.clear()
            part = self._parts[key] = SpecRow([self[number] for number in key])
        return part

    @functools.cached_property
    def plan(self) -> RowPlan | None:
        """How the tensors are read together; None if one of them is not plain, is empty, or is a
        leaf.
        """
        found: list[Any] = []
        for spec in self:
            if spec.layout != "strided" or spec.cls is not None or spec.requires_grad:
                return None
            dtype: torch.dtype = getattr(torch, spec.dtype)
            size = math.prod(spec.shape) * dtype.itemsize
            if not size or spec.offset % dtype.itemsize:
                return None
            places = spec.offset // dtype.itemsize, spec.offset, spec.offset + size
            found.append((dtype, spec.shape, spec.stride, *places))
        return RowPlan(*zip(*found, strict=True)) if found else None


_PARTS = 4
"""The most parts of a row that are kept: a sum over chunks takes the small ones and the rest."""

_new_spec: Any = functools.partial(tuple.__new__, TensorSpec)


class ReplicaHello(NamedTuple):
    """The description of itself that a replica sends when it starts.

    Attributes:
        pid: The id of its process.
        node: Ray's id of its node.
        device: Its torch device, as text.
        gpu: Name of its GPU, empty on a CPU.
        gpu_uuid: The GPU's uuid, empty on a CPU.
        memory: The device's bytes, 0 on a CPU.
        processors: The device's multiprocessors, 0 on a CPU.
        gpu_index: The GPU's number on its node, empty on a CPU.
        cores: The number of cores that its process may use, 0 if unknown.
    """

    pid: int
    node: str
    device: str
    gpu: str
    gpu_uuid: str
    memory: int
    processors: int
    gpu_index: str = ""
    cores: int = 0
