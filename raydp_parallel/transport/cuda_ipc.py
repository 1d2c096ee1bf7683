"""Bytes between two processes on the same physical GPU: copied on the device, not through the host.

[Note: what CUDA shares]
CUDA shares a whole allocation with another process, by a handle that may be opened once per
process, and the memory must stay allocated until the other process has closed it; opening takes
long. So not each tensor's own memory is shared but a segment of an arena, which is shared once with
each process and used again, like segments in the machine's memory: the sender copies on the device,
records the segment's event, and sends a descriptor; the receiver's stream waits for that event,
copies from the segment, and says with a later message that it is done, once its copy has run. Torch
counts the processes that have opened a storage, and keeps a freed one until none is left; here a
segment stays open while it is in use, and both sides free segments that are no longer used. The
memory of segments comes from a pool of its own, so that they do not lie between short-lived
tensors.

[Note: peer copies]
With ``peer`` in `Options.gpu_paths` the driver has such memory on each GPU of its machine that a
replica is on, and copies there from the GPU where the bytes lie, and back. Torch orders a copy
between two GPUs behind the current streams of both. New weights are copied to each GPU once,
however many replicas are on it. Copies between two GPUs are wrong with some settings of a machine's
IOMMU, so each pair is tried first. CUDA is started in the driver on each of these GPUs, which takes
half a gigabyte there.

Upstream's first replica works on the memory of the user's module. Here it has a copy, also on the
same GPU: a forward that runs again, after a death or a change that no version shows, must not see
what its first attempt wrote.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing import reductions

from raydp_parallel.devices import trials
from raydp_parallel.devices.ambient_state import ALLOCATOR
from raydp_parallel.devices.buffers import Arena, Descriptor, SharedBuffer, new_lease, new_token
from raydp_parallel.devices.cuda import DeviceBytes, in_use, on_device, spoiled
from raydp_parallel.devices.process import Freed
from raydp_parallel.devices.ranges import Attachment, MemoryRange, copy_each, on_host
from raydp_parallel.transport.links.link import InlineLink, Link, MappedBuffer, ReservedMemory
from raydp_parallel.transport.links.shared import ForeignMemory

log = logging.getLogger("raydp_parallel")

_SMALLEST = 1 << 20

_INDEX = 6
"""Where torch's description of a shared tensor has the number of its GPU."""

_COUNTER = 11
"""Where it has the file and, behind it, the place of the counter of its readers."""


class _DeviceSegment:
    """Memory of a GPU that another process can open."""

    def __init__(self, length: int, device: torch.device) -> None:
        self.used = 0
        # a tensor made in inference mode could not be written to outside of it
        with torch.inference_mode(False):
            self.tensor = torch.empty(length, dtype=torch.uint8, device=device)
        self.written = torch.cuda.Event(interprocess=True)
        # there is no handle before the first record
        self.written.record(torch.cuda.current_stream(device))
        self.descriptor = Descriptor(new_token(), "", 0, length, length)
        self._handles: weakref.WeakKeyDictionary[object, bytes] = weakref.WeakKeyDictionary()

    def handle(self, reader: object) -> bytes:
        """What a process opens the memory with. Torch counts one opening for each handle, and frees
        the memory by these counts; so each process that reads there has a handle of its own.
        """
        found = self._handles.get(reader)
        if found is None:
            _, shared = reductions.reduce_tensor(self.tensor)
            # A reader that is gone may not have counted down, and torch would keep the memory.
            release = torch.UntypedStorage._release_ipc_counter
            weakref.finalize(reader, release, *shared[_COUNTER:][:2], device="cuda").atexit = False
            found = self._handles[reader] = pickle.dumps((shared, self.written.ipc_handle()))
        return found


