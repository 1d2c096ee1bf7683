"""Tensors as specs and bytes. No raw tensor is ever pickled."""

from __future__ import annotations

import ctypes
import functools
import io
import math
import pickle
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import cloudpickle
import torch
from torch import Tensor, nn

from raydp_parallel import devices
from raydp_parallel.devices.ranges import MemoryRange, SpecRow, TensorSpec, address_of, aligned
from raydp_parallel.transport.links.link import Attachments
from raydp_parallel.transport.messages import Parcel

DTYPES = {str(d)[6:]: d for d in vars(torch).values() if isinstance(d, torch.dtype)}

DTYPE_NAMES = {d: name for name, d in DTYPES.items()}

_PLAIN = (Tensor, nn.Parameter)

_FEW = 16
"""The most tensors that are tried as small ones; more would take long to look through."""

_COMPRESSED = {
    torch.sparse_csr: (Tensor.crow_indices, Tensor.col_indices),
    torch.sparse_csc: (Tensor.ccol_indices, Tensor.row_indices),
    torch.sparse_bsr: (Tensor.crow_indices, Tensor.col_indices),
    torch.sparse_bsc: (Tensor.ccol_indices, Tensor.row_indices),
}


def write(
    tensor: Tensor, pieces: list[MemoryRange], offsets: list[int], end: int
) -> tuple[TensorSpec, int]:
    """Append a tensor's bytes to the pieces; returns its spec, and the offset of the next
    tensor.
    """
    if (
        tensor.layout is not torch.strided
        or tensor.is_nested
        or tensor.is_quantized
        or tensor.is_meta
    ):
        return _write_composed(tensor, pieces, offsets, end)
    cls = None if type(tensor) in _PLAIN else type(tensor)
    if cls is not None and hasattr(tensor, "__tensor_flatten__"):
        return _saved(tensor), end
    flat = compact(tensor)
    if cls is not None:
        flat = flat.as_subclass(Tensor)
    spec = spec_of(flat, end)
    if cls is not None:
        spec = spec._replace(cls=pack_class(cls))
    if flat.numel():
        pieces.append(devices.piece(flat))
        offsets.append(end)
        end += aligned(flat.nbytes)
    return spec, end


def write_small(
    tensors: Sequence[Tensor], attachments: Attachments, requires_grad: bool
) -> tuple[tuple[TensorSpec, ...], bytes] | None:
    """Specs and bytes of a few small and plain tensors, in the fewest steps; None if a tensor is
    large or not plain.
    """
    specs, runs, end = [], [], 0
    if len(tensors) > _FEW:
        return None
    for tensor in tensors:
        if (
            type(tensor) not in _PLAIN
            or tensor.layout is not torch.strided
            or tensor.is_nested
            or end + tensor.nbytes > attachments.link.inline
            or not devices.is_cpu(tensor.device)
            or tensor.is_quantized
        ):
            return None
        leaf = requires_grad and tensor.requires_grad
        if (
            tensor.is_conj()
            or tensor.is_neg()
            or tensor._is_zerotensor()
            or not tensor.is_contiguous()
        ):
            tensor = compact(tensor)
        specs.append(
            TensorSpec(DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), tensor.stride(), end, leaf)
        )
        size, until = tensor.nbytes, end + aligned(tensor.nbytes)
        runs += [ctypes.string_at(tensor.data_ptr(), size), bytes(until - end - size)]
        end = until
    attachments.size += end
    return tuple(specs), runs[0] if len(tensors) == 1 else b"".join(runs)


def read_small(parcel: Parcel) -> list[Tensor] | None:
    """The tensors of a parcel with its bytes in the message, in the fewest steps; None if a tensor
    is not plain.
    """
    begin, tensors = address_of(parcel.packet), []
    for spec in parcel.specs:
        if spec.layout != "strided" or spec.cls is not None:
            return None
        # The device is named, as wherever a tensor is made: the caller may have set a default.
        dtype = DTYPES[spec.dtype]
        tensor = torch.empty_strided(spec.shape, spec.stride, dtype=dtype, device="cpu")
        ctypes.memmove(tensor.data_ptr(), begin + spec.offset, tensor.nbytes)
        tensors.append(tensor.requires_grad_() if spec.requires_grad else tensor)
    return tensors


class RowLayout(NamedTuple):
    """The layout of a row of plain tensors in a packet.

    Attributes:
        specs: The specs of the tensors.
        sizes: The size of each in bytes.
        offsets: The first byte of each.
        end: The size of the packet in bytes.
    """

    specs: SpecRow
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    end: int


def write_row(tensors: Sequence[Tensor]) -> tuple[RowLayout, list[MemoryRange]] | None:
    """Specs and bytes of many plain tensors, such as a model's gradients; None if a tensor is not
    plain.

    The layout follows from shapes and dtypes alone and is cached, because each step has the same.
    """
    plain = {*map(type, tensors)} <= {*_PLAIN} and {*map(_layout, tensors)} == {torch.strided}
    if not plain or any(any(map(test, tensors)) for test in _SPECIAL):
        return None
    row = _row(tuple(map(_geometry, tensors)), tuple(map(Tensor.stride, tensors)))
    if row is None:
        return None
    if all(map(devices.is_cpu, {*map(_device, tensors)})):
        return row, [*map(MemoryRange, map(Tensor.data_ptr, tensors), row.sizes, tensors)]
    return row, [*map(devices.piece, tensors)]


