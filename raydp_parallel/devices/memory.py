"""Tensors as memory ranges, and memory ranges as tensors, on CPUs and GPUs."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Sequence

import torch

from raydp_parallel.devices import cuda
from raydp_parallel.devices.buffers import Arena
from raydp_parallel.devices.ranges import (
    MemoryRange,
    RowPlan,
    TensorSpec,
    cut,
    is_cpu,
    on_host,
    shaped,
    view,
)


def piece(tensor: torch.Tensor) -> MemoryRange:
    """The memory range of a compact tensor: a CPU's can be read, a GPU's has to be copied."""
    if not is_cpu(tensor.device):
        return cuda.on_device(tensor)
    return MemoryRange(tensor.data_ptr(), tensor.nbytes, tensor)


def reader(
    source: MemoryRange, device: torch.device
) -> Callable[[TensorSpec, torch.dtype], torch.Tensor]:
    """A function that makes the tensor of a spec from ``source``, on ``device``, in new memory."""
    if is_cpu(device):
        return functools.partial(_read_cpu, on_host(source))
    # One transfer for all tensors, which are views of its memory.
    return functools.partial(_read_window, upload(source, device).untyped_storage(), device)


def _read_cpu(source: MemoryRange, spec: TensorSpec, dtype: torch.dtype) -> torch.Tensor:
    # The device is named, as wherever a tensor is made: the caller may have set another default.
    tensor = torch.empty_strided(spec.shape, spec.stride, dtype=dtype, device="cpu")
    size = tensor.nbytes
    if size:
        ctypes.memmove(tensor.data_ptr(), source.address + spec.offset, size)
    return tensor


def in_place(source: MemoryRange) -> Callable[[TensorSpec, torch.dtype], torch.Tensor]:
    """A function that makes the tensor of a spec over the memory of ``source``, without a copy."""
    return functools.partial(_read_in_place, source)


def _read_in_place(source: MemoryRange, spec: TensorSpec, dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.empty(0, dtype=dtype, device="cpu")
    if 0 in spec.shape:
        return tensor.new_empty(spec.shape)
    # A storage of its own: with the neighbours in it all would be saved, pickled or kept alive.
    size = math.prod(spec.shape) * dtype.itemsize
    run = MemoryRange(source.address + spec.offset, size, source.owner)
    return tensor.set_(view(run).untyped_storage(), 0, spec.shape, spec.stride)


def row_copied(source: MemoryRange, plan: RowPlan, device: torch.device) -> list[torch.Tensor]:
    """The tensors of a row in new memory, as `reader` makes them, in few steps."""
    if not is_cpu(device):
        storage, new = upload(source, device).untyped_storage(), torch.empty
        made = [new(0, dtype=dtype, device=device) for dtype in plan.dtypes]
        places = zip(made, plan.elements, plan.shapes, plan.strides, strict=True)
        return [tensor.set_(storage, at, shape, stride) for tensor, at, shape, stride in places]
    begin, tensors = on_host(source).address, []
    for dtype, shape, stride, start in zip(*plan[:3], plan.starts, strict=True):
        tensor = torch.empty_strided(shape, stride, dtype=dtype, device="cpu")
        ctypes.memmove(tensor.data_ptr(), begin + start, tensor.nbytes)
        tensors.append(tensor)
    return tensors


def row_in_place(source: MemoryRange, plan: RowPlan) -> list[torch.Tensor]:
    """The tensors of a row over the memory of ``source``, as `in_place` makes them, in the fewest
    steps.
    """
    whole = view(source).untyped_storage()
    tensors = [torch.empty(0, dtype=dtype, device="cpu") for dtype in plan.dtypes]
    # A part of a storage is a storage of its own, which keeps the whole alive.
    parts = [whole[start:end] for start, end in zip(plan.starts, plan.ends, strict=True)]
    placed = zip(tensors, parts, plan.shapes, plan.strides, strict=True)
    return [tensor.set_(part, 0, shape, stride) for tensor, part, shape, stride in placed]


_recycled = Arena(shared=False)

RECYCLED = 1 << 20
"""Bytes from which computing into recycled memory is faster, by estimate."""


def recycled(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An empty tensor on the CPU in recycled memory: new pages from the system are slow."""
    size = math.prod(shape) * dtype.itemsize
    lent = _recycled.take(size)
    run = MemoryRange(lent.array.__array_interface__["data"][0], size, lent)
    return shaped(run, shape, dtype)


