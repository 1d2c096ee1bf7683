"""Memory ranges as tensors of bytes, and tensors as their bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from raydp_parallel.devices.ranges import MemoryRange


def view(source: MemoryRange) -> Tensor:
    """A run of the machine's memory as a tensor of bytes."""
    if not source.size:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.from_numpy(np.asarray(_Bytes(source)))


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
