"""Bytes between a window, which two processes share, and the device that computes.

On a GPU a row of tensors is gathered there first, so that it takes one copy down and one copy up:
torch copies each tensor of a row alone where it crosses devices. Copies that nobody waits for need
pinned memory on the host: windows are registered with CUDA, if that was tried and works, and their
bytes pass through torch's pinned memory otherwise.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import sys
import threading
import weakref
from itertools import compress

import torch
from torch import Tensor

from raydp_parallel.devices.layout import Layout, Row, Run
from raydp_parallel.errors import log

_TRIED = 1 << 20
"""Bytes that are copied both ways before memory of this kind is registered."""
_FACTOR = 6364136223846793005
"""Lets each byte of a number differ from those of the next one."""

_ROWS = {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool, torch.uint8}
_ROWS |= {torch.int8, torch.int16, torch.int32, torch.int64, torch.complex64, torch.complex128}
"""The dtypes of which CUDA copies a row at once; it refuses a row of some others."""

_pinned = threading.local()
"""Memory of this thread by device and way, each with the stream that may still read it."""


def _users(t: Tensor) -> int:
    storage = t.untyped_storage()  # the program may have it without a tensor
    return int(torch._C._storage_Use_Count(storage._cdata)) + sys.getrefcount(storage)


_alone: int | None = None
"""The count of a tensor that shares its memory with no other one. It was tried, as another torch
may count otherwise, or have no count: then no memory is used again."""
with contextlib.suppress(AttributeError):
    _lone = torch.empty(1, device="cpu")
    _count = _users(_lone)
    _view = _lone.detach()
    _alone = _count if _users(_view) > _count else None


def is_used(t: Tensor) -> bool:
    """Tell if another tensor may show the same memory, here or in a process that it is lent to."""
    # That of a GPU always says that it is shared.
    return _alone is None or _users(t) > _alone or (t.device.type == "cpu" and t.is_shared())


def _staging(
    device: torch.device, way: str, size: int, reader: torch.cuda.Stream | None = None
) -> Tensor:
    """Return pinned memory that is kept for one device and way, once its last reader is done."""
    kept: dict[str, tuple[Tensor | None, torch.cuda.Stream | None]] = vars(_pinned)
    key = f"{device} {way}"
    found, last = kept.get(key, (None, None))
    if last is not None:
        last.synchronize()
    if found is None or found.numel() < size:
        found = torch.empty(size + size // 4, dtype=torch.uint8, pin_memory=True)
    kept[key] = found, reader
    return found[:size]


def gpu_of(tensors: list[Tensor]) -> torch.device | None:
    """Return the first GPU on which one of the tensors lies."""
    return next(iter([t.device for t in tensors if t.is_cuda]), None)


def copy_row(into: list[Tensor], values: list[Tensor]) -> None:
    """Copy each tensor to one of its dtype and shape. On a GPU torch makes one kernel of a row if
    all of it has one dtype, and one for each tensor otherwise.
    """
    if not into:
        return
    with torch.set_grad_enabled(False):  # `no_grad` is twice as many functions
        if into[0].device.type == "cpu":
            torch._foreach_copy_(into, values)
            return
        rows: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        for there, value in zip(into, values, strict=True):
            row = rows.setdefault(value.dtype, ([], []))
            row[0].append(there)
            row[1].append(value)
        for dtype, row in rows.items():
            if dtype in _ROWS:
                torch._foreach_copy_(*row)
            else:
                for there, value in zip(*row, strict=True):
                    there.copy_(value)


def download(tensors: list[Tensor], layout: Layout, window: Run) -> torch.cuda.Stream | None:
    """Copy a row of tensors, from wherever they lie, into a window, and wait until they are there.

    Returns:
        The stream that was waited for; None if the host made all copies.
    """
    gpu = gpu_of(tensors)
    if gpu is None:
        copy_row(window.views(layout), tensors)
        return None
    stream, on_gpu = torch.cuda.current_stream(gpu), window.memory.device == gpu
    flat = window.memory if on_gpu else torch.empty(layout.size, dtype=torch.uint8, device=gpu)
    mine, rest = [t.device == gpu for t in tensors], [t.device != gpu for t in tensors]
    there = window.views(layout) if on_gpu else layout.views(flat)
    copy_row([*compress(there, mine)], [*compress(tensors, mine)])
    if not on_gpu:
        copy_down(flat, window, 0, layout.size)
    if any(rest):  # over what lay between the others
        copy_row([*compress(window.views(layout), rest)], [*compress(tensors, rest)])
    if on_gpu:
        stream.synchronize()
    return stream


def copy_down(run: Tensor, window: Run, begin: int, end: int) -> None:
    """Copy a part of a GPU's run of bytes to a window of its size, and wait until it is there."""
    there = window.memory[begin:end]
    direct = _registered(window, run.device)
    host = there if direct else _staging(run.device, "down", end - begin)
    host.copy_(run[begin:end], non_blocking=True)
    torch.cuda.current_stream(run.device).synchronize()
    if not direct:
        there.copy_(host)


