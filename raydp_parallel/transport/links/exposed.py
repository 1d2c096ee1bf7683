"""Storages in shared memory, which other processes of the machine see, so that they are not sent.

Torch can move a storage into shared memory in place (``_share_fd_cpu_``), with all tensors over it:
views, tied parameters, parameters that an optimizer holds. NumPy arrays, and other code that holds
the address, do not follow. So a storage is moved only if torch allocated it and every tensor over
it is known; otherwise its bytes are sent.
"""

from __future__ import annotations

import ctypes
import logging
import os
import resource
import weakref
from typing import Any

import numpy as np
import torch

from raydp_parallel.devices import forks
from raydp_parallel.devices.buffers import Descriptor, describe
from raydp_parallel.transport.links.mapped import ForeignMemory, keep_to_itself

log = logging.getLogger("raydp_parallel")

_FOLDER = "/dev/shm"  # where torch makes its shared memory
_MOST = 8192
"""The most storages that are exposed. Each is a file, and a mapping in every replica, which may
have 65,530 mappings.
"""

_SPARE = 64 * 1024 * 1024
"""Bytes of ``/dev/shm`` that stay free. A process that writes to memory there, when none is left,
is ended by a signal.
"""

_MUCH = 1 << 16
"""Bytes from which a storage that finds no memory is logged. Copying less costs next to nothing."""


class Exposed:
    """A storage that other processes see.

    Args:
        storage: The storage, moved to shared memory.
        descriptor: The descriptor by which they map it.
    """

    def __init__(self, storage: Any, descriptor: Descriptor) -> None:
        self.storage = storage
        self.descriptor = descriptor

    def copy(self) -> np.ndarray:
        """A copy of its bytes as they are now."""
        return _seen_by_numpy(self.storage).copy()


class PassedOn(Exposed):
    """Memory that one process lent to this one, for others to read. This process holds its file, so
    it can be read when its owner is gone.

    Args:
        memory: The memory, whose lease must not end before the others have read it.

    Raises:
        OSError: Its owner is gone already.
    """

    def __init__(self, memory: ForeignMemory) -> None:
        found, path = memory.descriptor, f"/proc/{os.getpid()}/fd/{memory.file()}"
        # Tokens of its owner mean other memory here; no other segment has its inode.
        super().__init__(memory, found._replace(token=-found.inode, path=path, lease=0))

    def copy(self) -> np.ndarray:
        """A copy of its bytes."""
        piece = self.storage.piece()
        return np.frombuffer(ctypes.string_at(piece.address, piece.size), dtype=np.uint8)


class _Exposures:
    """What of this process's memory is exposed.

    Attributes:
        known: The exposed storages, by the address of torch's object.
        moved: By address the storages that were moved: the file, which torch closes with the
            storage, and the descriptor.
        own: In a forked process the addresses of storages that were moved. Their files, which
            belong to the parent, no longer hold the child's contents.
        said: Whether it was said that there is no space.
    """

    def __init__(self) -> None:
        self.known: weakref.WeakValueDictionary[int, Exposed] = weakref.WeakValueDictionary()
        self.moved: dict[int, tuple[int, Descriptor]] = {}
        self.own: set[int] = set()
        self.said = False
        forks.tell_child(self)

    def note_moved(self, address: int, file: int, descriptor: Descriptor) -> None:
        """Note that a storage was moved, and forget some that are gone."""
        if len(self.moved) >= 2 * _MOST:
            for old in [*self.moved]:
                if not _is_there(*self.moved[old]):
                    del self.moved[old]
        self.moved[address] = file, descriptor

    def after_fork(self) -> None:
        """Make the child's moved storages private, so that its parent sees none of its writes."""
        for address, (file, meant) in self.moved.items():
            if _is_there(file, meant):
                keep_to_itself(address, meant.length, file)
                self.own.add(address)
        self.moved.clear()
        self.known.clear()


_exposures = _Exposures()


def expose(storage: Any, known: int, promised: int = 0) -> Exposed | None:
    """Move a storage to shared memory, if that is allowed and there is space. See `Link.expose`."""
    found = _exposures.known.get(storage._cdata)
    if found is not None:
        return found
    if _exposures.own and storage.data_ptr() in _exposures.own:
        return None
    already = _is_shared(storage)
    if not (already or (_may_move(storage, known) and _has_space(storage.nbytes(), promised))):
        return None
    file, size = storage._share_fd_cpu_()
    descriptor = describe(file, size, size)
    if not already:
        _fix(storage)
        _exposures.note_moved(storage.data_ptr(), file, descriptor)
    found = _exposures.known[storage._cdata] = Exposed(storage, descriptor)
    return found


def _is_there(file: int, meant: Descriptor) -> bool:
    try:
        found = os.fstat(file)
    except OSError:
        return False
    return (found.st_dev, found.st_ino) == (meant.volume, meant.inode)


def _fix(storage: Any) -> None:
    """Let torch refuse to resize a storage: in shared memory it would resize, and the process would
    be ended by a signal.

    Torch refuses once NumPy has an array over the memory.
    """
    _seen_by_numpy(storage)


def _seen_by_numpy(storage: Any) -> np.ndarray:
    tensor = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
    found: np.ndarray = torch._C.TensorBase.numpy(tensor)
    return found


def _is_shared(storage: Any) -> bool:
    """Whether a storage lies in shared memory already, and has a file descriptor and not a name."""
    strategy = torch.multiprocessing.get_sharing_strategy()
    return bool(storage.is_shared()) and strategy == "file_descriptor"


def _may_move(storage: Any, known: int) -> bool:
    # One reference is that of ``storage`` itself. Memory that torch did not allocate cannot be
    # resized.
    users = torch._C._storage_Use_Count(storage._cdata) - 1
    return (
        storage.device.type == "cpu"
        and storage.resizable()
        and not storage.is_shared()
        and users <= known
    )


def _has_space(size: int, promised: int) -> bool:
    if len(_exposures.known) >= min(_MOST, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4):
        return False
    try:
        found = os.statvfs(_FOLDER)
    except OSError:
        _tell_once(size, f"{_FOLDER} is missing")
        return False
    free = found.f_bavail * found.f_frsize - promised
    if free < size + _SPARE:
        mine = f"{max(0, free) / 1e6:.0f} MB left beside Ray's object store"
        _tell_once(size, f"{_FOLDER} has {mine}, and {size / 1e6:.1f} MB are wanted")
    return free >= size + _SPARE


def _tell_once(size: int, why: str) -> None:
    if size >= _MUCH and not _exposures.said:
        _exposures.said = True
        log.warning("weights are copied to the replicas instead of shared: %s", why)
