"""Cores and threads of this process.

An OpenMP thread that has finished its part of an operation spins before it sleeps, GCC's for
many times as long as a thread takes to start, each on a core that replicas wait for. So a thread
that is about to wait ends its helpers first; its next parallel operation starts new ones.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from pathlib import Path

import torch

_TORCH = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
_SOFT = 1
_CHOSEN = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
"""Variables by which the user chooses how threads wait."""

MALLOC = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "68719476736",
    "MALLOC_TOP_PAD_": "67108864",
    "MALLOC_ARENA_MAX": "1",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
"""Lets glibc keep freed memory, in one heap, of large pages where the system has them: new pages
cost a replica a fifth of a step. Read as a process starts.
"""

_libc = ctypes.CDLL(None)
_TOP_PAD, _MMAP_THRESHOLD, _MMAP_MAX = -2, -3, -4  # of glibc's mallopt


def return_large_blocks() -> None:
    """Give large blocks back as they are freed, from now on. In a heap, those of a step that the
    replicas make lie between blocks that stay, and its holes grew to several times the weights.
    """
    _libc.mallopt(_MMAP_THRESHOLD, 4 << 20)
    _libc.mallopt(_MMAP_MAX, 1 << 16)
    # A heap with room at its end takes large blocks all the same.
    _libc.mallopt(_TOP_PAD, 1 << 20)
    give_back()


def give_back() -> None:
    """Give the holes of the heap back, which freed blocks have left."""
    _libc.malloc_trim(0)


def cores() -> int:
    """Count the cores that this process may use. Ray knows the limit of a container."""
    return len(os.sched_getaffinity(0))


def _find_pause() -> Callable[[], object]:
    """Find OpenMP's function for it, if torch uses GCC's library and the user chose nothing."""
    try:
        # Symbols of the libraries that torch links to are found by this handle, too.
        library = ctypes.CDLL(str(_TORCH), mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except (OSError, AttributeError):
        return lambda: None
    others = hasattr(library, "kmp_set_blocktime")  # Intel's, which has GCC's names, too
    known = hasattr(library, "GOMP_parallel") and hasattr(library, "omp_pause_resource")
    if others or not known or any(name in os.environ for name in _CHOSEN):
        return lambda: None
    return functools.partial(library.omp_pause_resource, _SOFT, library.omp_get_initial_device())


AT_START = torch.get_num_threads()  # when this package was imported

rest = _find_pause()
"""Ends this thread's helpers until it needs them again. Those of other threads are not affected."""


def use(device: torch.device, count: int | None) -> None:
    """Compute with so many threads on a CPU from now on; None changes nothing."""
    if count is not None and device.type == "cpu" and torch.get_num_threads() != count:
        torch.set_num_threads(count)
