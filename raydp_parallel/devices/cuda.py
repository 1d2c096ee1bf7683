"""A GPU's memory and the machine's: copies that run beside the host, and what must wait for them.

[Note: what waits for a copy]
Copies are put on the device's current stream, behind what makes their bytes. To the machine's
memory the host waits for an event behind the last copy of a message, once. From it the host does
not wait: whoever lent the memory is told only when the copy has run (`_Lent`). In a replica all of
a call's work has ended when its answer leaves (`finish`), so nothing that it read is given back too
early. Nobody waits for a whole device.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from raydp_parallel.devices.kinds import is_cpu
from raydp_parallel.devices.ranges import MemoryRange
from raydp_parallel.devices.raw import bytes_of, view

log = logging.getLogger("raydp_parallel")


class DeviceBytes:
    """Bytes in a GPU's memory, as links see them: to be copied, not read.

    Args:
        tensor: Where they are: a tensor that is one run of memory.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._staged: list[tuple[Tensor, int]] = []

    @property
    def tensor(self) -> Tensor:
        """They themselves."""
        return bytes_of(self._tensor)

    @property
    def device(self) -> torch.device:
        """Where they lie."""
        return self._tensor.device

    def part(self, offset: int, size: int) -> DeviceBytes:
        """Some of them."""
        return DeviceBytes(self.tensor[offset : offset + size])

    def copy_to(self, address: int) -> None:
        """Begin to copy them to the machine's memory, which is to be read after `wait` only."""
        source = self.tensor
        target = view(MemoryRange(address, len(source), None))
        if not target.is_pinned():
            # To such memory a device copies in turns with the host. Torch keeps what is pinned for
            # the next time.
            staged = torch.empty(len(source), dtype=torch.uint8, device="cpu", pin_memory=True)
            self._staged.append((staged, address))
            target = staged
        target.copy_(source, non_blocking=True)

    def wait(self) -> None:
        """Wait until what this and earlier ones of the device began to copy is there."""
        behind(self.device).synchronize()

    def settle(self) -> None:
        """After `wait`: the bytes that took a way round are where they belong."""
        while self._staged:
            staged, address = self._staged.pop()
            ctypes.memmove(address, staged.data_ptr(), len(staged))


def behind(device: torch.device, timed: bool = False) -> torch.cuda.Event:
    """An event behind all that was asked of a device on the current stream."""
    event = torch.cuda.Event(enable_timing=timed)
    event.record(torch.cuda.current_stream(device))
    return event


def on_device(tensor: Tensor) -> MemoryRange:
    """The bytes of a tensor that lies on a GPU, where they lie."""
    return MemoryRange(0, tensor.nbytes, tensor, DeviceBytes(tensor))


def on_host(source: MemoryRange) -> MemoryRange:
    """The same bytes in the machine's memory."""
    if source.origin is None:
        return source
    room = torch.empty(source.size, dtype=torch.uint8, device="cpu")
    source.origin.copy_to(room.data_ptr())
    source.origin.wait()
    source.origin.settle()
    return MemoryRange(room.data_ptr(), source.size, room)


class _Lent:
    """What memory a device may still be copying from."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[tuple[torch.cuda.Event, Any]] = []

    def keep(self, owner: Any, device: torch.device) -> None:
        """Keep what a copy reads that was just asked for, until it has run."""
        event = behind(device)
        self.let_go()
        with self._lock:
            self._kept.append((event, owner))

    def let_go(self) -> None:
        """Of the machine's memory, and of other processes', that a device has copied from
        by now.
        """
        if self._kept:
            with self._lock:
                try:
                    self._kept = [entry for entry in self._kept if not entry[0].query()]
                except RuntimeError:  # the device works no more: nothing will ever read it
                    self._kept = []

    def __len__(self) -> int:
        return len(self._kept)


lent = _Lent()
let_go = lent.let_go


def upload(source: MemoryRange, device: torch.device) -> Tensor:
    """The bytes of ``source``, wherever they are, in new memory of a GPU. The host does not
    wait.
    """
    data = source.origin.tensor if source.origin is not None else view(source)
    found: Tensor = data.to(device, copy=True, non_blocking=True)
    lent.keep((data, source.owner), device)
    return found


def load(target: Tensor, source: MemoryRange) -> None:
    """Copy the bytes of ``source``, wherever they are, to a GPU's memory. The host does not
    wait.
    """
    load_all([target], [source])


def load_all(targets: Sequence[Tensor], sources: Sequence[MemoryRange]) -> None:
    """Copy the bytes of some sources, wherever they are, to a GPU's memory. The host does
    not wait.
    """
    pairs = [
        (target, source) for target, source in zip(targets, sources, strict=True) if source.size
    ]
    if not pairs:
        return
    data = [
        source.origin.tensor if source.origin is not None else view(source) for _, source in pairs
    ]
    torch._foreach_copy_([target for target, _ in pairs], data, non_blocking=True)
    lent.keep((data, [source.owner for _, source in pairs]), pairs[0][0].device)


def finish(device: torch.device) -> None:
    """Wait until the device has done what was asked of it."""
    if not is_cpu(device):
        behind(device).synchronize()


def spoiled(device: torch.device) -> bool:
    """Whether a device works no more in this process, as after an access to memory that is not
    there.

    Such an error of CUDA's is told by every call from then on. Only another process has a device
    that works.
    """
    try:
        finish(device)
    except RuntimeError:
        return True
    return False


class Stopwatch:
    """Says how long ago a device passed a mark. The host asks for work long before it is done.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marked: torch.cuda.Event | None = None

    def mark(self) -> None:
        """Here."""
        if not is_cpu(self._device):
            self._marked = behind(self._device, timed=True)

    def finish(self) -> float | None:
        """Wait for the device; the seconds since it passed the mark, None if there was none, or on
        a CPU.
        """
        marked, self._marked = self._marked, None
        if marked is None:
            finish(self._device)
            return None
        end = behind(self._device, timed=True)
        end.synchronize()
        return float(marked.elapsed_time(end)) / 1e3


def pinner(device: torch.device | None) -> Callable[[int, int], Callable[[], object] | None] | None:
    """What registers memory of the host with a GPU, so that it copies by itself; None on a CPU.

    Args:
        device: The device that copies; None is whichever this process uses, if it comes to use one.
    """
    if device is None:
        return _pin_if_used
    return functools.partial(_registry.pin, device) if not is_cpu(device) else None


def _pin_if_used(address: int, size: int) -> Callable[[], object] | None:
    # Asking for more would start CUDA in a driver that has no use for it.
    return (
        _registry.pin(torch.device("cuda"), address, size) if torch.cuda.is_initialized() else None
    )


class _Registry:
    """Registers memory of the host with CUDA, until that is refused once.

    Attributes:
        refused: Whether it was. Who lacks the memory or the right to lock some will not have it for
            the next segment.
    """

    def __init__(self) -> None:
        self.refused = False

    def pin(self, device: torch.device, address: int, size: int) -> Callable[[], object] | None:
        """Register a run of memory; returns what ends that, None if it is refused."""
        if self.refused:
            return None
        runtime = torch.cuda.cudart()
        code = int(runtime.cudaHostRegister(address, size, 0))
        if not code:
            return functools.partial(runtime.cudaHostUnregister, address)
        self.refused = True
        _take_error(device)
        log.info(
            "shared memory cannot be pinned (CUDA error %d): it is copied through "
            "torch's pinned buffers",
            code,
        )
        return None


def _take_error(device: torch.device) -> None:
    """Take an error that CUDA keeps for this thread: the next kernel, which is innocent, would be
    told of it.
    """
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device=device)


_registry = _Registry()
