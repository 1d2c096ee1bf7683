"""Copies between a GPU's memory and the machine's memory, which run beside the host.

[Note: what waits for a copy]
Copies are put on the device's current stream, behind the work that computes their bytes. For copies
to the machine's memory the host waits once, for an event behind the last copy of a message. For
copies from the machine's memory the host does not wait: the source is kept until the copy has run
(`_Lent`), and only then is its owner told. In a replica all work of a call has ended when its
answer is sent (`finish`), so no memory that it reads is given back too early. No code waits for a
whole device.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raydp_parallel.devices import trials
from raydp_parallel.devices.ranges import MemoryRange, bytes_of, is_cpu, view

log = logging.getLogger("raydp_parallel")


class DeviceBytes:
    """Bytes in a GPU's memory, as links use them: the host copies them and cannot read them.

    Args:
        tensor: A tensor over these bytes, which is one run of memory.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._staged: list[tuple[Tensor, int]] = []

    @property
    def tensor(self) -> Tensor:
        """The bytes, as a tensor."""
        return bytes_of(self._tensor)

    @property
    def device(self) -> torch.device:
        """The device that they lie on."""
        return self._tensor.device

    def part(self, offset: int, size: int) -> DeviceBytes:
        """A part of the bytes."""
        return DeviceBytes(self.tensor[offset : offset + size])

    def copy_to(self, address: int) -> None:
        """Begin to copy the bytes to the machine's memory, which may be read only after `wait`."""
        source = self.tensor
        target = view(MemoryRange(address, len(source), None))
        if not target.is_pinned():
            # A copy to memory that is not pinned blocks the host. Torch recycles pinned memory.
            staged = torch.empty(len(source), dtype=torch.uint8, device="cpu", pin_memory=True)
            self._staged.append((staged, address))
            target = staged
        target.copy_(source, non_blocking=True)

    def wait(self) -> None:
        """Wait for the copies that this and earlier `copy_to` calls of the device began."""
        behind(self.device).synchronize()

    def settle(self) -> None:
        """After `wait`: copy the bytes that went through pinned memory to their targets."""
        while self._staged:
            staged, address = self._staged.pop()
            ctypes.memmove(address, staged.data_ptr(), len(staged))


def behind(device: torch.device, timed: bool = False) -> torch.cuda.Event:
    """An event behind all work on a device's current stream."""
    event = torch.cuda.Event(enable_timing=timed)
    event.record(torch.cuda.current_stream(device))
    return event


def on_device(tensor: Tensor) -> MemoryRange:
    """The memory range of a tensor on a GPU, without a copy."""
    return MemoryRange(0, tensor.nbytes, tensor, DeviceBytes(tensor))


def on_host(source: MemoryRange) -> MemoryRange:
    """The same bytes in the machine's memory."""
    if source.origin is None:
        return source
    target = torch.empty(source.size, dtype=torch.uint8, device="cpu")
    source.origin.copy_to(target.data_ptr())
    source.origin.wait()
    source.origin.settle()
    return MemoryRange(target.data_ptr(), source.size, target)


class _Lent:
    """The memory that a device may still be copying from."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[tuple[torch.cuda.Event, Any]] = []

    def keep(self, owner: Any, device: torch.device) -> None:
        """Keep the owner of memory that the copy just begun reads, until the copy has run."""
        event = behind(device)
        self.let_go()
        with self._lock:
            self._kept.append((event, owner))

    def let_go(self) -> None:
        """Release the memory that finished copies have read."""
        if self._kept:
            with self._lock:
                try:
                    self._kept = [entry for entry in self._kept if not entry[0].query()]
                except RuntimeError:  # the device has failed and will read nothing
                    self._kept = []

    def __len__(self) -> int:
        return len(self._kept)


lent = _Lent()
let_go = lent.let_go


def upload(source: MemoryRange, device: torch.device) -> Tensor:
    """Copy the bytes of ``source``, on any device, to new memory of a GPU, without waiting."""
    data = source.origin.tensor if source.origin is not None else view(source)
    found: Tensor = data.to(device, copy=True, non_blocking=True)
    lent.keep((data, source.owner), device)
    return found


def load(target: Tensor, source: MemoryRange) -> None:
    """Copy the bytes of ``source``, on any device, to a GPU's memory, without waiting."""
    load_all([target], [source])


def load_all(targets: Sequence[Tensor], sources: Sequence[MemoryRange]) -> None:
    """Copy the bytes of some sources, on any device, to a GPU's memory, without waiting."""
    filled: list[Tensor] = []
    data: list[Tensor] = []
    owners: list[Any] = []
    for target, source in zip(targets, sources, strict=True):
        if source.size:
            filled.append(target)
            data.append(source.origin.tensor if source.origin is not None else view(source))
            owners.append(source.owner)
    if not filled:
        return
    torch._foreach_copy_(filled, data, non_blocking=True)
    lent.keep((data, owners), filled[0].device)


def load_parts(targets: Sequence[Tensor], source: MemoryRange, offsets: Sequence[int]) -> None:
    """Copy parts of one run of bytes, on any device, to a GPU's memory: one operation, without
    waiting.
    """
    whole = source.origin.tensor if source.origin is not None else view(source)
    parts = parts_of(whole, offsets, [*map(len, targets)])
    torch._foreach_copy_([*targets], parts, non_blocking=True)
    lent.keep((parts, source.owner), targets[0].device)


