"""Tensors whose own memory other processes of the machine see: nothing of them has to be sent,
whatever changes.

Torch can move a storage into shared memory in place (``_share_fd_cpu_``), so that all tensors over
it go along: views, ties, parameters that an optimizer holds. It cannot take NumPy arrays along, nor
whoever else goes by the address. So a storage moves only if torch allocated it and every tensor
over it is known; else its bytes are sent, as ever.
"""

from __future__ import annotations

import logging
import os
import resource
import weakref
from typing import Any

import numpy as np
import torch

from raydp_parallel.devices import forks
from raydp_parallel.devices.buffers import Descriptor, describe
from raydp_parallel.transport.links.mapped import keep_to_itself

log = logging.getLogger("raydp_parallel")

_PLACE = "/dev/shm"  # where torch makes its shared memory
_MOST = 8192
"""So many storages at most are exposed. Each is a file, and a mapping in every replica, which may
have 65,530.
"""

_SPARE = 64 * 1024 * 1024
"""Bytes of it that are left to others. Memory that cannot be had there ends the process when it is
written to.
"""

_MUCH = 1 << 16
"""Bytes that cannot be had from which that is worth a word: a copy of less is no loss to
speak of.
"""


class Exposed:
    """A storage that other processes see.

    Args:
        storage: The storage, moved to shared memory.
        descriptor: Where they find it.
    """

    def __init__(self, storage: Any, descriptor: Descriptor) -> None:
        self.storage = storage
        self.descriptor = descriptor

    def copy(self) -> np.ndarray:
        """Its bytes as they are now."""
        return _seen_by_numpy(self.storage).copy()


_known: weakref.WeakValueDictionary[int, Exposed] = weakref.WeakValueDictionary()


def expose(storage: Any, known: int, promised: int = 0) -> Exposed | None:
    """Move a storage to shared memory, if it may move and there is room. See `Link.expose`."""
    found = _known.get(storage._cdata)
    if found is not None:
        return found
    if _own and storage.data_ptr() in _own:
        return None
    theirs = _is_shared(storage)
    if not (theirs or (_may_move(storage, known) and _has_room(storage.nbytes(), promised))):
        return None
    file, size = storage._share_fd_cpu_()
    descriptor = describe(file, size, size)
    if not theirs:
        _fix(storage)
        _note_moved(storage.data_ptr(), file, descriptor)
    found = _known[storage._cdata] = Exposed(storage, descriptor)
    return found


_own: set[int] = set()
"""In a forked process: where what was moved lies. The file, which the parent shows, does not show
it any more.
"""

_moved: dict[int, tuple[int, Descriptor]] = {}
"""Where storages were moved to, and the file, which torch closes with the storage."""


def _note_moved(address: int, file: int, descriptor: Descriptor) -> None:
    if len(_moved) >= 2 * _MOST:
        for old in [*_moved]:
            if not _is_there(*_moved[old]):
                del _moved[old]
    _moved[address] = file, descriptor


def _is_there(file: int, meant: Descriptor) -> bool:
    try:
        found = os.fstat(file)
    except OSError:
        return False
    return (found.st_dev, found.st_ino) == (meant.volume, meant.inode)


def _keep_to_itself() -> None:
    """A forked child may write to its copy of the weights, and none of that is its parent's."""
    for address, (file, meant) in _moved.items():
        if _is_there(file, meant):
            keep_to_itself(address, meant.length, file)
            _own.add(address)
    _moved.clear()
    _known.clear()


forks.call_in_child(_keep_to_itself)


def _fix(storage: Any) -> None:
    """Let torch refuse to resize a storage: in shared memory it would not, and the process would
    end by a signal.

    It refuses once NumPy has looked at the memory.
    """
    _seen_by_numpy(storage)


def _seen_by_numpy(storage: Any) -> np.ndarray:
    looker = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
    found: np.ndarray = torch._C.TensorBase.numpy(looker)
    return found


def _is_shared(storage: Any) -> bool:
    """Whether it is in such memory already. By the other of torch's two strategies it would have a
    name there.
    """
    return (
        bool(storage.is_shared())
        and torch.multiprocessing.get_sharing_strategy() == "file_descriptor"
    )


def _may_move(storage: Any, known: int) -> bool:
    # One reference is the storage object's in our hand. Memory that torch did not allocate cannot
    # be resized.
    users = torch._C._storage_Use_Count(storage._cdata) - 1
    return (
        storage.device.type == "cpu"
        and storage.resizable()
        and not storage.is_shared()
        and users <= known
    )


def _has_room(size: int, promised: int) -> bool:
    if len(_known) >= min(_MOST, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4):
        return False
    try:
        found = os.statvfs(_PLACE)
    except OSError:
        _tell_once(size, f"{_PLACE} is missing")
        return False
    free = found.f_bavail * found.f_frsize - promised
    if free < size + _SPARE:
        mine = f"{max(0, free) / 1e6:.0f} MB left beside Ray's object store"
        _tell_once(size, f"{_PLACE} has {mine}, and {size / 1e6:.1f} MB are wanted")
    return free >= size + _SPARE


_told: set[str] = set()


def _tell_once(size: int, why: str) -> None:
    if size >= _MUCH and not _told:
        _told.add(why)
        log.warning("weights are copied to the replicas instead of shared: %s", why)
