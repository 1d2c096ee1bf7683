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
import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from raydp_parallel.devices import trials
from raydp_parallel.devices.buffers import Arena
from raydp_parallel.devices.ranges import (
    MemoryRange,
    RowPlan,
    bytes_of,
    copy_each,
    cut,
    data_of,
    fill,
    is_cpu,
    on_host,
    view,
)

log = logging.getLogger("raydp_parallel")


class DeviceBytes:
    """Bytes in a GPU's memory, as links use them: the host copies them and cannot read them.

    Args:
        tensor: A tensor over these bytes, which is one run of memory.

    Attributes:
        device: The device that they lie on.
        size: Their number.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._staged: list[tuple[Tensor, int]] = []
        self.device, self.size = tensor.device, tensor.nbytes

    @property
    def tensor(self) -> Tensor:
        """The bytes, as a tensor."""
        return bytes_of(self._tensor)

    def part(self, offset: int, size: int) -> DeviceBytes:
        """A part of the bytes."""
        return DeviceBytes(self.tensor[offset : offset + size])

    def placed(self, whole: Tensor) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """What a copy of the bytes to ``whole`` writes to, and what it reads."""
        return [whole], [self.tensor]

    def copy_to(self, address: int) -> None:
        """Begin to copy the bytes to the machine's memory, which may be read only after `wait`."""
        target = view(MemoryRange(address, self.size, None))
        if not target.is_pinned():
            # A copy to memory that is not pinned blocks the host. Torch recycles pinned memory.
            staged = torch.empty(self.size, dtype=torch.uint8, device="cpu", pin_memory=True)
            self._staged.append((staged, address))
            target = staged
        copy_each(*self.placed(target))

    def wait(self) -> None:
        """Wait for the copies that this and earlier `copy_to` calls of the device began."""
        behind(self.device).synchronize()

    def settle(self) -> None:
        """After `wait`: copy the bytes that went through pinned memory to their targets."""
        while self._staged:
            staged, address = self._staged.pop()
            # By torch's threads: one alone does not use all of the memory's bandwidth.
            view(MemoryRange(address, len(staged), None)).copy_(staged)


class DeviceRow(DeviceBytes):
    """Tensors on a GPU that are sent together: what copies them does so in one operation, to where
    each is to lie.

    Args:
        tensors: The tensors.
        plan: Where each lies.
        size: Bytes of all, with what lies between them.
    """

    def __init__(self, tensors: Sequence[Tensor], plan: RowPlan, size: int) -> None:
        super().__init__(tensors[0])
        self._tensors = tensors
        self._plan = plan
        self.size = size

    @property
    def tensor(self) -> Tensor:
        whole = torch.empty(self.size, dtype=torch.uint8, device=self.device)
        copy_each(*self.placed(whole))
        return whole

    def placed(self, whole: Tensor) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        return cut(whole, self._plan), self._tensors


def behind(device: torch.device, timed: bool = False) -> torch.cuda.Event:
    """An event behind all work on a device's current stream."""
    event = torch.cuda.Event(enable_timing=timed)
    event.record(torch.cuda.current_stream(device))
    return event


def on_device(tensor: Tensor) -> MemoryRange:
    """The memory range of a tensor on a GPU, without a copy."""
    return MemoryRange(0, tensor.nbytes, tensor, DeviceBytes(tensor))


class _Lent:
    """The memory that a device may still be copying from.

    Attributes:
        kept: Its owners, each with what tells that the copy has run; empty where there is no GPU.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.kept: list[tuple[torch.cuda.Event, Any]] = []

    def keep(self, owner: Any, device: torch.device) -> None:
        """Keep the owner of memory that the copy just begun reads, until the copy has run."""
        event = behind(device)
        self.let_go()
        with self._lock:
            self.kept.append((event, owner))

    def let_go(self) -> None:
        """Release the memory that finished copies have read."""
        if self.kept:
            with self._lock:
                try:
                    self.kept = [entry for entry in self.kept if not entry[0].query()]
                except RuntimeError:  # the device has failed and will read nothing
                    self.kept = []


lent = _Lent()


def upload(source: MemoryRange, device: torch.device) -> Tensor:
    """Copy the bytes of ``source``, on any device, to new memory of a GPU, without waiting."""
    data = data_of(source)
    found: Tensor = data.to(device, copy=True, non_blocking=True)
    lent.keep((data, source.owner), device)
    return found


def load_all(targets: Sequence[Tensor], sources: Sequence[MemoryRange]) -> None:
    """Copy the bytes of some sources, on any device, to a GPU's memory, without waiting."""
    pairs = [
        (target, source) for target, source in zip(targets, sources, strict=True) if source.size
    ]
    if pairs:
        data = [data_of(source) for _, source in pairs]
        copy_each([target for target, _ in pairs], data)
        lent.keep((data, sources), targets[0].device)


def load_parts(targets: Sequence[Tensor], source: MemoryRange, offsets: Sequence[int]) -> None:
    """Copy parts of one run of bytes, on any device, to a GPU's memory: one operation, without
    waiting.
    """
    whole = data_of(source)
    shapes = map(Tensor.size, targets)
    parts = [*map(torch.as_strided, repeat(whole), shapes, repeat((1,)), offsets)]
    copy_each(targets, parts)
    lent.keep((parts, source.owner), targets[0].device)


def finish(device: torch.device) -> None:
    """Wait until the device has done all work on its current stream."""
    if not is_cpu(device):
        wait_for(behind(device))


def wait_for(event: torch.cuda.Event) -> None:
    """Wait for an event, if the device has not passed it yet."""
    if not event.query():
        event.synchronize()


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
        """Wait for the device; returns when it passed the mark, by `time.perf_counter`, None
        without a mark or on a CPU.
        """
        marked, self._marked = self._marked, None
        if marked is None:
            finish(self._device)
            return None
        end = behind(self._device, timed=True)
        wait_for(end)
        return time.perf_counter() - float(marked.elapsed_time(end)) / 1e3


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
    used = in_use()
    return _registry.pin(used[0], address, size) if used else None


def in_use() -> list[torch.device]:
    """The GPUs on which this process has memory."""
    count = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
    return [torch.device("cuda", index) for index in range(count) if _has_memory(index)]


def _has_memory(index: int) -> bool:
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
        self._trying = threading.Lock()

    def pin(self, device: torch.device, address: int, size: int) -> Callable[[], object] | None:
        """Register a run of memory; returns a function that ends this, None if it is refused."""
        with self._trying:  # nothing is registered before the trial has ended
            if not self._tried:
                trial = functools.partial(self._trial, device)
                self.refused = not trials.passes("registered", device, trial) or self.refused
                self._tried = True
        return self._pin(device, address, size)

    def _trial(self, device: torch.device) -> bool:
        """Copy from and to registered memory that another process could map."""
        lent = Arena().take(trials.SIZE)
        run = MemoryRange(lent.array.ctypes.data, trials.SIZE, lent)
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
    fill(memory.address, [on_device(trials.late(number, device))], [0])
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