def parts_of(whole: Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> list[Tensor]:
    """Parts of a run of bytes that do not overlap, by one operation: a slice for each would take
    the host longer.
    """
    order = sorted(range(len(offsets)), key=offsets.__getitem__)
    cuts, end = [], 0  # the bytes before each part, and its own
    for row in order:
        cuts += [offsets[row] - end, sizes[row]]
        end = offsets[row] + sizes[row]
    found = dict(zip(order, whole.split_with_sizes([*cuts, len(whole) - end])[1::2], strict=True))
    return [found[row] for row in range(len(order))]


def finish(device: torch.device) -> None:
    """Wait until the device has done all work on its current stream."""
    if not is_cpu(device):
        behind(device).synchronize()


def spoiled(device: torch.device) -> bool:
    """Whether a device has failed for good in this process, as after an illegal memory access.

    After such an error every CUDA call of the process fails. Only a new process can use the device.
    """
    try:
        finish(device)
    except RuntimeError:
        return True
    return False


class Stopwatch:
    """Measures the time that a device takes, because the host requests work long before it is done.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marked: torch.cuda.Event | None = None

    def mark(self) -> None:
        """Set the mark behind all work requested so far."""
        if not is_cpu(self._device):
            self._marked = behind(self._device, timed=True)

    def finish(self) -> float | None:
        """Wait for the device; returns the seconds since it passed the mark, None without a mark or
        on a CPU.
        """
        marked, self._marked = self._marked, None
        if marked is None:
            finish(self._device)
            return None
        end = behind(self._device, timed=True)
        end.synchronize()
        return float(marked.elapsed_time(end)) / 1e3


def pinner(device: torch.device | None) -> Callable[[int, int], Callable[[], object] | None] | None:
    """A function that registers host memory with a GPU for direct copies; None on a CPU.

    Args:
        device: The device that copies; None stands for any GPU that this process may come to use.
    """
    if device is None:
        return _pin_if_used
    return functools.partial(_registry.pin, device) if not is_cpu(device) else None


def _pin_if_used(address: int, size: int) -> Callable[[], object] | None:
    # Only if a GPU is used already: registering would start CUDA in a driver that does not need it.
    device = _in_use()
    return _registry.pin(device, address, size) if device is not None else None


def _in_use() -> torch.device | None:
    """The first GPU on which this process has memory."""
    if torch.cuda.is_initialized():
        for index in range(torch.cuda.device_count()):
            if has_memory(index):
                return torch.device("cuda", index)
    return None


def has_memory(index: int) -> bool:
    """Whether this process has memory on a GPU; False with an allocator of the user's that does not
    count.
    """
    try:
        return bool(torch.cuda.memory_allocated(index))
    except RuntimeError:
        return False


class _Registry:
    """Registers memory of the host with CUDA, until that is refused once.

    CUDA does it for all GPUs, but by the current one, which it starts if this process did not use
    it: that takes half a gigabyte there.

    Attributes:
        refused: Whether it was. A process that lacks the memory or the right to lock memory will
            lack it for the next segment too.
    """

    def __init__(self) -> None:
        self.refused = False
        self._tried = False

    def pin(self, device: torch.device, address: int, size: int) -> Callable[[], object] | None:
        """Register a run of memory; returns a function that ends this, None if it is refused."""
        if not self._tried:
            self._tried = True
            ways = functools.partial(self._trial, device)
            self.refused = not trials.passes("registered", device, ways) or self.refused
        return self._pin(device, address, size)

    def _trial(self, device: torch.device) -> bool:
        """Copy from and to registered memory that another process could map."""
        file = os.memfd_create("raydp_parallel", os.MFD_CLOEXEC)
        try:
            os.ftruncate(file, trials.SIZE)
            memory = np.frombuffer(mmap.mmap(file, trials.SIZE), dtype=np.uint8)
        finally:
            os.close(file)
        run = MemoryRange(memory.ctypes.data, trials.SIZE, memory)
        unpin = self._pin(device, run.address, run.size)
        if unpin is None:
            return True  # it was refused, and that was said
        try:
            return all(_arrives(number, run, device) for number in range(trials.ROUNDS))
        finally:
            finish(device)
            unpin()

    def _pin(self, device: torch.device, address: int, size: int) -> Callable[[], object] | None:
        if self.refused:
            return None
        runtime, block = torch.cuda.cudart(), torch.cuda.device(device)
        with block:
            code = int(runtime.cudaHostRegister(address, size, 0))
        if not code:
            return functools.partial(_unpin, block, runtime, address)
        self.refused = True
        _take_error(device)
        log.info(
            "shared memory cannot be pinned (CUDA error %d): it is copied through "
            "torch's pinned buffers",
            code,
        )
        return None


def _arrives(number: int, memory: MemoryRange, device: torch.device) -> bool:
    """Whether memory gets the bytes of a GPU that is busy, and the GPU gets them from there."""
    origin = DeviceBytes(trials.late(number, device))
    origin.copy_to(memory.address)
    origin.wait()
    origin.settle()
    if not torch.equal(view(memory), trials.contents(number)):
        return False
    back = upload(memory, device)
    return torch.equal(on_host(on_device(back)).owner, trials.contents(number))


def _unpin(block: torch.cuda.device, runtime: Any, address: int) -> None:
    """End the registration of memory that begins at an address, in a block of its device."""
    with block:
        runtime.cudaHostUnregister(address)


def _take_error(device: torch.device) -> None:
    """Clear an error that CUDA keeps for this thread: it would be reported for the next kernel."""
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device=device)


_registry = _Registry()
