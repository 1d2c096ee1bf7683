"""Runs of bytes: where they lie, copies of them, tensors over them, and descriptions of tensors in
them, in plain types that are sent between processes.
"""

from __future__ import annotations

import ctypes
import functools
import math
import pickle
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

HOST = frozenset({"cpu"})
"""Types of devices with tensors in the machine's memory."""


def is_cpu(device: torch.device) -> bool:
    """Whether tensors of ``device`` lie in memory that other processes of the machine may share."""
    return device.type in HOST


ALIGNMENT = 64
PAGE = 4096
_LARGE = 1 << 16
"""Bytes from which a run of memory begins on a page, so that it can be mapped."""

Attachment = Any
"""What a link makes of some bytes: bytes, which lie in the message, or an object beside it."""


class DeviceRange(Protocol):
    """Memory of a device, which the CPU cannot read."""

    device: Any
    """The device. Copies of one device finish in order, those of two devices do not."""

    @property
    def tensor(self) -> Any:
        """The bytes, as a tensor of the device."""

    def part(self, offset: int, size: int) -> DeviceRange:
        """A part of the bytes."""

    def placed(self, whole: Any) -> tuple[Sequence[Any], Sequence[Any]]:
        """What a copy of the bytes to a run of as many writes to, and what it reads: tensors."""

    def copy_to(self, address: int) -> None:
        """Begin to copy the bytes to the CPU's memory."""

    def wait(self) -> None:
        """Wait for the copies that this and earlier `copy_to` calls of the device began."""

    def settle(self) -> None:
        """After `wait`: finish copies that went through other memory."""


class MemoryRange(NamedTuple):
    """A run of bytes.

    Attributes:
        address: The first byte's address in the CPU's memory; 0 if it lies on a device.
        size: The number of bytes.
        owner: The object that keeps the memory alive.
        origin: The memory of the device that it lies on, None for the CPU's memory.
    """

    address: int
    size: int
    owner: Any
    origin: DeviceRange | None = None

    def part(self, offset: int, size: int) -> MemoryRange:
        """A part of the bytes."""
        if self.origin is not None:
            return MemoryRange(0, size, self.owner, self.origin.part(offset, size))
        return MemoryRange(self.address + offset, size, self.owner)


def address_of(packet: bytes) -> int:
    """The address of a bytes object's contents, valid as long as the object lives."""
    return ctypes.c_void_p.from_buffer(ctypes.c_char_p(packet)).value or 0


def in_bytes(packet: bytes) -> MemoryRange:
    """The memory range of a bytes object, which the range keeps alive."""
    return MemoryRange(address_of(packet), len(packet), packet)


def aligned(size: int) -> int:
    """``size`` rounded up so that what follows is aligned for every dtype."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def paged(offset: int, size: int) -> int:
    """The first offset, from ``offset`` on, for ``size`` bytes: large runs begin on a page, so that
    they can be mapped.
    """
    if size < _LARGE:
        return offset
    return -(-offset // PAGE) * PAGE


def fill(address: int, pieces: Sequence[MemoryRange], offsets: Sequence[int]) -> None:
    """Copy the pieces to their offsets from ``address``."""
    on_devices: list[DeviceRange] = []
    for piece, offset in zip(pieces, offsets, strict=True):
        if piece.origin is None:
            ctypes.memmove(address + offset, piece.address, piece.size)
        elif piece.size:
            piece.origin.copy_to(address + offset)
            on_devices.append(piece.origin)
    last_of_device = {origin.device: origin for origin in on_devices}
    for origin in last_of_device.values():
        origin.wait()
    for origin in on_devices:
        origin.settle()


def on_host(source: MemoryRange) -> MemoryRange:
    """The same bytes in the machine's memory."""
    if source.origin is None:
        return source
    target = torch.empty(source.size, dtype=torch.uint8, device="cpu")
    fill(target.data_ptr(), [source], [0])
    return MemoryRange(target.data_ptr(), source.size, target)


def view(source: MemoryRange) -> Tensor:
    """A run of the machine's memory as a tensor of bytes."""
    if not source.size:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.from_numpy(np.asarray(_Bytes(source)))


def data_of(source: MemoryRange) -> Tensor:
    """A run of bytes as a tensor, where it lies."""
    found: Tensor = view(source) if source.origin is None else source.origin.tensor
    return found


def shaped(source: MemoryRange, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A run of the machine's memory as a contiguous tensor. It is no view of another one, because
    autograd restricts changes of views.
    """
    strides = [math.prod(shape[at + 1 :]) for at in range(len(shape))]
    tensor = torch.empty(0, dtype=dtype, device="cpu")
    return tensor.set_(view(source).untyped_storage(), 0, tuple(shape), strides)


class _Bytes:
    """Memory with NumPy's array interface. A ctypes array is not used: each length makes a class,
    which only the garbage collector frees.
    """

    def __init__(self, source: MemoryRange) -> None:
        self._source = source
        self.__array_interface__ = {
            "data": (source.address, False),
            "shape": (source.size,),
            "typestr": "|u1",
            "version": 3,
        }


def bytes_of(tensor: Tensor) -> Tensor:
    """The bytes of a tensor that is one run, as a tensor of bytes over the same memory."""
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    start: int = tensor.storage_offset() * tensor.itemsize  # type: ignore[assignment]  # SymInt while tracing only
    return flat.set_(tensor.untyped_storage(), start, (tensor.nbytes,), (1,))


COPIED = frozenset(
    (
        *("float64", "float32", "float16", "bfloat16", "complex128", "complex64"),
        *("bool", "int64", "int32", "int16", "int8", "uint8"),
    )
)
"""The dtypes of tensors that torch copies many of at once, on each device."""


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


def cut(whole: Tensor, plan: RowPlan) -> list[Tensor]:
    """The tensors of a row over a run of bytes, in the fewest steps."""
    by_dtype = {
        dtype: whole[: len(whole) // dtype.itemsize * dtype.itemsize].view(dtype)
        for dtype in {*plan.dtypes}
    }
    runs = map(by_dtype.__getitem__, plan.dtypes)
    return [*map(torch.as_strided, runs, plan.shapes, plan.strides, plan.elements)]


def copy_each(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Begin to copy each of some tensors to another one of its dtype. On a GPU those of a dtype are
    one operation: torch would copy each by itself if dtypes differ.
    """
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        kinds = {*map(_dtype, sources)}
        for kind in kinds:
            into, of = targets, sources
            if len(kinds) > 1:
                rows = [row for row, source in enumerate(sources) if source.dtype is kind]
                into, of = [targets[row] for row in rows], [sources[row] for row in rows]
            torch._foreach_copy_([*into], [*of], non_blocking=True)


_dtype = attrgetter("dtype")
