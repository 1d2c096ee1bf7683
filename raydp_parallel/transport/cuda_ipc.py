"""Bytes between two processes on the same physical GPU: copied on the device, never through the
host.

[Note: what CUDA shares]
CUDA lends another process a whole allocation, by a handle that may be opened once per process, and
the memory must live on until the other has closed it; opening takes long. So what travels is not
each tensor's own memory but a segment of an arena, shared once and used again, as segments in the
machine's memory are: the sender copies on the device, records the segment's event, and sends a
descriptor; the receiver's stream waits for that event, copies out, and says with a later message
that it is done, once its copy has run. Torch counts who has opened a storage and keeps a freed one
until that is nobody; here a segment stays open while it is in use, and both sides let go of those
that no longer are. The memory of segments comes from a pool of its own, so that they do not lie
between tensors that come and go.

Upstream's first replica works on the master's own memory. Ours has a copy, also on the same GPU: a
forward that is run again, after a death or an edit behind a version, must not find what its first
attempt wrote.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raydp_parallel.devices.buffers import Arena, Descriptor, SharedBuffer, new_lease, new_token
from raydp_parallel.devices.cuda import DeviceBytes, on_host, spoiled
from raydp_parallel.devices.ranges import Attachment, MemoryRange
from raydp_parallel.transport.links.inline import InlineLink
from raydp_parallel.transport.links.link import Link, MappedBuffer, ReservedMemory

log = logging.getLogger("raydp_parallel")

LIMIT = 1 << 16
"""Bytes up to which a packet rides in the message."""

_SMALLEST = 1 << 20
_SAMPLE = 4096


class _DeviceSegment:
    """Memory of a GPU that another process can open."""

    def __init__(self, length: int, device: torch.device) -> None:
        self.used = 0
        # made in inference mode, it could not be written to outside
        with torch.inference_mode(False):
            self.tensor = torch.empty(length, dtype=torch.uint8, device=device)
        self.written = torch.cuda.Event(interprocess=True)
        self.written.record(torch.cuda.current_stream(device))  # before which there is no handle
        handle = self.tensor.untyped_storage()._share_cuda_()
        known = pickle.dumps((handle[1:], self.tensor.storage_offset(), self.written.ipc_handle()))
        self.descriptor = Descriptor(new_token(), "", 0, length, length, device=known)


class DeviceBuffer(SharedBuffer):
    """A segment of a GPU's memory lent out; free again when this is garbage.

    Args:
        segment: The memory.
        size: Bytes that count.
        free: Takes the segment back.

    Attributes:
        near: The link by which it goes to those who cannot open it.
    """

    def __init__(self, segment: _DeviceSegment, size: int, free: Any) -> None:
        self.segment = segment
        self.near: Link = InlineLink()
        self._elsewhere: Attachment = None
        self.descriptor = segment.descriptor._replace(size=size, lease=new_lease())
        self._return = weakref.finalize(self, free, segment)
        self._return.atexit = False

    def spend(self) -> None:
        """Nothing: who got it copies from it and never writes to it, so that it is lent again,
        whoever died.
        """

    @property
    def piece(self) -> MemoryRange:
        """The bytes, where they are."""
        return MemoryRange(
            0, self.descriptor.size, self, DeviceBytes(self.segment.tensor[: self.descriptor.size])
        )

    def elsewhere(self) -> Attachment:
        """The bytes for those who cannot open a GPU's memory: copied once, however many
        they are.
        """
        if self._elsewhere is None:
            self._elsewhere = self.near.send([self.piece], [0], self.descriptor.size)
        return self._elsewhere

    @property
    def array(self) -> np.ndarray:  # type: ignore[override]  # an attribute of slices that the host reads
        """A copy on the host, for a call that Ray carries."""
        found = on_host(self.piece)
        return found.owner.numpy()  # type: ignore[no-any-return]


class DeviceArena(Arena):
    """Segments of a GPU's memory, recycled by size.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self._pool: torch.cuda.MemPool | None = None
        self._making = threading.Lock()

    def take(self, size: int) -> DeviceBuffer:
        step = max(_SMALLEST, (1 << (size - 1).bit_length()) // 8)
        return DeviceBuffer(self._segment(-(-size // step) * step), size, self._give_back)

    def _new(self, length: int) -> _DeviceSegment:
        with self._making:  # torch refuses two threads at once that allocate in one pool
            if self._pool is None:
                with torch.cuda.device(self.device):  # a pool belongs to the current one
                    self._pool = _pool()
            with torch.cuda.use_mem_pool(self._pool, self.device):
                return _DeviceSegment(length, self.device)

    def fill(
        self, pieces: Sequence[MemoryRange], offsets: Sequence[int], size: int
    ) -> DeviceBuffer:
        """Copies of bytes that lie on the device, ready for another process."""
        lent = self.take(size)
        whole = lent.segment.tensor
        sources = [
            (offset, piece.origin.tensor)
            for piece, offset in zip(pieces, offsets, strict=True)
            if piece.origin
        ]
        torch._foreach_copy_(
            [whole[at : at + len(data)] for at, data in sources], [data for _, data in sources]
        )
        lent.segment.written.record(torch.cuda.current_stream(self.device))
        return lent


def _pool() -> torch.cuda.MemPool:
    """A pool whose free memory others get when there is none left elsewhere, where torch knows such
    pools.
    """
    try:
        return torch.cuda.MemPool(use_on_oom=True)
    except TypeError:
        return torch.cuda.MemPool()


class _Opened(DeviceBytes):
    """Another process's segment, seen from here."""

    def __init__(
        self, tensor: Tensor, written: torch.cuda.Event, whole: _Opened | None = None
    ) -> None:
        super().__init__(tensor)
        self._written = written
        self._whole = whole  # as long as a part is in use, it is open

    @property
    def tensor(self) -> Tensor:
        # Whatever reads it comes behind what the other process wrote.
        self._written.wait(torch.cuda.current_stream(self._tensor.device))
        return super().tensor

    def part(self, offset: int, size: int) -> _Opened:
        return _Opened(
            DeviceBytes(self._tensor).tensor[offset : offset + size],
            self._written,
            self._whole or self,
        )


_PATIENCE = 256
"""A segment that was not used while so many others were is closed. More than its owner's, who may
then free it.
"""


class Opener:
    """Opens another process's segments, each once while it is in use.

    Args:
        device: The GPU, as this process counts.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._open: weakref.WeakValueDictionary[int, _Opened] = weakref.WeakValueDictionary()
        self._known: dict[int, tuple[_Opened, int]] = {}
        self._clock = 0

    def __call__(self, descriptor: Descriptor) -> _Opened:
        """The bytes of a segment."""
        self._clock += 1
        if self._clock % _PATIENCE == 0:
            self._known = {
                t: known for t, known in self._known.items() if known[1] > self._clock - _PATIENCE
            }
        found = self._open.get(descriptor.token)
        if found is None:
            found = self._open[descriptor.token] = self._opened(descriptor)
        self._known[descriptor.token] = found, self._clock
        return found

    def _opened(self, descriptor: Descriptor) -> _Opened:
        handle, offset, event = pickle.loads(descriptor.device)
        try:
            # The other process may count its GPUs in another way: the handle is the same, the index
            # is this one's.
            storage = torch.UntypedStorage._new_shared_cuda(self._device.index or 0, *handle)
            written = torch.cuda.Event.from_ipc_handle(self._device, event)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if spoiled(self._device):
                raise  # it is this process that cannot open anything any more
            raise OSError(f"a GPU's memory cannot be opened: {error}") from error
        with torch.inference_mode(False):
            whole = torch.empty(0, dtype=torch.uint8, device=self._device)
            whole.set_(storage, offset, (descriptor.length,), (1,))
        return _Opened(whole, written)


class DeviceLink(Link):
    """What lies on the GPU goes by its memory, once that is known to work, and everything else by
    another link.

    Args:
        near: The other link.
        arena: Where the memory comes from; None for now.
    """

    def __init__(self, near: Link, arena: DeviceArena | None = None) -> None:
        self.near = near
        self.arena = arena

    @property
    def name(self) -> str:  # type: ignore[override]  # a constant in links that are one
        """The other link's, and this."""
        return f"{self.near.name} and CUDA IPC" if self.arena is not None else self.near.name

    @property
    def exposes(self) -> bool:  # type: ignore[override]
        """Whether the other link does."""
        return self.near.exposes

    def send(self, pieces: Sequence[MemoryRange], offsets: Sequence[int], size: int) -> Attachment:
        arena = self.arena
        if (
            arena is not None
            and size > LIMIT
            and all(_lies_on(arena.device, piece) for piece in pieces if piece.size)
        ):
            try:
                lent = arena.fill(pieces, offsets, size)
                lent.near = self.near
                return lent
            except torch.OutOfMemoryError:
                log.info(
                    "no room for %d bytes on the GPU beside those to be sent: they go "
                    "by another way",
                    size,
                )
            except RuntimeError as error:
                if not str(error).startswith("CUDA error"):
                    raise
                # which raises if the GPU works no more at all
                packet = self.near.send(pieces, offsets, size)
                self.arena = None
                refused(error)
                return packet
        return self.near.send(pieces, offsets, size)

    def room(self, size: int) -> ReservedMemory | None:
        # Copies on the device are over before anybody notices.
        return self.near.room(size) if self.arena is None else None

    def open(self, packet: Attachment) -> MemoryRange:
        return packet.piece if isinstance(packet, DeviceBuffer) else self.near.open(packet)

    def take(self, packet: Attachment) -> MemoryRange | None:
        return None if isinstance(packet, DeviceBuffer) else self.near.take(packet)

    def show(self, packet: Attachment, offset: int, size: int) -> MappedBuffer | None:
        return None if isinstance(packet, DeviceBuffer) else self.near.show(packet, offset, size)

    def expose(
        self, storage: Any, known: Callable[[], int], often: bool = False
    ) -> Attachment | None:
        return self.near.expose(storage, known, often)

    def withdraw(self) -> None:
        self.near.withdraw()

    def close(self) -> None:
        if self.arena is not None:
            self.arena.close()
        self.near.close()


def by_host(link: Link) -> Link:
    """A link without the memory of the GPU that both ends use, for what is wanted on the other's
    CPU.
    """
    return link.near if isinstance(link, DeviceLink) else link


def _lies_on(device: torch.device, piece: MemoryRange) -> bool:
    return piece.origin is not None and bool(piece.origin.tensor.device == device)


def reaching(near: Link) -> Link:
    """A link that may come to reach into a GPU's memory, where there is one."""
    return DeviceLink(near) if torch.cuda.is_available() else near


def gpu_in_use(uuid: str) -> torch.device | None:
    """This process's name for the GPU with some uuid, if something of this process lies there.

    A process sees all GPUs of its machine. To use one more costs half a gigabyte there, for memory
    that nothing needs.
    """
    if not uuid or not torch.cuda.is_initialized():
        return None
    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid) == uuid:
            return torch.device("cuda", index) if torch.cuda.memory_allocated(index) else None
    return None


_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def expandable() -> bool:
    """Whether torch's allocator makes segments that grow, which other processes cannot open, or
    hang over.
    """
    if any(
        "expandable_segments:true" in os.environ.get(name, "").replace(" ", "").lower()
        for name in _ALLOCATOR
    ):
        return True
    segments = torch.cuda.memory_snapshot() if torch.cuda.is_initialized() else ()
    return any(segment.get("is_expandable", False) for segment in segments)


def sample(arena: DeviceArena) -> tuple[DeviceBuffer, bytes]:
    """Some memory of the GPU to try, and what lies in it."""
    shown = os.urandom(_SAMPLE)
    data = torch.frombuffer(bytearray(shown), dtype=torch.uint8).to(arena.device)
    return arena.fill([MemoryRange(0, _SAMPLE, data, DeviceBytes(data))], [0], _SAMPLE), shown


def shows(piece: MemoryRange, expected: bytes) -> bool:
    """Whether another process's memory holds what it should."""
    if piece.origin is None:
        return False
    return bool(on_host(piece).owner.numpy().tobytes() == expected)


_COUNTERS = "/dev/shm"


def clear_after(process: int) -> None:
    """Remove the files in which a process that was ended counted who uses its GPU's memory: 80 KB
    each time.
    """
    for file in Path(_COUNTERS).glob(f"torch_{process}_*"):
        # another user's: of another container, which counts in another way
        with contextlib.suppress(OSError):
            file.unlink()


_told: set[str] = set()


def refused(error: object) -> None:
    """Say once that a GPU's memory cannot be shared, and what happens instead."""
    if not _told:
        _told.add("refused")
        log.warning(
            "CUDA IPC is refused (%s), as in some containers and with expandable segments: "
            "what goes between this "
            "process and a replica on the same GPU is copied through the machine's memory",
            " ".join(str(error).split())[:200],
        )


def lies_on_a_gpu(packet: Attachment) -> bool:
    """Whether a packet of this process lies there, where it can be compared."""
    return isinstance(packet, DeviceBuffer)
