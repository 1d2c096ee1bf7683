"""Devices, CPU and CUDA alike. Nobody else in the package asks whether a tensor is on CUDA."""

from __future__ import annotations

import ctypes
import functools
import logging
import math
import random
import time
import warnings
from collections.abc import Callable, Sequence

import numpy as np
import torch

from raydp_parallel.links import Arena, Piece
from raydp_parallel.messages import Hello, TensorSpec

log = logging.getLogger("raydp_parallel")


def output_place(target: int | str | torch.device) -> torch.device:
    """The driver's device that a ``target_device`` or ``output_device`` names.

    An int is a CUDA index, as upstream; ``-1`` is the CPU, with upstream's warning. Device ids are logical
    here, so on a driver without CUDA every index names the CPU, where such a driver's master copy lives.
    """
    if isinstance(target, int) and not isinstance(target, bool):
        if target == -1:
            warnings.warn(
                "Using -1 to represent CPU tensor is deprecated. Please use a "
                'device object or string instead, e.g., "cpu".',
                FutureWarning,
                stacklevel=3,
            )
            return torch.device("cpu")
        return torch.device("cuda", target) if torch.cuda.is_available() else torch.device("cpu")
    device = torch.device(target)
    if device.type != "cpu" and not torch.cuda.is_available():
        return torch.device("cpu")
    if device.type == "cuda" and device.index is None:  # which torch's stubs leave out
        return torch.device("cuda", torch.cuda.current_device())  # type: ignore[unreachable]
    return device


def piece(tensor: torch.Tensor) -> Piece:
    """The bytes of a compact tensor as memory that the CPU can read."""
    if tensor.device.type != "cpu":
        tensor = tensor.cpu()
    return Piece(tensor.data_ptr(), tensor.nbytes, tensor)


def reader(source: Piece, device: torch.device) -> Callable[[TensorSpec, torch.dtype], torch.Tensor]:
    """A function that makes the tensor of a spec out of ``source``, on ``device`` and in memory of its own."""
    if device.type == "cpu":
        return functools.partial(_read_cpu, source)
    # One transfer for all of them; the tensors are windows of it.
    return functools.partial(_read_window, upload(source, device).untyped_storage(), device)


def _read_cpu(source: Piece, spec: TensorSpec, dtype: torch.dtype) -> torch.Tensor:
    # The device by name, here and wherever a tensor is made: the caller may have set another default.
    tensor = torch.empty_strided(spec.shape, spec.stride, dtype=dtype, device="cpu")
    size = tensor.nbytes
    if size:
        ctypes.memmove(tensor.data_ptr(), source.address + spec.offset, size)
    return tensor


def is_cpu(device: torch.device) -> bool:
    """Whether tensors of ``device`` lie in memory that other processes of the machine may share."""
    return device.type == "cpu"


def in_place(source: Piece) -> Callable[[TensorSpec, torch.dtype], torch.Tensor]:
    """A function that makes the tensor of a spec out of ``source``, where it lies."""
    return functools.partial(_read_in_place, source)