def _up(window: Run, run: Tensor, begin: int, end: int) -> torch.cuda.Stream | None:
    """Copy a part of a window to a GPU's run; returns the stream that still reads the window."""
    stream, there = torch.cuda.current_stream(run.device), window.memory[begin:end]
    direct = _registered(window, run.device)
    if not direct:
        there = _staging(run.device, "up", end - begin, stream).copy_(there)
    run[begin:end].copy_(there, non_blocking=True)
    return stream if direct else None


_readers: list[torch.cuda.Stream | None] = []
"""Streams of a replica that may still read windows of the model, to which the driver may write once
it has the next answer.
"""


def copy_up(window: Run, run: Tensor, begin: int, end: int) -> None:
    """Copy a part of a model's window to a replica's run; `wait_for_readers` waits for that."""
    _readers.append(_up(window, run, begin, end))


def wait_for_readers(reading: torch.cuda.Stream | None, waited: torch.cuda.Stream | None) -> None:
    """Wait for all streams that read windows of models, and for one that reads another window, but
    for one that was waited for.
    """
    streams = {*_readers, reading} - {waited}
    _readers.clear()
    for stream in filter(None, streams):
        with contextlib.suppress(RuntimeError):  # one that has failed reads nothing any more
            stream.synchronize()


def checksum(run: Tensor) -> int:
    """Add the bytes of a run, as numbers of 64 bits."""
    return int(run.view(torch.int64).sum())


def upload(
    layout: Layout, window: Run, device: torch.device
) -> tuple[Row, torch.cuda.Stream | None]:
    """Give the tensors of a window on a device: where they lie, if that is the device, else in a
    copy of the whole.

    Returns:
        The tensors, and the stream on which the window is still read; None if it is not.
    """
    flat, stream = window.memory, None
    if flat.is_cuda:
        stream = torch.cuda.current_stream(flat.device)
        if flat.device != device:
            flat = flat[: layout.size].to(device)
    elif device.type == "cuda":
        flat = torch.empty(layout.size, dtype=torch.uint8, device=device)
        stream = _up(window, flat, 0, layout.size)
    row = Row(window.views(layout) if flat is window.memory else layout.views(flat))
    row.layout, row.memory = layout, flat
    return row, stream


def _registered(window: Run, device: torch.device) -> bool:
    """Register a window with CUDA when a GPU first reads or writes it; tell if it is."""
    if window.registered is None:
        mapping, at, size = window.map, window.memory.data_ptr(), window.memory.numel()
        tried = mapping is not None and _may_register(device)
        window.registered = tried and _register(device, at, size)
        if window.registered:
            # The mapping must not end before: it is held here, and tensors may hold it longer.
            weakref.finalize(window, _unregister, at, mapping, os.getpid()).atexit = False
    return window.registered


def _register(device: torch.device, address: int, size: int) -> bool:
    code = int(torch.cuda.cudart().cudaHostRegister(address, size, 0))
    if code:
        log.info("host memory cannot be registered with CUDA (error %d): it is staged", code)
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=device)  # CUDA tells the next kernel of an error nobody took
    return not code


def _unregister(address: int, mapping: mmap.mmap | None, process: int) -> None:
    if os.getpid() == process:  # CUDA does not work in a forked one
        torch.cuda.cudart().cudaHostUnregister(address)


@functools.cache
def _may_register(device: torch.device) -> bool:
    """Try, once, copies to and from registered memory of the kind that processes share."""
    mapping = mmap.mmap(-1, _TRIED)
    host = torch.frombuffer(mapping, dtype=torch.uint8)
    if not _register(device, host.data_ptr(), _TRIED):
        return False
    right = True
    for n in range(3):
        # Not random: the program's own random numbers must not depend on it.
        sent = torch.arange(n, n + _TRIED // 8, device=device).mul_(_FACTOR).view(torch.uint8)
        host.copy_(sent, non_blocking=True)
        back = torch.empty_like(sent)
        back.copy_(host, non_blocking=True)
        right = right and torch.equal(host, sent.cpu()) and torch.equal(back, sent)
    _unregister(host.data_ptr(), mapping, os.getpid())
    if not right:
        log.warning("copies from registered host memory were wrong on %s: it is staged", device)
    return right
