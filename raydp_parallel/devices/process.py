"""Settings of a process before it computes: seeds, threads, and that it keeps freed memory.

glibc gives threads heaps of their own. Such a heap ends at 64 MB and is returned when it is empty;
larger blocks come from the kernel, which clears them each time: writing a tensor of 67 MB took
35 ms, and 3 to 8 ms where memory is kept. The main heap of the process has no such limit. A thread
cannot choose its heap, only find out which one it has. With another allocator than glibc's none of
this holds, and nothing is done.
"""

from __future__ import annotations

import contextlib
import ctypes
import queue
import random
import threading
from collections.abc import Callable, Iterator

import numpy as np
import torch

from raydp_parallel.devices.kinds import is_cpu

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_KEPT = 1 << 29
_TRIES = 64
_TOO_LARGE_TO_BE_CACHED = 1 << 14
_NOT_MAIN = 0x4
"""glibc's flag, in the word before a block of memory, that it is of a thread's own heap."""

_GOLDEN = 0x9E3779B97F4A7C15
_SEED_BITS = (1 << 63) - 1


_of_replica = False


def belong_to_replica() -> None:
    """Note that this process does a replica's work and no other."""
    global _of_replica
    _of_replica = True


def of_replica() -> bool:
    """Whether this process does a replica's work and no other; False also where replicas run in the
    driver's process.
    """
    return _of_replica


def seed(device: torch.device, call_seed: int, chunk: int) -> None:
    """Seed all random generators that a forward may use, from the call's seed and the chunk alone
    (row A10).
    """
    value = (call_seed + chunk * _GOLDEN) & _SEED_BITS
    torch.default_generator.manual_seed(value)
    if not is_cpu(device):
        torch.cuda.default_generators[device.index or 0].manual_seed(value)
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)


def reseed(device: torch.device, value: int) -> None:
    """Seed torch's generators of a device and of the CPU."""
    torch.default_generator.manual_seed(value)
    if not is_cpu(device):
        torch.cuda.default_generators[device.index or 0].manual_seed(value)


@contextlib.contextmanager
def random_kept(device: torch.device) -> Iterator[None]:
    """Keep the state of torch's generators of a device and of the CPU, whatever the block does to
    them.
    """
    generators = [torch.default_generator]
    if not is_cpu(device):
        generators.append(torch.cuda.default_generators[device.index or 0])
    before = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)


@contextlib.contextmanager
def drawing_from(device: torch.device, value: int) -> Iterator[None]:
    """Let all random generators that Python code may use draw from a seed in the block, and keep
    their states.
    """
    of_python, of_numpy = random.getstate(), np.random.get_state()
    with random_kept(device):
        reseed(device, value)
        random.seed(value)
        np.random.seed(value & 0xFFFFFFFF)
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)


def use_threads(device: torch.device, count: int | None) -> None:
    """On a CPU, compute with ``count`` threads from now on; None changes nothing."""
    if count is not None and is_cpu(device) and torch.get_num_threads() != count:
        torch.set_num_threads(count)


def keep_freed_memory() -> None:
    """Let this process keep freed memory, up to a limit, instead of returning it to the system and
    requesting new pages.
    """
    libc = _allocator()
    if libc is not None:
        libc.mallopt(_M_MMAP_THRESHOLD, _KEPT)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT)
        libc.mallopt(_M_ARENA_MAX, 1)  # new threads share the heaps that exist


def start_thread(work: Callable[[], object], name: str) -> None:
    """Run ``work`` in a thread of the main heap, which keeps freed memory, if one is found."""
    found: queue.SimpleQueue[bool] = queue.SimpleQueue()
    over = threading.Event()

    def begin(last: bool) -> None:
        fits = last or _in_main_heap()
        found.put(fits)
        if fits:
            work()
        else:
            over.wait()  # if this thread ended now, the next would get its heap

    for tries in range(_TRIES):
        threading.Thread(target=begin, args=(tries == _TRIES - 1,), name=name, daemon=True).start()
        if found.get():
            break
    over.set()


def _in_main_heap() -> bool:
    """Whether this thread allocates from the main heap of the process; True if that is unknown."""
    libc = _allocator()
    if libc is None:
        return True
    libc.malloc.restype = ctypes.c_void_p
    address = libc.malloc(ctypes.c_size_t(_TOO_LARGE_TO_BE_CACHED))
    word = ctypes.c_size_t.from_address(address - ctypes.sizeof(ctypes.c_size_t)).value
    libc.free(ctypes.c_void_p(address))
    return not word & _NOT_MAIN


class _Found(ctypes.Structure):
    """The file that an address belongs to: glibc's `Dl_info`."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("start", ctypes.c_void_p),
    )


def _allocator() -> ctypes.CDLL | None:
    """The C library, if it is glibc and `malloc` is its own; None if another allocator was loaded
    in its place.
    """
    process = ctypes.CDLL(None)
    needed = ("gnu_get_libc_version", "dladdr", "malloc", "mallopt")
    if not all(hasattr(process, name) for name in needed):
        return None
    bases = {_base(process, name) for name in ("gnu_get_libc_version", "malloc", "mallopt")}
    return process if len(bases) == 1 and None not in bases else None


def _base(process: ctypes.CDLL, name: str) -> int | None:
    """The load address of the file that a function of this process comes from."""
    found = _Found()
    function = ctypes.cast(getattr(process, name), ctypes.c_void_p)
    known = process.dladdr(function, ctypes.byref(found))
    base: int | None = found.base
    return base if known else None
