"""Memory that two processes of one machine share, and how a row of tensors lies in it.

A window belongs to one direction of one channel. It only grows. Its contents are valid until the
answer: who keeps a tensor longer clones it. So nothing here is lent, counted or returned.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import mmap
import os
import pickle
import warnings
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

_MAP_FIXED = 0x10
ALIGN = 64
PAGE = mmap.PAGESIZE


class Spec(NamedTuple):
    """The geometry of one tensor: its values are one run, in whatever order dimensions lie."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    grad: bool


def specs_of(tensors: Sequence[Tensor]) -> list[Spec]:
    """Describe dense tensors that require no gradient."""
    # Without Spec's own constructor, which is a function of Python.
    return [tuple.__new__(Spec, (t.dtype, t.shape, t.stride(), False)) for t in tensors]


def is_dense(tensor: Tensor) -> bool:
    """Tell if a strided tensor's elements fill one run of memory, each in a place of its own."""
    if tensor.is_contiguous():
        return True
    run = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != run:
                return False
            run *= size
    return True


def dense(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy without gaps that keeps the order of its strides."""
    if is_dense(tensor):
        return tensor
    return tensor.clone(memory_format=torch.preserve_format)


Cuts = tuple[tuple[int, int], ...]
"""Rows among tensors, each as the numbers of its first one and of the one after its last."""


class Layout:
    """Offsets of tensors in a window; equal rows of specs have one layout.

    Args:
        specs: The tensors' geometry.
        align: Each begins at a multiple of so many bytes.
        cuts: Rows among them. A row's tensors lie together, sorted by dtype, so that those of each
            dtype are one run.

    Attributes:
        offsets: Where each tensor begins.
        size: The bytes of all.
        rows: The layout of each row alone, and where it begins.
    """

    def __init__(
        self,
        specs: Sequence[Spec],
        align: int = ALIGN,
        cuts: Cuts = (),
    ) -> None:
        self.specs = tuple(specs)
        self.offsets = [0] * len(self.specs)
        self.rows: list[tuple[int, Layout]] = []
        self._runs: list[tuple[torch.dtype, int, int]] = []
        self.size = 0
        for begin, after in cuts:
            row = alone(self.specs[begin:after])
            self.offsets[begin:after] = [self.size + offset for offset in row.offsets]
            self.rows.append((self.size, row))
            self.size += row.size
        in_rows = {i for begin, after in cuts for i in range(begin, after)}
        rest = [i for i in range(len(self.specs)) if i not in in_rows]
        for dtype in dict.fromkeys([self.specs[i].dtype for i in rest]):
            begin = self.size
            for i in rest:
                if self.specs[i].dtype == dtype:
                    self.offsets[i] = self.size
                    end = self.size + dtype.itemsize * math.prod(self.specs[i].shape)
                    self.size = -(-end // align) * align
            self._runs.append((dtype, begin, self.size))

    def runs(self, memory: Tensor) -> list[Tensor]:
        """Show all tensors of each dtype as one, with what lies between them."""
        return [memory[begin:end].view(dtype) for dtype, begin, end in self._runs]

    def views(self, memory: Tensor) -> list[Tensor]:
        """Show the tensors in a flat run of bytes, on whatever device it lies."""
        whole = {}
        for dtype in {spec.dtype for spec in self.specs}:
            size = memory.numel() // dtype.itemsize * dtype.itemsize
            whole[dtype] = (memory if size == memory.numel() else memory[:size]).view(dtype)
        begin = memory.storage_offset()
        found = []
        for spec, offset in zip(self.specs, self.offsets, strict=True):
            at = (begin + offset) // spec.dtype.itemsize
            found.append(whole[spec.dtype].as_strided(spec.shape, spec.stride, at))
        return found

    def part(self, numbers: Sequence[int]) -> Layout:
        """Lay out some of the tensors alone."""
        return Layout([self.specs[i] for i in numbers])


@functools.lru_cache(maxsize=512)
def alone(specs: tuple[Spec, ...]) -> Layout:
    """Lay out one row: the same object for equal specs, whichever process or channel sent them."""
    return Layout(specs)


class Run:
    """Memory in which rows of tensors lie.

    Attributes:
        memory: All of it, as a flat tensor of bytes.
        map: Maps it into this process; None on a GPU.
        registered: True if CUDA knows it as memory of the host; None if that was not tried.
    """

    memory: Tensor
    map: mmap.mmap | None = None

    def __init__(self, size: int) -> None:
        self.size = size
        self.registered: bool | None = None
        self._views: dict[int, tuple[Layout, list[Tensor]]] = {}

    def views(self, layout: Layout) -> list[Tensor]:
        """Show a row of tensors here; made once for each layout."""
        found = self._views.get(id(layout))
        if found is None:
            if len(self._views) >= 2 * Layouts.MOST:
                self._views.clear()
            found = self._views[id(layout)] = layout, layout.views(self.memory)
        return found[1]


class GpuWindow(Run):
    """Memory of a GPU on which both processes compute.

    It is exported once and opened once: torch's counts of readers are wrong otherwise.

    Args:
        size: Its bytes.
        device: The GPU, as this process numbers it.
        export: The other process's description of it; None makes it here.
    """

    def __init__(self, size: int, device: torch.device, export: bytes | None = None) -> None:
        super().__init__(size)
        from torch.multiprocessing import reductions

        if export is None:
            with _whole_segments():
                self.memory = torch.empty(size, dtype=torch.uint8, device=device)
                given = reductions.reduce_tensor(self.memory)[1]
            self.export, self._readers = pickle.dumps(given), given[_READERS]
        else:
            given = list(pickle.loads(export))
            given[_NUMBER] = device.index or 0
            self.memory = reductions.rebuild_cuda_tensor(*given)

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

    def __init__(self, size: int, fd: int | None = None, private: bool = False) -> None:
        super().__init__(max(PAGE, -(-size // PAGE) * PAGE))
        if fd is None:
            fd = os.memfd_create("raydp_parallel", os.MFD_CLOEXEC)
            os.ftruncate(fd, self.size)
        self.fd = fd
        flags = mmap.MAP_PRIVATE if private else mmap.MAP_SHARED
        self.map = mmap.mmap(fd, self.size, flags=flags)
        self.memory = torch.frombuffer(self.map, dtype=torch.uint8)
        # Tensors keep the mapping when the window is gone, and the mapping its descriptor.
        weakref.finalize(self.map, os.close, fd).atexit = False
        _mapped[self.map] = self.memory.data_ptr(), self.size, fd

    def duplicate(self) -> int:
        """Return another descriptor of the memory, for another window on it."""
        return os.dup(self.fd)

    def alone(self, spec: Spec, offset: int) -> Tensor:
        """Show one tensor with a storage of its own: `torch.save` writes whole storages."""
        count = 1
        for n in spec.shape:
            count *= n
        run = torch.frombuffer(self.map, dtype=spec.dtype, count=count, offset=offset)
        return run.as_strided(spec.shape, spec.stride)


_mapped: weakref.WeakKeyDictionary[mmap.mmap, tuple[int, int, int]] = weakref.WeakKeyDictionary()
"""The address, size and descriptor of each mapping."""


def _make_private() -> None:
    """Map all windows privately, in a forked child: what it changes stays there."""
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    whole: Any = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mmap.argtypes = whole
    rights = mmap.PROT_READ | mmap.PROT_WRITE
    for at, size, fd in [*_mapped.values()]:
        libc.mmap(at, size, rights, mmap.MAP_PRIVATE | _MAP_FIXED, fd, 0)


os.register_at_fork(after_in_child=_make_private)


class Layouts:
    """The layouts that one end of a channel has sent, by their specs."""

    MOST = 256

    def __init__(self) -> None:
        self._known: dict[Any, tuple[int, Layout]] = {}
        self._next = 0

    def of(self, specs: tuple[Spec, ...], cuts: Cuts = ()) -> tuple[int, Layout, bool]:
        """Return the number of a layout, the layout, and whether it is new."""
        found = self._known.get((specs, cuts))
        if found is not None:
            return *found, False
        if len(self._known) >= self.MOST:  # shapes that never come again
            self._known.clear()
            self._next = 0
        self._next += 1
        layout = Layout(specs, cuts=cuts)
        self._known[specs, cuts] = self._next, layout
        return self._next, layout, True
