"""Bytes of tensors as memory, and tensors out of memory, on either kind of device."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Sequence

import torch

from raydp_parallel.devices import cuda
from raydp_parallel.devices.buffers import Arena
from raydp_parallel.devices.kinds import is_cpu
from raydp_parallel.devices.ranges import MemoryRange
from raydp_parallel.devices.raw import shaped, view
from raydp_parallel.devices.specs import TensorSpec


def piece(tensor: torch.Tensor) -> MemoryRange:
    """The bytes of a compact tensor, where they are: a CPU's to be read, a GPU's to be copied."""
    if not is_cpu(tensor.device):
        return cuda.on_device(tensor)
    return MemoryRange(tensor.data_ptr(), tensor.nbytes, tensor)


def reader(
    source: MemoryRange, device: torch.device
) -> Callable[[TensorSpec, torch.dtype], torch.Tensor]:
    """A function that makes the tensor of a spec out of ``source``, on ``device`` and in memory of
    its own.
    """
    if is_cpu(device):
        return functools.partial(_read_cpu, cuda.on_host(source))
    # One transfer for all of them; the tensors are windows of it.
    return functools.partial(_read_window, upload(source, device).untyped_storage(), device)


def _read_cpu(source: MemoryRange, spec: TensorSpec, dtype: torch.dtype) -> torch.Tensor:
    # The device by name, here and wherever a tensor is made: the caller may have set another
    # default.
    tensor = torch.empty_strided(spec.shape, spec.stride, dtype=dtype, device="cpu")
    size = tensor.nbytes
    if size:
        ctypes.memmove(tensor.data_ptr(), source.address + spec.offset, size)
    return tensor


def in_place(source: MemoryRange) -> Callable[[TensorSpec, torch.dtype], torch.Tensor]:
    """A function that makes the tensor of a spec out of ``source``, where it lies."""
    return functools.partial(_read_in_place, source)


def _read_in_place(source: MemoryRange, spec: TensorSpec, dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.empty(0, dtype=dtype, device="cpu")
    if 0 in spec.shape:
        return tensor.new_empty(spec.shape)
    # A storage for itself: of one that held its neighbours too all would be saved, pickled or kept
    # alive.
    run = MemoryRange(
        source.address + spec.offset, math.prod(spec.shape) * dtype.itemsize, source.owner
    )
    return tensor.set_(view(run).untyped_storage(), 0, spec.shape, spec.stride)


_recycled = Arena(shared=False)

RECYCLED = 1 << 20
"""Bytes from which it pays to compute into memory that was used before, by estimate."""


def recycled(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An empty tensor on the CPU, in memory that goes from one to the next: pages new from the
    system are slow.
    """
    size = math.prod(shape) * dtype.itemsize
    lent = _recycled.take(size)
    run = MemoryRange(lent.array.__array_interface__["data"][0], size, lent)
    return shaped(run, shape, dtype)


def scratch(like: torch.Tensor) -> torch.Tensor:
    """An empty tensor such as a compact one, for a moment."""
    kept = is_cpu(like.device) and like.nbytes >= RECYCLED
    return recycled(like.shape, like.dtype) if kept else torch.empty_like(like)


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
    """Tensors on ``device`` over the bytes of ``source``; on a CPU they are no copy, to be read
    while it lives.
    """
    whole = view(cuda.on_host(source)) if is_cpu(device) else upload(source, device)
    runs = {
        dtype: whole[: len(whole) // dtype.itemsize * dtype.itemsize].view(dtype)
        for dtype in {*dtypes}
    }
    return [
        runs[dtype].as_strided(
            spec.shape, spec.stride, spec.offset // dtype.itemsize if 0 not in spec.shape else 0
        )
        for spec, dtype in zip(specs, dtypes, strict=True)
    ]


SMALL = 1 << 22
"""Bytes of state that a device may hold a second time, so that it need not ask for them again."""


def near(source: MemoryRange, device: torch.device) -> MemoryRange:
    """The bytes of ``source`` where ``device`` reads them fastest, in one transfer, if they are
    few.
    """
    return (
        source
        if is_cpu(device) or not 0 < source.size <= SMALL
        else piece(cuda.upload(source, device))
    )


def load(target: torch.Tensor, source: MemoryRange) -> None:
    """Copy the bytes of ``source`` to a tensor of as many bytes."""
    load_all([target], [source])


def load_all(targets: Sequence[torch.Tensor], sources: Sequence[MemoryRange]) -> None:
    """Copy the bytes of some sources to tensors of one device, each of as many bytes; a GPU copies
    all at once.
    """
    if not is_cpu(targets[0].device):
        cuda.load_all(targets, sources)
        return
    for target, source in zip(targets, sources, strict=True):
        ctypes.memmove(target.data_ptr(), cuda.on_host(source).address, source.size)


def upload(source: MemoryRange, device: torch.device) -> torch.Tensor:
    """The bytes of ``source`` in new memory of ``device``."""
    if not source.size:
        return torch.empty(0, dtype=torch.uint8, device=device)
    return view(cuda.on_host(source)).clone() if is_cpu(device) else cuda.upload(source, device)
