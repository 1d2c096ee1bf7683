"""Memory that two processes of one machine share.

A channel has one for each direction, which only grows. Its contents are valid until the answer: who
keeps a tensor longer clones it. So nothing there is lent, counted or returned.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import pickle
import warnings
import weakref
from collections.abc import Iterator

import torch
from torch import Tensor

from raydp_parallel.devices.layout import ALIGN, Run, Spec

_MAP_FIXED = 0x10
_SELDOM = 8
"""How many frames leave most of a window unused before its pages are given back."""
PAGE = mmap.PAGESIZE


class GpuWindow(Run):
    """Memory of a GPU on which both processes compute.

    It is exported once and opened once: torch's counts of readers are wrong otherwise.

    Args:
        size: Its bytes.
        device: The GPU, as this process numbers it.
        export: The other process's description of it; None makes it here.
    """

    def __init__(self, size: int, device: torch.device, export: bytes | None = None) -> None:
        from torch.multiprocessing import reductions

        if export is None:
            with _whole_segments():
                memory = torch.empty(-(-size // ALIGN) * ALIGN, dtype=torch.uint8, device=device)
                given = reductions.reduce_tensor(memory)[1]
            self.export, self._readers = pickle.dumps(given), given[_READERS]
        else:
            given = list(pickle.loads(export))
            given[_NUMBER] = device.index or 0
            memory = reductions.rebuild_cuda_tensor(*given)
        super().__init__(memory)

    def unread(self) -> None:
        """Count its reader out, which has ended and cannot do so: torch keeps the memory until
        then.
        """
        torch.UntypedStorage._release_ipc_counter_cuda(*self._readers)


_NUMBER, _READERS = 6, slice(11, 13)
"""Where torch's description of a shared tensor has the number of its GPU, and the place of the
count of its readers.
"""


@contextlib.contextmanager
def _whole_segments() -> Iterator[None]:
    """Take memory from CUDA as a whole, also where the program wants segments that grow: containers
    refuse to share these.
    """
    chosen = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    if "expandable_segments:True" not in chosen:
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer torch has another name for it
        torch.cuda.memory._set_allocator_settings("expandable_segments:False")
        try:
            yield
        finally:
            torch.cuda.memory._set_allocator_settings(chosen)


class Window(Run):
    """Shared memory of this process, or of another one that sent its descriptor.

    Attributes:
        fd: Its descriptor; the memory ends with the last process that has it mapped.
    """

    map: mmap.mmap

    def __init__(self, size: int, fd: int | None = None, flags: int = mmap.MAP_SHARED) -> None:
        if fd is None:
            fd = os.memfd_create("raydp_parallel", os.MFD_CLOEXEC)
            os.ftruncate(fd, max(PAGE, -(-size // PAGE) * PAGE))
        self.fd, self._unused = fd, 0
        self.map = mmap.mmap(fd, 0, flags=flags)  # all of it
        super().__init__(torch.frombuffer(self.map, dtype=torch.uint8))
        # Tensors keep the mapping when the window is gone, and the mapping its descriptor.
        weakref.finalize(self.map, os.close, fd).atexit = False
        _mapped[self.map] = self.memory.data_ptr(), self.size, fd

    def used(self, size: int) -> None:
        """Note how much a frame needs, and give pages back that frames have not needed for long."""
        self._unused = self._unused + 1 if 8 * size < self.size else 0
        if self._unused == _SELDOM and not self.registered:
            self.map.madvise(mmap.MADV_REMOVE)

    def private(self) -> Window:
        """Map the memory once more: what is written there stays there."""
        return Window(0, os.dup(self.fd), mmap.MAP_PRIVATE)

    def tensor(self, spec: Spec, offset: int) -> Tensor:
        """Show one tensor with a storage of its own: `torch.save` writes whole storages."""
        count = math.prod(spec.shape)
        run = torch.frombuffer(self.map, dtype=spec.dtype, count=count, offset=offset)
        return run.as_strided(spec.shape, spec.stride)


_mapped: weakref.WeakKeyDictionary[mmap.mmap, tuple[int, int, int]] = weakref.WeakKeyDictionary()
"""The address, size and descriptor of each mapping."""


def _make_private() -> None:
    """Map all windows privately, in a forked child: what it changes stays there."""
    libc = ctypes.CDLL(None)
    rights = mmap.PROT_READ | mmap.PROT_WRITE
    for at, length, fd in [*_mapped.values()]:
        where = ctypes.c_void_p(at), ctypes.c_size_t(length)
        libc.mmap(*where, rights, mmap.MAP_PRIVATE | _MAP_FIXED, fd, ctypes.c_long(0))


os.register_at_fork(after_in_child=_make_private)