_layout = attrgetter("layout")
_device = attrgetter("device")
_geometry = attrgetter("shape", "dtype")
_SPECIAL: tuple[Callable[[Tensor], bool], ...] = (
    *map(attrgetter, ("requires_grad", "is_nested", "is_quantized", "is_meta")),
    *(Tensor.is_conj, Tensor.is_neg, Tensor._is_zerotensor),
)
"""Tests that are all false for a tensor that is plain bytes and is in no graph."""


@functools.lru_cache(maxsize=64)
def _row(kinds: tuple[Any, ...], strides: tuple[tuple[int, ...], ...]) -> RowLayout | None:
    """The layout for some shapes, dtypes and strides; None if a tensor is empty or has gaps."""
    specs, sizes, end = [], [], 0
    for (shape, dtype), stride in zip(kinds, strides, strict=True):
        size = math.prod(shape) * dtype.itemsize
        if not size or not _is_run(shape, stride):
            return None
        specs.append(TensorSpec(DTYPE_NAMES[dtype], tuple(shape), stride, end))
        sizes.append(size)
        end += aligned(size)
    return RowLayout(SpecRow(specs), tuple(sizes), tuple([spec.offset for spec in specs]), end)


def _is_run(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether a tensor with elements is contiguous."""
    step = 1
    for size, found in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1 and found != step:
            return False
        step *= size
    return True


def _write_composed(
    tensor: Tensor, pieces: list[MemoryRange], offsets: list[int], end: int
) -> tuple[TensorSpec, int]:
    layout, parts, extra = _components(tensor)
    if not parts:
        return _saved(tensor), end
    specs = []
    for part in parts:
        spec, end = write(part, pieces, offsets, end)
        specs.append(spec)
    shape = () if layout == "nested" else tuple(tensor.shape)
    spec = TensorSpec(
        dtype=DTYPE_NAMES[tensor.dtype],
        shape=shape,
        stride=(),
        offset=end,
        layout=layout,
        parts=tuple(specs),
        extra=extra,
    )
    return spec, end


def _components(tensor: Tensor) -> tuple[str, list[Tensor], Any]:
    tensor = tensor.detach()
    if tensor.is_nested and tensor.numel():
        return "nested", list(tensor.unbind()), tensor.layout is torch.jagged
    if tensor.layout is torch.sparse_coo:
        return "sparse_coo", [tensor._indices(), tensor._values()], tensor.is_coalesced()
    if tensor.layout in _COMPRESSED:
        outer, inner = _COMPRESSED[tensor.layout]
        return str(tensor.layout)[6:], [outer(tensor), inner(tensor), tensor.values()], None
    return "saved", [], None


def _saved(tensor: Tensor) -> TensorSpec:
    """A spec that holds a tensor as `torch.save` writes it, for those without a simpler form
    (quantized tensors, wrapper subclasses).
    """
    file = io.BytesIO()
    torch.save(tensor.detach().clone(), file)  # a clone, so that the storage holds no other tensors
    return TensorSpec(DTYPE_NAMES[tensor.dtype], (), (), 0, layout="saved", extra=file.getvalue())


def rebuild(
    spec: TensorSpec, read: Callable[[TensorSpec, torch.dtype], Tensor], device: torch.device
) -> Tensor:
    """The tensor of a spec; ``read`` makes each strided part."""
    dtype = DTYPES[spec.dtype]
    if spec.layout == "strided":
        tensor = read(spec, dtype)
        return tensor if spec.cls is None else tensor.as_subclass(load_class(spec.cls))
    if spec.layout == "saved":
        saved: Tensor = torch.load(io.BytesIO(spec.extra), map_location=device, weights_only=False)
        return saved
    parts = [rebuild(part, read, device) for part in spec.parts]
    if spec.layout == "nested":
        return torch.nested.nested_tensor(
            parts, layout=torch.jagged if spec.extra else torch.strided, device=parts[0].device
        )
    if spec.layout == "sparse_coo":
        indices, values = parts
        return torch.sparse_coo_tensor(
            indices,
            values,
            spec.shape,
            is_coalesced=spec.extra,
            check_invariants=False,
            device=values.device,
        )
    outer, inner, values = parts
    layout = getattr(torch, spec.layout)
    return torch.sparse_compressed_tensor(
        outer, inner, values, spec.shape, layout=layout, device=values.device
    )


def compact(tensor: Tensor) -> Tensor:
    """The tensor with its bytes in one run: itself, or a copy with the same order of strides."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if tensor._is_zerotensor():  # which has no memory
        return tensor.clone()
    in_a_run = tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last)
    return tensor if in_a_run else tensor.clone(memory_format=torch.preserve_format)


def spec_of(tensor: Tensor, offset: int = 0) -> TensorSpec:
    """The spec of a compact strided tensor."""
    return TensorSpec(DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), tensor.stride(), offset)


def pack_class(cls: type) -> bytes:
    """A tensor class as bytes for a spec, by cloudpickle. Messages are pickled without cloudpickle,
    for speed.
    """
    data: bytes = cloudpickle.dumps(cls)
    return data


@functools.lru_cache(maxsize=64)
def load_class(data: bytes) -> Any:
    """The class of a spec."""
    return pickle.loads(data)