class DeviceBuffer(SharedBuffer):
    """A segment of a GPU's memory that is lent; free again when this object is garbage.

    Args:
        segment: The memory.
        size: Bytes that are in use.
        freed: Gets the segment back.

    Attributes:
        near: The link by which the bytes are sent to processes that cannot open the segment.
    """

    def __init__(self, segment: _DeviceSegment, size: int, freed: Freed[Any]) -> None:
        self.segment = segment
        self.near: Link = InlineLink()
        self._elsewhere: Attachment = None
        self._copies: dict[torch.device, DeviceBuffer] = {}
        self._described = segment.descriptor._replace(size=size, lease=new_lease())
        self._watch = freed.watch(self, segment)

    @property
    def descriptor(self) -> Descriptor:  # type: ignore[override]  # an attribute of slices
        """The description for the only process that may read, as the driver of a replica."""
        return self.described(DeviceBuffer)  # which stands for that process

    def described(self, reader: object) -> Descriptor:
        """The description for one of several processes."""
        return self._described._replace(device=self.segment.handle(reader))

    def spend(self) -> None:
        """Nothing: a receiver copies from a segment and never writes to it, so it can be lent
        again, whichever process died.
        """

    @property
    def size(self) -> int:
        """Bytes that are in use."""
        return self._described.size

    @property
    def device(self) -> torch.device:
        """The GPU."""
        found: torch.device = self.segment.tensor.device
        return found

    @property
    def piece(self) -> MemoryRange:
        """The bytes, without a copy. The stream that reads them waits for what `fill` wrote."""
        run = self.segment.tensor[: self.size]
        return MemoryRange(0, self.size, self, _Opened(run, self.segment.written))

    def elsewhere(self) -> Attachment:
        """The bytes for processes that cannot open a GPU's memory, copied once for all of them."""
        if self._elsewhere is None:
            self._elsewhere = self.near.send([self.piece], [0], self.size)
        return self._elsewhere

    def on(self, arena: DeviceArena) -> DeviceBuffer | None:
        """The bytes in memory of an arena's GPU, copied once for all processes that read there;
        None if that GPU is no peer, or has no room.
        """
        if arena.device == self.device:
            return self
        if self.device not in arena.peers:
            return None
        found = self._copies.get(arena.device)
        if found is None:
            try:
                found = arena.fill([self.piece], [0], self.size)
            except torch.OutOfMemoryError:
                return None
            except RuntimeError as error:
                if not str(error).startswith("CUDA error"):
                    raise
                arena.peers.discard(self.device)  # by the host, which raises if a GPU has failed
                return None
            # What writes to this segment next waits until it was read.
            self.segment.written.record(torch.cuda.current_stream(self.device))
            self._copies[arena.device] = found
        return found

    @property
    def array(self) -> np.ndarray:  # type: ignore[override]  # an attribute of slices that the host reads
        """A copy on the host, for a call that is made through Ray."""
        found = on_host(self.piece)
        return found.owner.numpy()  # type: ignore[no-any-return]


class Addressed(SharedBuffer):
    """A segment that is lent to one of several processes.

    Args:
        lent: The segment.
        reader: Stands for that process.
    """

    def __init__(self, lent: DeviceBuffer, reader: object) -> None:
        self._lent = lent  # which is free again once this object is garbage, too
        self.descriptor = lent.described(reader)

    def spend(self) -> None:
        """Nothing. See `DeviceBuffer.spend`."""