def _read_in_place(source: Piece, spec: TensorSpec, dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.empty(0, dtype=dtype, device="cpu")
    if 0 in spec.shape:
        return tensor.new_empty(spec.shape)
    # A storage for itself: of one that held its neighbours too all would be saved, pickled or kept alive.
    run = Piece(source.address + spec.offset, math.prod(spec.shape) * dtype.itemsize, source.owner)
    return tensor.set_(view(run).untyped_storage(), 0, spec.shape, spec.stride)


_recycled = Arena(shared=False)

RECYCLED = 1 << 20
"""Bytes from which it pays to compute into memory that was used before, by estimate."""


def recycled(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An empty tensor on the CPU, in memory that goes from one to the next: pages new from the system are slow."""
    size = math.prod(shape) * dtype.itemsize
    lent = _recycled.take(size)
    run = Piece(lent.array.__array_interface__["data"][0], size, lent)
    return view(run).view(dtype).view(tuple(shape))


def _read_window(
    storage: torch.UntypedStorage, device: torch.device, spec: TensorSpec, dtype: torch.dtype
) -> torch.Tensor:
    tensor = torch.empty(0, dtype=dtype, device=device)
    if 0 in spec.shape:
        return tensor.new_empty(spec.shape)
    return tensor.set_(storage, spec.offset // dtype.itemsize, spec.shape, spec.stride)


def windows(
    source: Piece, specs: Sequence[TensorSpec], dtypes: Sequence[torch.dtype], device: torch.device
) -> list[torch.Tensor]:
    """Tensors on ``device`` over the bytes of ``source``; on a CPU they are no copy, to be read while it lives."""
    storage = (upload(source, device) if device.type != "cpu" else view(source)).untyped_storage()
    return [_read_window(storage, device, spec, dtype) for spec, dtype in zip(specs, dtypes, strict=True)]


def view(source: Piece) -> torch.Tensor:
    """A run of memory as a tensor of bytes."""
    if not source.size:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.from_numpy(np.asarray(_Bytes(source)))


class _Bytes:
    """Memory as NumPy wants it. Not a ctypes array: each length of those makes a class, which only the gc can free."""

    def __init__(self, source: Piece) -> None:
        self._source = source
        where = (source.address, False)
        self.__array_interface__ = {"data": where, "shape": (source.size,), "typestr": "|u1", "version": 3}


def upload(source: Piece, device: torch.device) -> torch.Tensor:
    """The bytes of ``source`` in new memory of ``device``."""
    if not source.size:
        return torch.empty(0, dtype=torch.uint8, device=device)
    # Of pinned memory a copy runs beside the host, which has nothing to wait for before `finish`.
    return view(source).to(device, copy=True, non_blocking=True)


def pinner(device: torch.device) -> Callable[[int, int], Callable[[], object] | None] | None:
    """What registers memory of the host with a GPU, so that it copies by itself; None on a CPU."""
    return _pin if device.type == "cuda" else None


def _pin(address: int, size: int) -> Callable[[], object] | None:
    runtime = torch.cuda.cudart()
    if int(runtime.cudaHostRegister(address, size, 0)):
        log.info("%d bytes of shared memory cannot be pinned: they are copied through the driver's buffers", size)
        return None
    return functools.partial(runtime.cudaHostUnregister, address)


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT = 1 << 29

_GOLDEN = 0x9E3779B97F4A7C15
_SEED_BITS = (1 << 63) - 1


def seed(device: torch.device, call_seed: int, chunk: int) -> None:
    """Seed everything random that a forward may use, as a function of the call and the chunk alone (row A10)."""
    value = (call_seed + chunk * _GOLDEN) & _SEED_BITS
    torch.default_generator.manual_seed(value)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(value)
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)


def use_threads(device: torch.device, count: int | None) -> None:
    """Compute with so many threads from now on, on a CPU."""
    if count is not None and device.type == "cpu" and torch.get_num_threads() != count:
        torch.set_num_threads(count)


def keep_freed_memory() -> None:
    """Let this process keep memory that it freed, up to a limit, instead of giving it back and asking for new pages."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, _KEPT)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT)


def finish(device: torch.device) -> None:
    """Wait until the device has done what was asked of it, so that a measured time means something."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


class MemoryLook:
    """Says now and then how full a device is: torch needs a tenth of a millisecond to tell.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._next = 0.0 if device.type == "cuda" else float("inf")

    def now(self) -> tuple[int, int] | None:
        """Bytes that are allocated, and the most that were; None on a CPU, and if that was said a moment ago."""
        if time.monotonic() < self._next:
            return None
        self._next = time.monotonic() + 1.0
        return torch.cuda.memory_allocated(self._device), torch.cuda.max_memory_allocated(self._device)


def describe(device: torch.device, pid: int, node: str) -> Hello:
    """What a replica on ``device`` says of itself."""
    if device.type != "cuda":
        return Hello(pid, node, str(device), "", "", 0, 0)
    found = torch.cuda.get_device_properties(device)
    return Hello(pid, node, str(device), found.name, str(found.uuid), found.total_memory, found.multi_processor_count)


_IMBALANCE = """
    There is an imbalance between your GPUs. You may want to exclude GPU {} which
    has less than 75% of the memory or cores of GPU {}. You can do so by setting
    the device_ids argument to DataParallel, or by setting the CUDA_VISIBLE_DEVICES
    environment variable."""


def check_balance(found: Sequence[tuple[int, Hello]]) -> None:
    """Warn as upstream does if one GPU is much smaller than another.

    Args:
        found: For each GPU replica its device id and what it said of itself.
    """
    for name in ("memory", "processors"):
        sizes = sorted((getattr(hello, name), index) for index, hello in found)
        if sizes and sizes[0][0] < 0.75 * sizes[-1][0]:
            warnings.warn(_IMBALANCE.format(sizes[0][1], sizes[-1][1]), stacklevel=2)
            return