def scratch(like: torch.Tensor) -> torch.Tensor:
    """An empty tensor with the shape, dtype and device of a compact one, for short use."""
    if is_cpu(like.device) and like.nbytes >= RECYCLED:
        return recycled(like.shape, like.dtype)
    return torch.empty_like(like)


def _read_window(
    storage: torch.UntypedStorage, device: torch.device, spec: TensorSpec, dtype: torch.dtype
) -> torch.Tensor:
    tensor = torch.empty(0, dtype=dtype, device=device)
    if 0 in spec.shape:
        return tensor.new_empty(spec.shape)
    return tensor.set_(storage, spec.offset // dtype.itemsize, spec.shape, spec.stride)


def windows(
    source: MemoryRange,
    specs: Sequence[TensorSpec],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
) -> list[torch.Tensor]:
    """Tensors on ``device`` with the bytes of ``source``. On a CPU they are no copy, and may be
    read only as long as ``source`` lives.
    """
    whole = view(on_host(source)) if is_cpu(device) else upload(source, device)
    by_dtype: dict[torch.dtype, torch.Tensor] = {}
    found: list[torch.Tensor] = []
    for spec, dtype in zip(specs, dtypes, strict=True):
        if dtype not in by_dtype:
            whole_elements = len(whole) // dtype.itemsize * dtype.itemsize
            by_dtype[dtype] = whole[:whole_elements].view(dtype)
        offset = 0 if 0 in spec.shape else spec.offset // dtype.itemsize
        found.append(by_dtype[dtype].as_strided(spec.shape, spec.stride, offset))
    return found


def row_windows(source: MemoryRange, plan: RowPlan, device: torch.device) -> list[torch.Tensor]:
    """The tensors of a row as `windows` makes them, in the fewest steps."""
    whole = view(on_host(source)) if is_cpu(device) else upload(source, device)
    return cut(whole, plan)


SMALL = 1 << 22
"""Bytes of state up to which a device keeps a second copy, so that they are not fetched again."""


def near(source: MemoryRange, device: torch.device) -> MemoryRange:
    """The bytes of ``source`` on ``device``, by one transfer, if they are at most `SMALL`; else
    ``source`` itself.
    """
    if is_cpu(device) or not 0 < source.size <= SMALL:
        return source
    return piece(cuda.upload(source, device))


def load(target: torch.Tensor, source: MemoryRange) -> None:
    """Copy the bytes of ``source`` to a tensor of the same size."""
    load_all([target], [source])


def load_all(targets: Sequence[torch.Tensor], sources: Sequence[MemoryRange]) -> None:
    """Copy the bytes of some sources to tensors of one device, each of the same size; a GPU copies
    all at once.
    """
    if not is_cpu(targets[0].device):
        cuda.load_all(targets, sources)
        return
    for target, source in zip(targets, sources, strict=True):
        ctypes.memmove(target.data_ptr(), on_host(source).address, source.size)


def load_parts(
    targets: Sequence[torch.Tensor], source: MemoryRange, offsets: Sequence[int]
) -> None:
    """Copy parts of one run of bytes, which begin at some offsets, to tensors of one device, each
    of the part's size. No two parts overlap.
    """
    if not is_cpu(targets[0].device):
        cuda.load_parts(targets, source, offsets)
        return
    begin = on_host(source).address
    for target, offset in zip(targets, offsets, strict=True):
        ctypes.memmove(target.data_ptr(), begin + offset, target.nbytes)


def upload(source: MemoryRange, device: torch.device) -> torch.Tensor:
    """The bytes of ``source`` in new memory of ``device``."""
    if not source.size:
        return torch.empty(0, dtype=torch.uint8, device=device)
    if is_cpu(device):
        return view(on_host(source)).clone()
    return cuda.upload(source, device)