class DeviceArena(Arena):
    """Segments of a GPU's memory, recycled by size.

    Args:
        device: The GPU.

    Attributes:
        trial: The memory of a trial, while it is made.
        peers: The other GPUs from which and to which copies were right.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.trial: DeviceBuffer | None = None
        self.peers: set[torch.device] = set()
        self._pool: torch.cuda.MemPool | None = None
        self._making = threading.Lock()

    def take(self, size: int) -> DeviceBuffer:
        step = max(_SMALLEST, (1 << (size - 1).bit_length()) // 8)
        return DeviceBuffer(self._segment(-(-size // step) * step), size, self._freed)

    def _new(self, length: int) -> _DeviceSegment:
        with self._making:  # torch refuses two threads that allocate in one pool at the same time
            if self._pool is None:
                with torch.cuda.device(self.device):  # a pool belongs to the current one
                    self._pool = _pool()
            with torch.cuda.use_mem_pool(self._pool, self.device):
                return _DeviceSegment(length, self.device)

    def fill(
        self,
        pieces: Sequence[MemoryRange],
        offsets: Sequence[int],
        size: int,
        lent: DeviceBuffer | None = None,
    ) -> DeviceBuffer:
        """Copies of bytes that lie on the device, or on a peer of it, ready for another process; in
        memory that is lent to it already, if that is given.
        """
        lent = self.take(size) if lent is None else lent
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for piece, offset in zip(pieces, offsets, strict=True):
            if piece.origin is not None:
                into, of = piece.origin.placed(lent.segment.tensor[offset : offset + piece.size])
                targets += into
                sources += of
        stream = torch.cuda.current_stream(self.device)
        # Another stream may still have to write what nothing read.
        lent.segment.written.wait(stream)
        copy_each(targets, sources)
        lent.segment.written.record(stream)
        return lent


def _pool() -> torch.cuda.MemPool:
    """A memory pool that gives its free memory to other allocations when there is no other, where
    torch has such pools.
    """
    try:
        return torch.cuda.MemPool(use_on_oom=True)
    except TypeError:
        return torch.cuda.MemPool()


class _Opened(DeviceBytes):
    """A segment, of this process or opened from another one, behind the event of its writer."""

    def __init__(
        self, tensor: Tensor, written: torch.cuda.Event, whole: _Opened | None = None
    ) -> None:
        super().__init__(tensor)
        self._written = written
        self._whole = whole  # kept open as long as a part is in use

    @property
    def tensor(self) -> Tensor:
        # Reads wait for what the owner wrote.
        self._written.wait(torch.cuda.current_stream(self._tensor.device))
        return super().tensor

    def part(self, offset: int, size: int) -> _Opened:
        tensor = DeviceBytes(self._tensor).tensor[offset : offset + size]
        return _Opened(tensor, self._written, self._whole or self)


_PATIENCE = 256
"""A segment that was not used by so many calls is closed. More than the owner's number, so that the
owner frees a segment first.
"""


class Opener:
    """Opens another process's segments, each once while it is in use.

    Args:
        device: The GPU, by this process's index.
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
            oldest = self._clock - _PATIENCE
            # in place: other threads of the driver open segments meanwhile
            for token, (_, used) in [*self._known.items()]:
                if used <= oldest:
                    self._known.pop(token, None)
        found = self._open.get(descriptor.token)
        if found is None:
            found = self._open[descriptor.token] = self._opened(descriptor)
        self._known[descriptor.token] = found, self._clock
        return found

    def _opened(self, descriptor: Descriptor) -> _Opened:
        shared, event = pickle.loads(descriptor.device)
        # The index is this process's: the other process may number the GPUs in another order.
        own = (*shared[:_INDEX], self._device.index or 0, *shared[_INDEX + 1 :])
        try:
            with torch.inference_mode(False):
                whole = reductions.rebuild_cuda_tensor(*own)
            written = torch.cuda.Event.from_ipc_handle(self._device, event)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if spoiled(self._device):
                raise  # this process cannot use its GPU any more
            raise OSError(f"a GPU's memory cannot be opened: {error}") from error
        return _Opened(whole, written)


class DeviceLink(Link):
    """Sends bytes on a GPU by its memory, once that is known to work, and all others by another
    link.

    Args:
        near: The other link.
        arena: An arena of GPU memory that is known to work.
        peers: Whether GPUs that this process does not use otherwise get arenas, too.

    Attributes:
        arenas: The arenas that are known to work, by their GPU.
        peers: As given.
    """

    def __init__(self, near: Link, arena: DeviceArena | None = None, peers: bool = False) -> None:
        self.near, self.peers = near, peers
        self.arenas = {arena.device: arena} if arena is not None else {}
        self._only: torch.device | None = None

    def to(self, device: torch.device) -> DeviceLink:
        """A link for a process that can open the memory of one GPU alone."""
        if self.arenas.keys() <= {device} and not self.peers:
            return self
        found = DeviceLink(self.near)
        found.arenas, found._only = self.arenas, device
        return found

    @property
    def name(self) -> str:  # type: ignore[override]  # a constant in links that are one
        """The other link's name, and this link's."""
        if any(arena.peers for arena in self.arenas.values()):
            return f"{self.near.name}, CUDA IPC and peer copies"
        return f"{self.near.name} and CUDA IPC" if self.arenas else self.near.name

    @property
    def exposes(self) -> bool:  # type: ignore[override]
        """Whether the other link exposes storages."""
        return self.near.exposes

    def send(self, pieces: Sequence[MemoryRange], offsets: Sequence[int], size: int) -> Attachment:
        # Small ones too: to read them for the message the host would wait for all work before.
        arena = self._arena_for(pieces) if size else None
        if arena is not None:
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
                # raises if the GPU has failed for good
                packet = self.near.send(pieces, offsets, size)
                self.arenas.pop(arena.device, None)
                refused(error)
                return packet
        return self.near.send(pieces, offsets, size)

    def _arena_for(self, pieces: Sequence[MemoryRange]) -> DeviceArena | None:
        """The arena for the GPU on which all the pieces lie: one on it, or on a peer of it that
        alone the other process can open.
        """
        if not self.arenas:
            return None
        places = {piece.origin.device if piece.origin else None for piece in pieces if piece.size}
        device: Any = places.pop() if len(places) == 1 else None
        arena = self.arenas.get(self._only or device)
        return arena if arena is not None and device in (arena.device, *arena.peers) else None

    def room(self, size: int) -> ReservedMemory | None:
        # Nothing is reserved where the GPU copies: such copies are too fast to overlap with.
        return None if self.arenas else self.near.room(size)

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
        for arena in self.arenas.values():
            arena.close()
        self.near.close()


def by_host(link: Link) -> Link:
    """A link without the memory of the GPU that both ends use, for bytes that the receiver needs on
    its CPU.
    """
    return link.near if isinstance(link, DeviceLink) else link


def reaching(near: Link, peers: bool) -> Link:
    """A link that can be extended to a GPU's memory, on a machine with GPUs."""
    return DeviceLink(near, peers=peers) if torch.cuda.is_available() else near


def gpu_in_use(uuid: str, peers: bool = False) -> torch.device | None:
    """This process's name for the GPU with some uuid, if this process has memory there or, with
    ``peers``, on any GPU.

    A process sees all GPUs of its machine. Using one more costs half a gigabyte of that GPU's
    memory, for nothing where no bytes are copied from one to the other.
    """
    found = in_use()
    if peers and found:
        found = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    for device in found:
        if str(torch.cuda.get_device_properties(device).uuid) == uuid:
            return device
    return None


def try_peers(arena: DeviceArena) -> bool:
    """Find out between which GPUs of this process and that of an arena copies are right; returns
    whether the arena is of use.
    """
    used = in_use()
    for other in used:
        if other != arena.device and other not in arena.peers:
            crosses = partial(_crosses, arena.device, other)
            if trials.passes("peer", arena.device, crosses):
                arena.peers.add(other)
    return arena.device in used or bool(arena.peers)


def _crosses(one: torch.device, other: torch.device) -> bool:
    """Whether bytes of each of two GPUs arrive on the other one: in the same memory each time, from
    a GPU that is busy.
    """
    for here, there in ((one, other), (other, one)):
        target = torch.empty(trials.SIZE, dtype=torch.uint8, device=there)
        for number in range(trials.ROUNDS):
            copy_each([target], [trials.late(number, here)])
            if not torch.equal(on_host(on_device(target)).owner, trials.contents(number)):
                return False
    return True


def expandable() -> bool:
    """Whether torch's allocator makes expandable segments, which other processes cannot open, or
    hang on opening.
    """
    for name in ALLOCATOR:
        settings = os.environ.get(name, "").replace(" ", "").lower()
        if "expandable_segments:true" in settings:
            return True
    segments = torch.cuda.memory_snapshot() if torch.cuda.is_initialized() else ()
    return any(segment.get("is_expandable", False) for segment in segments)


def sample(arena: DeviceArena, number: int) -> DeviceBuffer:
    """The bytes of a round of the trial in memory of a GPU that is busy: the same memory in each
    round.
    """
    data = trials.late(number, arena.device)
    piece = MemoryRange(0, trials.SIZE, data, DeviceBytes(data))
    arena.trial = arena.fill([piece], [0], trials.SIZE, arena.trial)
    return arena.trial


def sees(found: ForeignMemory, number: int) -> bool:
    """Whether another process's memory holds the bytes of a round of the trial."""
    piece = found.piece()
    return piece.origin is not None and torch.equal(on_host(piece).owner, trials.contents(number))


_COUNTERS = "/dev/shm"


def clear_after(process: int) -> None:
    """Remove the files in which a process that was ended counted the users of its GPU memory, 80 KB
    each time.
    """
    for file in Path(_COUNTERS).glob(f"torch_{process}_*"):
        # the file of another user, or of another container that has its own process ids
        with contextlib.suppress(OSError):
            file.unlink()


_told: set[str] = set()


def refused(error: object) -> None:
    """Log once that a GPU's memory cannot be shared, and what is done instead."""
    if not _told:
        _told.add("refused")
        log.warning(
            "CUDA IPC is refused (%s), as in some containers and with expandable segments: "
            "what goes between this "
            "process and a replica on the same GPU is copied through the machine's memory",
            " ".join(str(error).split())[:200],
        )


def lies_on_a_gpu(packet: Attachment) -> bool:
    """Whether a packet of this process lies on a GPU, where it can be compared."""
    return isinstance(packet, DeviceBuffer)
